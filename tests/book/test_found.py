"""The front page's figure: what it draws is what the ledgers state and the chapters glued, and nothing else."""

from __future__ import annotations

from fractions import Fraction

import pytest
from found import ROWS, draw, drawn, found
from press import BOOK, stage

from everybyte.audit import Ledger, packaged

APART = {  # why a figure's number is not its ledger's, in bytes
    "6.5": 16 * 2048 * 4,  # the ledger has the formula; the layer has its norms' statistics too
    # the ledger's step is on a GPU: three bytes less for each element of a dropout mask that waits at the peak, of 210
    # networks over 50 bars and 5 + 3 static ones, and the step counters of 3,056 tensors on the host
    "4.6": 3 * 8 * 256 * (210 * 50 + 5 + 3) + 4 * 3056,
}


@pytest.fixture(scope="module")
def quantities():
    return found(BOOK.notebooks)


def test_what_stands_in_one_column_is_equal_to_the_byte(quantities):
    for rows in quantities.values():
        for evidence in rows.values():
            assert len({nbytes for kind, nbytes in evidence.items() if kind != "claimed"}) == 1


def test_what_was_found_of_a_claim_is_what_its_ledger_recomputes(quantities):
    for path in packaged():
        values = {finding.claim.id: finding.values for finding in Ledger.read(path).audit()}
        for row in ROWS[path.stem]:
            if row.claim:
                truth = quantities[path.stem][row.name]["computed"]
                (value,) = values[row.claim]
                assert truth - value == APART.get(row.claim, 0), row.claim


def test_each_mark_lies_at_its_number_of_bytes(quantities):
    (ax,) = drawn(quantities).axes
    marks = sorted(line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1)
    assert marks == sorted(n for rows in quantities.values() for evidence in rows.values() for n in evidence.values())
    claims = {"2.8 MB": 2_800_000, "44.5 MB": 44_500_000, "137.8 MB": 137_800_000, "45.9 GB": 45_900_000_000}
    assert set(claims.values()) <= set(marks)
    said = {text.get_text() for text in ax.texts}
    assert {f"{evidence['computed']:,} B" for rows in quantities.values() for evidence in rows.values()} <= said
    for evidence in quantities["tft_memory_analysis"].values():
        assert f"× {round(Fraction(evidence['computed'], evidence['claimed']))}" in said


def test_a_readers_own_run_is_drawn_and_a_number_that_no_chapter_says_ends_the_build(tmp_path):
    stage(BOOK, tmp_path / "pages", BOOK.notebooks)
    draw(tmp_path / "pages")
    first = (tmp_path / "pages/book/_static/found.svg").read_text()
    assert "<svg" in first and "45,902,462,976" in first
    path = next((tmp_path / "pages/notebooks").glob("14_*.ipynb"))
    path.write_text(path.read_text().replace("45,902,462,976 B", "45,902,462,975 B"))
    draw(tmp_path / "pages")
    assert "45,902,462,975" in (tmp_path / "pages/book/_static/found.svg").read_text()
    path.write_text(path.read_text().replace('"14-paper"', '"14-other"'))
    with pytest.raises(KeyError, match="14-paper"):
        draw(tmp_path / "pages")
