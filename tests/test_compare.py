"""Two timelines compared: what grew at the peak adds up to the byte, and a gate says no exactly where it should."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import timelines

from everybyte.cli import main
from everybyte.compare import KEYS, allowance, compare
from everybyte.timeline import Recorder
from everybyte.units import MB, MiB


def run_of(*tensors, info=None):
    """A timeline of allocations (module, op, bytes), all live at the end."""
    recorder = Recorder()
    for module, op, nbytes in tensors:
        recorder.alloc(nbytes, module=module, op=op, device="cuda:0")
    return recorder.finish(info or {})


BEFORE = run_of(("mlp", "mm", 600), ("mlp", "gelu", 200), ("norm", "add", 200))
AFTER = run_of(("mlp", "mm", 600), ("mlp", "gelu", 300), ("head", "mm", 50))


def test_the_differences_of_holders_add_up_to_that_of_the_peaks_and_the_largest_growth_comes_first():
    found = compare(BEFORE, AFTER)
    assert (found.before, found.after, found.difference) == (1000, 950, -50)
    rows = [(change.name, change.before, change.after, change.difference) for change in found.changes]
    assert rows == [("mlp", 800, 900, 100), ("head", 0, 50, 50), ("norm", 200, 0, -200)]
    by_op = {change.name: change.difference for change in compare(BEFORE, AFTER, "op").changes}
    assert by_op == {"gelu": 100, "mm": 50, "add": -200}


@settings(max_examples=25)
@given(timelines(most=20), timelines(most=20), st.sampled_from(KEYS))
def test_nothing_is_lost_between_any_two_runs(before, after, key):
    found = compare(before, after, key)
    assert (
        sum(change.difference for change in found.changes) == found.difference == after.peak_bytes - before.peak_bytes
    )
    assert compare(after, before, key).difference == -found.difference
    assert compare(before, before, key).changes == ()


@pytest.mark.parametrize(
    "text, before, nbytes",
    [
        ("+1%", 1000, 10), ("1%", 1099, 10), ("+0.5 %", 1000, 5), ("+10MB", 1, 10 * MB), ("10 MiB", 1, 10 * MiB),
        ("0", 5, 0), ("+0%", 5, 0), ("+12", 5, 12), ("+33.3%", 10**15, 333 * 10**12),
    ],
)  # fmt: skip
def test_a_growth_is_a_share_or_a_size(text, before, nbytes):
    assert allowance(text, before) == nbytes


@pytest.mark.parametrize("text", ["", "+", "-1%", "1 %%", "lots", "10 XB", "1e3", "%"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(ValueError, match=r"is no growth|is not a size"):
        allowance(text, 1000)


@pytest.fixture
def diff(tmp_path, capsys):
    """A function from two timelines and arguments to exit code, stdout and stderr."""

    def diff(before, after, *args):
        files = [tmp_path / "before.parquet", tmp_path / "after.parquet"]
        for timeline, file in zip((before, after), files, strict=True):
            timeline.to_parquet(file)
        return main(["diff", *map(str, files), *args]), *capsys.readouterr()

    return diff


def test_a_growth_beyond_what_is_allowed_is_a_no_and_one_byte_less_is_not(diff):
    grown = run_of(("mlp", "mm", 600), ("mlp", "gelu", 210), ("norm", "add", 200))
    assert diff(BEFORE, grown, "--max", "+1%")[0] == 0
    assert diff(BEFORE, grown, "--max", "10")[0] == 0
    code, out, err = diff(BEFORE, grown, "--max", "9")
    assert code == 1 and "mlp" in out
    assert (
        err.startswith("everybyte: the peak grew by 10 B (+1.00%), and may by 9 B; most in mlp")
        and err.count("\n") == 1
    )
    assert diff(BEFORE, grown)[0] == 0
    assert diff(grown, BEFORE, "--max", "0")[0] == 0


def test_who_grew_most_is_told_as_the_table_tells_it(diff):
    blocks = [(f"h.{i}.attn", "mm", 100) for i in range(30)]
    before, after = (
        run_of(*[(m, op, n + more) for m, op, n in blocks], ("head", "mm", 100 + 5 * more)) for more in (0, 9)
    )
    code, out, err = diff(before, after, "--max", "0")
    assert code == 1 and "+270 B  30 × h.*.attn\n" in out and "+45 B  head\n" in out
    assert "most in 30 × h.*.attn, 270 B: " in err


def test_the_json_holds_both_peaks_and_each_change(diff):
    code, out, _ = diff(BEFORE, AFTER, "--json", "--by", "op", "--max", "0")
    answer = json.loads(out)
    assert (code, answer["peak_requested_before"], answer["peak_requested_after"], answer["over"]) == (
        0,
        1000,
        950,
        False,
    )
    assert answer["changes"][0] == {"name": "gelu", "before": 200, "after": 300, "difference": 100}
    assert sum(change["difference"] for change in answer["changes"]) == answer["difference"] == -50


def test_runs_under_other_rules_are_told_and_an_uncertain_one_passes_no_gate(diff):
    code, out, _ = diff(BEFORE, run_of(("mlp", "mm", 1), info={"torch": "2.13.0"}))
    assert code == 0 and "torch: None before, 2.13.0 after" in out
    uncertain = run_of(("mlp", "mm", 1), info={"conditional": ["train.py:3"]})
    code, _, err = diff(BEFORE, uncertain, "--max", "+1%")
    assert code == 3 and "train.py:3" in err


def test_a_table_of_many_modules_is_cut_and_keeps_its_sum(diff):
    many = run_of(
        *((f"blocks.{i}.mlp", "mm", 10) for i in range(40)), *((f"other_{i}x", "mm", i + 1) for i in range(40))
    )
    code, out, _ = diff(BEFORE, many)
    assert code == 0 and "40 × blocks.*.mlp" in out
    assert out.count("\n") < 40


@pytest.mark.parametrize("content", [None, b"", b"PAR1", b"\x00" * 999, "other"])
def test_a_file_that_is_no_timeline_is_bad_input(tmp_path, capsys, content):
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    BEFORE.to_parquet(good)
    if content == "other":
        pq.write_table(pa.table({"x": [1]}), bad)
    elif content is not None:
        bad.write_bytes(content)
    for files in ((good, bad), (bad, good)):
        assert main(["diff", *map(str, files)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "bad.parquet" in err and err.count("\n") == 1


def test_hostile_names_and_metadata_do_nothing(diff, tmp_path, capsys):
    code, out, err = diff(BEFORE, run_of(("\x1b[2J\n" + "x" * 999, "mm", 5_000)), "--max", "0")
    assert code == 1 and "\x1b" not in out + err and err.count("\n") == 1
    for metadata in (b"[1, 2]", b"{", b'"x"', b"\xff"):
        path = tmp_path / "odd.parquet"
        pq.write_table(BEFORE.table.replace_schema_metadata({b"everybyte": metadata}), path)
        assert main(["diff", str(path), str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
