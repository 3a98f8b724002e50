"""Recording the book's cases on a GPU: rehearsed small, where there is none, with the host in the GPU's place."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from fake_gpu import FakeGPU
from packaging.requirements import Requirement

import everybyte as eb
from everybyte import record, recordings
from everybyte.cases import FULL, SMALL, cases
from everybyte.cli import main
from everybyte.models import TFTConfig


# The TFT's step has 28,000 ops whatever its size: it is traced below, and measured in tests/test_tft_memory.py. The
# decoder checkpointed without dropout is measured in tests/test_gpt.py.
@pytest.mark.parametrize(
    "name", [name for name in cases(SMALL) if not name.startswith("tft") and "-no-dropout-checkpoint" not in name]
)
def test_a_case_small_and_on_the_host_takes_what_its_trace_says(name):
    peaks = []
    for run in (eb.trace(rules="cpu"), eb.measure(device="cpu")):
        with run:
            cases(SMALL)[name].body(run)
        peaks.append(run.timeline.without("scratch").peak_bytes)
    assert peaks[0] == peaks[1] > 0


def test_the_cases_are_the_book_s_at_full_size():
    full = cases()
    assert {f"tft-{way}-{batch}" for way in ("loop", "streamed") for batch in (4, 8, 16, 32, 64)} < full.keys()
    assert {
        f"gpt-{way}{kind}" for way in ("eager", "fused") for kind in ("", "-no-dropout", "-checkpoint")
    } < full.keys()
    with eb.trace(rules="cuda", gpu="h200") as run:
        full["gpt-fused"].body(run)
    parameters = run.timeline.frame().query("category == 'parameter' and action == 'alloc'")["nbytes"].sum()
    assert parameters == 2 * 1_278_332_928
    assert FULL.tft == TFTConfig()  # the model of the TFT's chapters


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


def no_kernel(*device):
    raise RuntimeError("CUDA error: no kernel image is available\nCompile with `TORCH_USE_CUDA_DSA`")


def old_driver():
    warnings.warn("The NVIDIA driver\nis too old", stacklevel=2)
    return False


NAMES = ["gpt-eager", "prefill-fused"]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    out, lines = tmp_path_factory.mktemp("recordings"), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeGPU(monkeypatch)
        record.record(out, NAMES, tgz=True, say=lines.append, sizes=SMALL)
    assert [line.split()[2] for line in lines] == [f"{name}:" for name in NAMES]
    return out


@pytest.fixture
def folder(made_once, tmp_path):
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a4000"


def test_a_recording_has_all_that_its_check_asks_for(folder):
    assert folder.name == "a4000"
    assert recordings.faults(folder) == []
    assert main(["record", "--check", str(folder)]) == main(["record", "--check", str(folder.parent)]) == 0
    recording = recordings.read(folder)
    assert recording.results.schema.remove_metadata() == recordings.SCHEMA
    assert recording.results["status"].to_pylist() == ["recorded"] * len(NAMES)
    with tarfile.open(folder.parent / "a4000.tgz") as archive:
        assert {Path(name).name for name in archive.getnames()} == {"a4000", *(path.name for path in folder.iterdir())}


def test_what_is_recorded_is_the_measured_run_and_what_is_predicted_is_its_trace(folder):
    row = recordings.read(folder).rows()[0]
    case = cases(SMALL)["gpt-eager"]
    with eb.measure(device="cpu") as run:
        case.body(run)
    assert row["recorded_requested"] == run.timeline.peak_bytes
    assert row["recorded_rounded"] == run.timeline.rounded(512).peak_bytes
    assert row["predicted_requested"] > 0
    table = recordings.read(folder).frame().loc["gpt-eager"]
    assert table.loc["requested", "difference"] == row["predicted_requested"] - row["recorded_requested"]
    assert set(table.index) == {*recordings.COMPARED, "context", "driver", "before"}


def test_a_page_says_what_is_recorded_or_that_nothing_is(folder):
    (row,) = [row for row in recordings.read(folder).rows() if row["case"] == "gpt-eager"]
    beside = {"traced": row["predicted_requested"], "recorded": row["recorded_requested"]}
    said, off = recordings.recorded("gpt-eager", folder.parent), beside["traced"] - beside["recorded"]
    assert said.startswith("On NVIDIA RTX A4000, 20")
    assert f"{beside['recorded']:,} B" in said
    assert (f"the trace has {abs(off):,} B {'more' if off > 0 else 'fewer'}" if off else "as traced") in said
    assert recordings.recorded("gpt-fused", folder.parent) == "No GPU has run it yet."
    assert recordings.peaks("gpt-eager", folder.parent) == {"NVIDIA RTX A4000": beside}
    assert recordings.peaks("gpt-fused", folder.parent) == {}
    with pytest.raises(ValueError, match="no case 'gpt'; there are gpt-eager"):
        recordings.recorded("gpt")


def test_a_recording_is_never_overwritten(folder, gpu):
    with pytest.raises(ValueError, match="holds a recording already"):
        record.record(folder.parent, ["gpt-eager"], sizes=SMALL)


def rows(*args, **kwargs):
    return recordings.read(record.record(*args, **kwargs, say=lambda line: None, sizes=SMALL)).rows()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("of a case"), "ValueError: of a case"), (SystemExit(9), "its process died, exit code 9")],
)
def test_a_case_that_fails_or_dies_is_a_row_with_its_reason(gpu, tmp_path, monkeypatch, error, reason):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", fail)
    (row,) = rows(tmp_path, ["gpt-eager"])
    assert (row["status"], row["reason"]) == ("failed", reason)


def test_a_case_that_does_not_fit_is_skipped_and_says_by_how_much(gpu, tmp_path):
    gpu.total = gpu.context + 2**20
    (row,) = rows(tmp_path, ["head-full"])
    assert row["status"] == "skipped"
    assert row["reason"] == f"predicted {row['predicted_allocated']:,} B allocated, {2**20:,} B are free"


def test_a_case_ends_with_the_budget_and_none_is_begun_after_it(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", lambda *args: time.sleep(60))
    first, second = rows(tmp_path, ["gpt-eager", "head-full"], budget=3)
    assert first["status"] == "failed"
    assert first["reason"].startswith("not done in ")
    assert (second["status"], second["reason"]) == ("skipped", "3 s were almost over")


def test_a_case_that_runs_out_of_memory_is_a_row_with_the_numbers_and_its_timeline(monkeypatch, tmp_path):
    def edit(trace):
        trace.append({"action": "oom", "device_free": 2**20, "size": 2**35, "stream": 0, "frames": []})

    FakeGPU(monkeypatch, edit)
    made = record.record(tmp_path, ["head-full"], say=lambda line: None, sizes=SMALL)
    (row,) = recordings.read(made).rows()
    assert row["status"] == "out of memory"
    assert "34,359,738,368 B" in row["reason"]
    assert len(eb.Timeline.from_parquet(made / "head-full.parquet")) > 0
    assert recordings.faults(made) == []


def test_stopped_in_the_middle_of_a_case_it_leaves_a_sound_recording_of_those_before(gpu, tmp_path, monkeypatch):
    real = record._apart

    def apart(work, limit, *args):
        if work is record._case and args[0].name == "gpt-eager":
            args[-1].write_bytes(b"half a timeline")
            raise KeyboardInterrupt
        return real(work, limit, *args)

    monkeypatch.setattr(record, "_apart", apart)
    with pytest.raises(KeyboardInterrupt):
        rows(tmp_path, ["head-full", "gpt-eager"])
    (left,) = tmp_path.iterdir()
    assert recordings.faults(left) == []
    assert recordings.read(left).results["case"].to_pylist() == ["head-full"]


@pytest.mark.parametrize(
    ("of", "name", "answer", "why"),
    [
        (torch.version, "hip", "6.4", "this is an AMD GPU"),
        (os, "environ", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF is set: unset it"),
        (torch.cuda, "synchronize", no_kernel, "runs nothing on NVIDIA RTX A4000: CUDA error: no kernel image"),
        (torch.cuda, "is_available", old_driver, "PyTorch finds no GPU here (The NVIDIA driver is too old): record on"),
    ],
)
def test_a_gpu_that_cannot_be_recorded_is_refused_in_one_line(gpu, tmp_path, monkeypatch, of, name, answer, why):
    monkeypatch.setattr(of, name, answer)
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        record.record(tmp_path)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_speaks_against_a_new_recording_is_said_at_once(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpu.end(index) + " MIG 1g.10gb")
    monkeypatch.setattr(record.record, "__defaults__", (*record.record.__defaults__[:-1], SMALL))
    assert main(["record", "--out", str(tmp_path), "--only", "head-full"]) == 0
    said = capsys.readouterr().out
    assert "1 recorded, 0 out of memory, 0 skipped, 0 failed" in said
    assert "to be mended before it is contributed: provenance.json: no GPU 'NVIDIA RTX A4000 MIG 1g.10gb'" in said


def rewrite(folder, **changes):
    """Changes the first row of the results, and lists the files as they then are."""
    rows = recordings.read(folder).rows()
    rows[0].update(changes)
    pq.write_table(pa.Table.from_pylist(rows, recordings.SCHEMA), folder / "results.parquet")
    relist(folder)


def relist(folder, **changes):
    document = json.loads((folder / "provenance.json").read_text())
    document["files"] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.parquet")}
    document.update(changes)
    (folder / "provenance.json").write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def test_a_recording_without_provenance_is_refused(folder, capsys):
    (folder / "provenance.json").unlink()
    assert recordings.faults(folder) == [f"{folder} is no recording: provenance.json is missing"]
    assert main(["record", "--check", str(folder)]) == 1
    assert "is refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"driver": None}, "'driver' is missing"),
        ({"commit": ""}, "'commit' is missing"),
        ({"total": "16 GB"}, "'total' is missing, or no int"),
        ({"date": (datetime.now(UTC) + timedelta(days=2)).isoformat()}, "lies in the future"),
        ({"date": "2026-01-01T00:00:00"}, "has no time zone"),
        ({"date": "yesterday"}, "is no date"),
        ({"gpu": "NVIDIA GeForce RTX 9999"}, "no GPU 'NVIDIA GeForce RTX 9999' is known"),
        ({"date": "1999-01-01T00:00:00+00:00"}, "or before 2026"),
        ({"gpu": "NVIDIA RTX A4000 <!--"}, "no GPU 'NVIDIA RTX A4000 <!--' is known"),
        ({"cuda": "13.0\x1b[2J"}, "control characters"),
        ({"commit": "main"}, "'main' is no commit"),
        ({"capability": [9, 0]}, "is of capability [8, 6], not [9, 0]"),
        ({"total": 10**400}, "B of memory, not 1"),
        ({"gpu": "NVIDIA H200"}, "NVIDIA H200 has 150,109,945,856 B of memory, not 16,000,000,000"),
    ],
)
def test_provenance_that_cannot_be_is_refused(folder, changes, fault):
    relist(folder, **changes)
    assert any(fault in found for found in recordings.faults(folder))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (lambda row: {"recorded_allocated": row["recorded_reserved"] + 512}, "is more than reserved"),
        (lambda row: {"recorded_requested": row["recorded_requested"] - 8}, "B in its timeline"),
        (lambda row: {"recorded_rounded": row["recorded_rounded"] + 1}, "no multiple of 512 B"),
        (lambda row: {"recorded_reserved": row["recorded_reserved"] + 512}, "no multiple of 2,097,152 B"),
        (lambda row: {"recorded_reserved": 2**35}, "is more than the GPU's"),
        (lambda row: {"recorded_driver": row["recorded_context"] - 1}, "context"),
        (lambda row: {"recorded_context": -1}, "recorded_context is -1"),
        (lambda row: {"recorded_before": None}, "recorded, but without recorded_before"),
        (lambda row: {"seconds_traced": float("nan")}, "seconds_traced is nan"),
        (lambda row: {"seconds_traced": float("inf")}, "seconds_traced is inf"),
        (lambda row: {"predicted_requested": row["predicted_rounded"] + 1}, "predicted_requested"),
        (lambda row: {"predicted_reserved": row["predicted_reserved"] + 1}, "no multiple of 2,097,152 B"),
        (lambda row: {"recorded_nvml": 2**35}, "is more than the GPU's"),
        (lambda row: {"what": "a step\x1b[2J"}, "control characters"),
        (lambda row: {"status": "skipped"}, "no reason given"),
        (lambda row: {"status": "skipped", "reason": "no time"}, "skipped, and yet recorded_requested"),
        (lambda row: {"status": "skipped", "reason": "no time"}, "the timeline of no case that ran"),
        (lambda row: {"status": "out of memory", "reason": "so", "recorded_requested": 0}, "B in its timeline"),
        (lambda row: {"status": "well"}, "status 'well'"),
        (lambda row: {"case": "tft-loop-5"}, "no case of the book"),
        (lambda row: {"case": "prefill-fused"}, "is there 2 times"),
    ],
)
def test_numbers_that_contradict_themselves_are_refused(folder, changes, fault):
    rewrite(folder, **changes(recordings.read(folder).rows()[0]))
    assert any(fault in found for found in recordings.faults(folder)), recordings.faults(folder)


def test_a_table_of_other_columns_or_types_is_refused(folder):
    table = pq.read_table(folder / "results.parquet")
    for wrong in (
        table.drop(["status"]),
        table.cast(table.schema.set(4, pa.field("predicted_requested", pa.float64()))),
    ):
        pq.write_table(wrong, folder / "results.parquet")
        relist(folder)
        assert any("its columns are not those" in found for found in recordings.faults(folder))


def test_a_timeline_that_frees_what_it_never_allocated_or_is_of_another_gpu_is_refused(folder):
    path = folder / "gpt-eager.parquet"
    timeline = eb.Timeline.from_parquet(path)
    for table, info, fault in (
        (timeline.table.slice(1), timeline.info, "frees what it never allocated"),
        (timeline.table, {**timeline.info, "gpu": "NVIDIA H200"}, "its timeline is of NVIDIA H200"),
        (timeline.table, {**timeline.info, "evidence": "traced"}, "not recorded on a GPU"),
    ):
        eb.Timeline(table, info).to_parquet(path)
        relist(folder)
        assert any(fault in found for found in recordings.faults(folder))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"gpu": "a", "gpu": "b"}', "says one thing twice, among gpu, gpu"),
        ("[" * 100_000, "recursion"),
        ("[]", "holds no object"),
        (" " * 2**21, "has more than 1,048,576 B"),
    ],
)
def test_provenance_that_is_hostile_json_is_refused_in_one_line(folder, text, fault):
    (folder / "provenance.json").write_text(text)
    (found,) = recordings.faults(folder)
    assert fault in found


def test_a_link_a_folder_of_another_name_and_damaged_notes_of_a_timeline_are_refused(folder, tmp_path):
    path = folder / "gpt-eager.parquet"
    timeline = eb.Timeline.from_parquet(path)
    eb.Timeline(timeline.table, {**timeline.info, "figures": 5}).to_parquet(path)
    relist(folder)
    assert any("B, but None B in its timeline" in found for found in recordings.faults(folder))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    other = folder.rename(tmp_path / "h200")
    found = recordings.faults(other)
    assert "gpt-eager.parquet: not the file that provenance.json lists" in found
    assert "the folder of NVIDIA RTX A4000 is called a4000" in found


def test_the_commit_is_that_of_the_library_s_own_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "__file__", str(tmp_path / "src" / "record.py"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "record.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for more in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "of something else"]):
        subprocess.run([*git, *more], check=True)
    assert record._commit() == "unknown, copied tree"
    for more in (["add", "."], ["commit", "-q", "-m", "the library"]):
        subprocess.run([*git, *more], check=True)
    assert len(record._commit()) == 40
    (tmp_path / "src" / "record.py").write_text("changed")
    assert record._commit().endswith("-dirty")


def test_a_file_that_was_changed_added_or_lost_is_refused(folder):
    (folder / "more.parquet").write_bytes(b"")
    (folder / "gpt-eager.parquet").write_bytes(b"PAR1")
    (folder / "prefill-fused.parquet").unlink()
    found = " ".join(recordings.faults(folder))
    assert "more.parquet: not listed" in found
    assert "gpt-eager.parquet: not the file" in found
    assert "prefill-fused.parquet: listed, but not there" in found


@pytest.mark.parametrize("command", [["record", "--out", "OUT"], ["record", "--check", "OUT/none"]])
def test_without_a_gpu_or_a_recording_the_command_says_so_in_one_line_and_exits_2(command, tmp_path, capsys):
    assert main([part.replace("OUT", str(tmp_path)) for part in command]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def bare(tmp_path):
    """A copy of the tree, and a folder with torch, numpy, pandas, pyarrow and what these ask for: nothing else."""
    site, wanted, seen = tmp_path / "site", ["torch", "numpy", "pandas", "pyarrow"], set()
    site.mkdir()
    while wanted:
        package = distribution(wanted.pop())
        if package.name in seen:
            continue
        seen.add(package.name)
        for top in {file.parts[0] for file in package.files if not file.parts[0].startswith("..")}:
            (site / top).exists() or (site / top).symlink_to(package.locate_file(top))
        for requirement in map(Requirement, package.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    tree = tmp_path / "tree"
    for name in ("src/everybyte", "notebooks/data"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, tree / name], check=True)
    return tree, {"PYTHONPATH": f"{tree / 'src'}:{site}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def test_record_needs_a_copy_of_the_tree_and_four_packages(bare):
    tree, environment = bare
    run = lambda *args: subprocess.run(  # noqa: E731
        [sys.executable, "-S", *args], cwd=tree, env=environment, capture_output=True, text=True
    )
    said = run("-m", "everybyte.record", "--out", "recordings", "--tgz")
    assert (said.returncode, said.stdout) == (2, ""), said.stderr
    assert said.stderr.startswith("everybyte: PyTorch finds no GPU here")
    rehearsal = """
import importlib.util, everybyte as eb
from everybyte import gpus, record
from everybyte.cases import FULL, SMALL, cases
assert not any(importlib.util.find_spec(name) for name in ("talib", "matplotlib", "tqdm", "pytest", "packaging"))
for name in ("gpt-eager", "tft-streamed-8"):
    row, seconds = record.predict(cases(SMALL)[name], gpus.find("a4000"))
    print(row["predicted_requested"])
with eb.measure(device="cpu") as run:
    cases(SMALL)["gpt-eager"].body(run)
"""
    said = run("-c", rehearsal)
    assert said.returncode == 0, said.stderr
    assert all(int(line) > 0 for line in said.stdout.split())
