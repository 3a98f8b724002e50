"""Claims recomputed: what the rule makes of a number, what a ledger may not say, and the two ledgers of the book."""

import json
import re
from fractions import Fraction
from unicodedata import normalize

import pytest
from claims_page import PAGE, audited, page
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from everybyte.audit import JUDGED, VERDICTS, Ledger, LedgerError, Stated
from everybyte.cli import main

ROW = {"id": "1", "place": "p", "claim": "c", "stated": "1", "verdict": "holds", "reason": "r", "value": "1"}


@pytest.fixture
def ledger(tmp_path):
    """A function that writes rows, each a change to a plain one, as a ledger, and returns its path."""

    def ledger(*rows, head="units = [1000]"):
        lines = ['document = "d"', head]
        for number, row in enumerate(rows, 1):
            row = {**ROW, "id": str(number), **row}
            lines += ["[[claim]]", *(f"{name} = {json.dumps(text)}" for name, text in row.items() if text is not None)]
        path = tmp_path / "ledger.toml"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return ledger


def verdict(path):
    (finding,) = Ledger.read(path).audit()
    return finding.verdict


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "value", "expected"),
    [
        ("45.9 GB", "24 * 1912602624", "holds"),
        ("45.9 GiB", "24 * 1912602624", "arithmetic slip"),  # 42.75
        ("42.75 GiB", "24 * 1912602624", "holds"),
        ("400 KB", "8 * 50 * 256 * 4", "unit mix"),  # 409,600 B: of 1024, where the document counts in 1000
        ("960 MB", "2000 * 8 * 60 * 256 * 4", "unit mix"),  # 983.04 MB, 937.5 MiB, 960 · 1000 · 1024
        ("8.4 MB", "210 * 8 * 50 * 256 * 4", "arithmetic slip"),
        ("15 ×", "32000 / 2048", "rounding"),  # 15.625, cut short
        ("676 K", "677592", "rounding"),  # two in the last of three digits
        ("67 K", "69000", "arithmetic slip"),  # two in the last of two are too much
        ("180", "181", "arithmetic slip"),  # a count is exact
        ("22.3 MB", "44.5 * MB / 2", "holds"),  # a half is rounded either way
        ("16.78e6", "2048 * 4 * 2048", "holds"),
        ("82 %", "4.706 / 5.706", "holds"),
        ("13-18 MB", "17.8 * MB", "holds"),
        ("13-18 MB", "25 * MB", "arithmetic slip"),
        ("> 2", "45.9 / 20.5", "holds"),
        ("> 2", "2", "arithmetic slip"),
        ("yes", "45 < 26", "arithmetic slip"),
        ("yes", "2 < 3 <= 3 and not_called == 1 or 1 == 1", "holds"),
    ],
)
def test_a_number_is_judged_by_its_own_digits_and_unit(ledger, stated, value, expected):
    row = {"stated": stated, "value": value}
    assert verdict(ledger(row, head="units = [1000]\ngiven = { not_called = 1 }")) == expected


def test_a_document_that_counts_in_both_kinds_is_granted_both_but_not_a_mixture(ledger):
    both = "units = [1000, 1024]"
    assert verdict(ledger({"stated": "400 KB", "value": "409600"}, head=both)) == "holds"
    assert verdict(ledger({"stated": "336 KB", "value": "336000"}, head=both)) == "holds"
    assert verdict(ledger({"stated": "1.25 MB", "value": "1280000"}, head=both)) == "unit mix"


def test_the_unit_that_a_verdict_rests_on_is_named_and_no_other(ledger):
    def basis(stated, value):
        (finding,) = Ledger.read(ledger({"stated": stated, "value": value}, head="")).audit()
        return finding.basis

    assert basis("400 KB", "409600") == "KB = 1024 B"
    assert basis("336 KB", "336000") == "KB = 1000 B"
    assert basis("1.25 MB", "1280000") == "MB = 1000 · 1024 B"
    assert basis("15 KB", "15420") == ""  # 15.42 or 15.06
    assert basis("514", "514") == ""


def test_figures_of_both_kinds_in_one_sum_are_a_unit_mix_if_the_documents_own_sum_is_right(ledger):
    row = {"stated": "470 KB", "value": "4 * 61440 + 2 * 115200"}  # 476.2 KB or 465 KiB
    assert verdict(ledger({**row, "inputs": "(4 * 60 + 2 * 115) * KB"})) == "unit mix"
    assert verdict(ledger(row)) == "arithmetic slip"
    assert verdict(ledger({**row, "stated": "480 KB", "inputs": "480 * KB"})) == JUDGED[0]  # outside of both


@pytest.mark.parametrize("judged", JUDGED)
def test_a_person_judges_only_what_differs_and_follows_from_the_documents_own_inputs(ledger, judged):
    row = {"stated": "2.8 MB", "inputs": "7 * 400 * KB", "verdict": judged}
    assert verdict(ledger({**row, "value": "602784000"})) == judged
    assert verdict(ledger({**row, "value": "2800000"})) == "holds"
    assert verdict(ledger({**row, "value": "602784000", "inputs": "8 * 400 * KB"})) == "arithmetic slip"


def test_what_cannot_be_known_has_no_value_or_readings_that_differ(ledger):
    row = {"verdict": "cannot be known"}
    assert verdict(ledger({**row, "value": None})) == "cannot be known"
    assert verdict(ledger({**row, "value": ["1", "2"]})) == "cannot be known"
    assert verdict(ledger({**row, "value": "1"})) == "holds"  # it can
    with pytest.raises(LedgerError, match="claim 1: its readings all give 1: one is enough"):
        verdict(ledger({**row, "value": ["1", "2 - 1"]}))


@given(st.integers(0, 10**15), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]), st.integers(0, 4))
def test_a_number_that_is_written_to_any_digits_holds(nbytes, unit, digits):
    stated = Stated("0 KB" if unit == "KB" else f"0 {unit}")
    (size,) = stated.sizes((1000,)).values()
    written = Fraction(round(nbytes / size * 10**digits), 10**digits)
    whole, rest = divmod(written, 1)
    text = f"{whole:,}.{int(rest * 10**digits):0{digits}d}" if digits else f"{whole:,}"
    assert Stated(f"{text} {unit}").agrees(Fraction(nbytes), size)
    # two in the last digit away, it does not
    assert not Stated(f"{text} {unit}").agrees(Fraction(nbytes) + 2 * size / 10**digits, size)


def test_a_reasons_numbers_are_those_of_the_row(ledger):
    row = {"stated": "84 MB", "value": "86016000", "inputs": "210 * 400 * KB", "verdict": "contradicts itself"}
    path = ledger(
        {**row, "reason": "{value / MB:.1f} MB, {value / inputs:.3f} times {n * 400:,} KB; {n}"},
        head="given = { n = 210 }",
    )
    (finding,) = Ledger.read(path).audit()
    assert finding.reason == "86.0 MB, 1.024 times 84,000 KB; 210"
    assert finding.as_dict()["reason"] == finding.reason


# -- what a ledger may not say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"verdict": "true"}, "claim 1: verdict = 'true': one of holds, rounding"),
        ({"stated": "many"}, "claim 1: stated = 'many': write a number and a unit"),
        ({"stated": "8.4 MO"}, "claim 1: stated = '8.4 MO'"),
        ({"reason": None}, "claim 1: reason is missing"),
        ({"reason": " "}, "claim 1: reason = ' ': write it as text"),
        ({"value": 4}, "claim 1: value = 4: write it as text"),
        ({"reason": "{value:.1f"}, "claim 1: reason = '{value:.1f': braces hold an expression"),
        ({"reason": "{value:q}"}, "claim 1: '{value:q}' in its reason: Unknown format code 'q'"),
        ({"reason": "{inputs}"}, "claim 1: 'inputs': no name 'inputs'"),
        ({"reason": "{1 < 2}"}, "claim 1: '{1 < 2}' in its reason is true or false, and no number"),
        ({"colour": "red"}, "claim 1: no such field: colour; there are id, place"),
        ({"value": "4 *"}, "claim 1: '4 \\*' is no expression"),
        ({"value": "2or 3"}, "claim 1: '2or 3' is no expression"),
        ({"value": "b * 4"}, "claim 1: 'b \\* 4': no name 'b': put it under given"),
        ({"value": "1 / 0"}, "claim 1: '1 / 0'"),
        ({"value": "2 ** 10 ** 10"}, "a power is a whole number up to 64"),
        ({"value": "(9 ** 64) ** 64 > 1"}, "a number too large for any document"),
        ({"value": "(" * 99 + "1" + ")" * 99 + "1"}, "is no expression"),
        ({"value": "[4]"}, "only numbers, names"),
        ({"value": "().__class__"}, "only numbers, names"),
        ({"value": "MB(3)"}, "MB is a number, not a function"),
        ({"value": "ceil"}, "is no number"),
        ({"value": "1 < 2"}, "claim 1: stated '1', but its expression is true or false"),
        ({"stated": "yes"}, "claim 1: stated 'yes', but its expression is a number"),
        ({"value": None}, "claim 1: 'holds' needs a value"),
        ({"value": None, "verdict": "physically wrong"}, "needs a value, or else 'against' or 'source'"),
        ({"against": ["7"]}, "claim 1: against '7', which is no claim's id"),
        ({"against": ["1"]}, "claim 1: claim 1 says the same"),
    ],
)
def test_a_bad_row_is_refused_in_one_line_that_names_it(ledger, row, said, capsys):
    path = ledger(row)
    with pytest.raises(LedgerError, match=said):
        list(Ledger.read(path).audit())
    assert main(["audit", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"everybyte: {path}: claim 1: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claim", "not TOML"),
        ("", "give it a line document"),
        ("document = 'd'", "and a \\[\\[claim\\]\\]"),
        ("document = 'd'\nauthor = 'a'\n[[claim]]\nid = '1'", "no such field: author"),
        ("document = 'd'\nunits = [10]\n[[claim]]\nid = '1'", "units = \\[10\\]"),
        ("document = 'd'\nfunctions = 'none.py'\n[[claim]]\nid = '1'", "there is no .*none.py"),
        ("document = 'd'\ngiven = { b = 'x' }\n[[claim]]\nid = '1'", "given b: 'x' is no number"),
        ("document = 'd'\nclaim = ['x']", "a \\[\\[claim\\]\\] for each claim"),
    ],
)
def test_a_bad_head_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    with pytest.raises(LedgerError, match=said):
        Ledger.read(path)


def test_two_rows_cannot_have_one_id(ledger):
    with pytest.raises(LedgerError, match="claim 1 is there twice"):
        Ledger.read(ledger({}, {"id": "1"}))


def test_a_function_that_fails_is_told_with_its_row(ledger, tmp_path):
    (tmp_path / "own.py").write_text("def f(n: int) -> int:\n    return [1][n]\n")
    head = 'functions = "own.py"'
    assert verdict(ledger({"value": "f(0)"}, head=head)) == "holds"
    with pytest.raises(LedgerError, match=re.escape("claim 1: 'f(1)': list index out of range")):
        verdict(ledger({"value": "f(1)"}, head=head))
    (tmp_path / "own.py").write_text("f = exit")
    with pytest.raises(LedgerError, match="claim 1: 'f"):
        verdict(ledger({"value": "f(3)"}, head=head))
    (tmp_path / "own.py").write_text("import nothing_of_this_name")
    with pytest.raises(LedgerError, match=r"own\.py does not run: ModuleNotFoundError"):
        verdict(ledger({"value": "f(0)"}, head=head))


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_verdict_that_has_changed_is_a_no(ledger, capsys):
    path = ledger({}, {"stated": "8.4 MB", "value": "86016000", "claim": "210 outputs"})
    assert main(["audit", str(path), "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "everybyte: claim 2 is now 'arithmetic slip', not 'holds': mend the ledger, or what it calls\n"
    (document,) = json.loads(out)["documents"]
    assert {name: count for name, count in document["counts"].items() if count} == {"holds": 1, "arithmetic slip": 1}
    row = document["claims"][1]
    assert (row["values"], row["text"], row["stored"], row["changed"]) == (["86016000"], "86,016,000 B", "holds", True)
    assert main(["audit", str(path)]) == 1
    assert "2  arithmetic slip   (the ledger says holds)  8.4 MB -> 86,016,000 B  210 outputs" in capsys.readouterr()[0]


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["audit", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: No such file or directory" in capsys.readouterr()[1]


def test_the_example_shows_a_verdict_of_arithmetic_one_of_units_and_one_of_a_trace(capsys):
    path = ROOT / "book" / "ledgers" / "mlp_post.toml"
    assert main(["audit", str(path)]) == 0
    assert "1 holds, 1 unit mix, 1 physically wrong" in capsys.readouterr()[0]
    *_, traced = Ledger.read(path).audit()
    # The inputs of both products and of GELU, in fp32: [1024, 1024] and twice [1024, 4096].
    assert traced.values == (4 * 1024 * (1024 + 2 * 4096),)


# -- the two ledgers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents():
    return audited()


@pytest.fixture(scope="module")
def findings(documents):
    return {ledger.path.stem: found for ledger, found in documents}


def test_no_verdict_of_the_book_has_changed(findings):
    changed = [(f.claim.id, f.claim.verdict, f.verdict) for rows in findings.values() for f in rows if f.changed]
    assert not changed


def test_each_section_of_both_analyses_has_rows(findings):
    sections = {name: {int(f.claim.id.split(".")[0]) for f in rows} for name, rows in findings.items()}
    assert sections == {"activation_memory_math": set(range(1, 12)), "tft_memory_analysis": set(range(16))}


def test_every_verdict_is_used_and_every_proof_is_a_section_of_a_chapter(findings):
    rows = [finding for found in findings.values() for finding in found]
    assert {finding.verdict for finding in rows} == set(VERDICTS)
    headings = {
        f"{path.stem}#{re.sub(r'[^a-z0-9]+', '-', normalize('NFKD', heading.lower())).strip('-').lstrip('0123456789-')}"
        for path in (ROOT / "notebooks").glob("*.md")
        for heading in re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert {finding.claim.proof for finding in rows} - {""} <= headings


UNIT = r"(?:[KMG]?i?B\b|%|×|K\b|million\b|times\b)"
TYPED = re.compile(rf"(?<![\w^.,])(?:\d[\d,]*\.\d+|\d{{1,3}}(?:,\d{{3}})+|\d{{4,}}|\d+(?= ?{UNIT}))")
LITERAL = re.compile(r"\d[\d,_]*(?:\.\d+)?")


def numbers(text):
    return {number.strip(",").replace(",", "").replace("_", "") for number in LITERAL.findall(text)}


def test_no_reason_states_a_size_a_share_or_a_factor_that_is_typed(documents):
    """A number with a unit, a fraction, or of four digits is computed, or stands in the row or in one it is against."""
    wrong = {}
    for ledger, _ in documents:
        rows = {claim.id: claim for claim in ledger.claims}
        for claim in ledger.claims:
            known = {"1000", "1024"}
            for row in (claim, *(rows[other] for other in claim.against)):
                known |= numbers(" ".join([row.stated, row.claim, row.inputs, *row.value]))
            typed = re.sub(r"\{[^{}]*\}", "", claim.reason)
            for found in TYPED.finditer(typed):
                if not numbers(found[0]) <= known:
                    wrong[ledger.path.stem, claim.id] = found[0]
    assert not wrong, "write {expression:format}, such as {value / MB:.1f}"


def test_the_page_of_claims_is_what_the_ledgers_say(documents):
    assert PAGE.read_text(encoding="utf-8") == page(documents), "run python book/claims_page.py"
