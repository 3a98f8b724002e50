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
