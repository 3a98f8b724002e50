"""Tables that set evidence side by side: what a reader would be told wrongly if one of these failed."""

import pandas as pd
import pytest
import torch

from everybyte import report, saved


def test_the_difference_is_between_the_last_two_kinds_that_were_found_and_never_from_a_claim():
    table = report.ledger({
        "peak": {"computed": 1000, "traced": 1024, "measured": 1025},
        "both": {"claimed": 9, "computed": 6, "measured": 4},
        "head": {"claimed": 7, "traced": 5},
        "alone": {"traced": 3},
    })  # fmt: skip
    assert list(table.columns) == ["claimed", "computed", "traced", "measured", "difference"]
    assert table["difference"].tolist() == [1, -2, pd.NA, pd.NA]
    assert table.loc["head", ["computed", "measured"]].isna().all()


def test_bytes_beyond_the_exact_floats_stay_exact():
    table = report.ledger({"huge": {"computed": 2**62 + 1, "traced": 2**62}, "none": {"traced": 1}})
    assert table.loc["huge", "computed"] == 2**62 + 1
    assert table.loc["huge", "difference"] == -1


def test_side_by_side_keeps_the_order_of_quantities_and_sums_each_kind_over_those_it_knows():
    table = report.side_by_side("layer", claimed={"norms": 4, "mlp": 19}, traced={"norms": 4, "mlp": 19, "extra": 2})
    assert list(table.index) == ["norms", "mlp", "extra", "layer"]
    assert table.loc["layer"].to_dict() == {"claimed": 23, "traced": 25}, "nothing was found in two ways"
    assert pd.isna(table.loc["extra", "claimed"])


def test_a_kind_of_evidence_that_the_book_does_not_know_is_refused():
    with pytest.raises(ValueError, match="'guessed' is no kind of evidence; there are claimed, computed"):
        report.side_by_side(guessed={"peak": 1})


def test_what_is_kept_is_shown_with_its_shape_in_words_and_named_by_the_column_that_was_asked_for():
    layer = torch.nn.Linear(4, 8)
    rows = report.kept(saved(lambda: layer(torch.ones(2, 4)).relu()))
    assert rows.loc["addmm", ["bytes", "shape", "operand"]].tolist() == [2 * 4 * 4, "2×4", "mat1"]
    assert rows["bytes"].tolist() == [32, 64] and "nbytes" not in rows
    assert report.kept(saved(lambda: layer(torch.ones(2, 4))), index="operand").index.tolist() == ["mat1"]


def test_a_table_shows_a_dash_for_nothing_and_what_it_has_as_any_frame_does():
    table = report.ledger({"peak": {"traced": 8, "measured": 8}, "head": {"traced": 5}})
    rows = [line.split() for line in str(table.rename_axis("bytes")).splitlines()]
    assert rows[2:] == [["peak", "8", "8", "0"], ["head", "5", "–", "–"]]
    assert table._repr_html_().count("<td>–</td>") == 2
    assert table["measured"].isna().tolist() == [False, True], "only what is shown changes"
    frame = pd.DataFrame({"ratio": [0.5, 1 / 3], "bytes": [1, 2]}, index=["x", "y"])
    assert report.Table(frame)._repr_html_() == frame._repr_html_() and str(report.Table(frame)) == str(frame)
