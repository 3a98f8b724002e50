"""225 features: named, computed without looking ahead, and finite from the bar on that they promise."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from everybyte import data, features

talib = pytest.importorskip("talib", reason="features are computed with TA-Lib, in the extra [book]")

STORED = Path(__file__).parent.parent / "notebooks" / "data"


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return data.load_bars(STORED / "sp500_small.parquet")


def test_there_are_5_static_10_known_and_210_observed_features_each_named_once():
    table = features.feature_table()
    assert table["group"].value_counts().to_dict() == {"observed": 210, "known": 10, "static": 5}
    assert table["name"].is_unique
    assert list(table.columns) == ["name", "group", "family", "formula", "warm_up"]
    assert (table[["name", "family", "formula"]].map(len) > 0).all().all()


def test_observed_features_hold_prices_indicators_and_regimes():
    families = set(features.feature_table().query("group == 'observed'")["family"])
    assert {"price and volume", "momentum", "volatility", "regime"} <= families


def test_no_feature_needs_more_than_60_bars_and_each_starts_at_the_bar_it_promises(bars):
    source = features.Bars(bars, features.SP500, talib)
    with np.errstate(all="ignore"):
        for feature in features.catalogue():
            finite = np.isfinite(feature.compute(source))
            assert feature.warm_up <= 60
            assert finite[feature.warm_up :].all(), feature.name
            assert not finite[: feature.warm_up].any(), feature.name


def test_warm_up_is_dropped_and_counted(bars):
    built = features.build(bars)
    assert (built.dropped, len(built.frame)) == (60, 240)
    assert built.frame.index[0] == bars.index[60]
    assert list(built.frame.columns) == features.feature_table()["name"].tolist()


@pytest.mark.parametrize("bar", [100, 177, 299])
def test_changing_a_bar_changes_no_feature_before_it(bars, bar):
    changed = bars.copy()
    changed.iloc[bar] = changed.iloc[bar] * [1.05, 1.10, 0.90, 0.95, 3.0]
    before, after = features.build(bars).frame, features.build(changed).frame
    row = bar - features.warm_up()
    pd.testing.assert_frame_equal(before.iloc[:row], after.iloc[:row], check_exact=True)
    moved = (before.iloc[row] != after.iloc[row])[features.names("observed")]
    assert moved.mean() > 0.5  # the change was one that features can see


def test_appending_bars_changes_no_feature_already_there(bars):
    pd.testing.assert_frame_equal(
        features.build(bars.iloc[:200]).frame, features.build(bars).frame.iloc[:140], check_exact=True
    )


def test_known_features_depend_on_dates_alone(bars):
    other = bars * [2.0, 2.2, 1.8, 2.0, 5.0]
    known = features.names("known")
    pd.testing.assert_frame_equal(
        features.build(bars).frame[known], features.build(other).frame[known], check_exact=True
    )


def test_price_scale_does_not_matter(bars):
    scaled = bars * [10, 10, 10, 10, 1]
    before, after = features.build(bars).frame, features.build(scaled).frame
    np.testing.assert_allclose(before, after, rtol=1e-6, atol=1e-8)


def test_return_is_the_log_of_consecutive_closes(bars):
    built = features.build(bars)
    wanted = np.log(bars["close"] / bars["close"].shift(1)).iloc[60:]
    np.testing.assert_allclose(built.log_return, wanted, rtol=0, atol=1e-14)
    np.testing.assert_allclose(built.frame["return_1"], wanted, rtol=0, atol=1e-14)


def test_calendar_knows_month_ends_and_third_fridays(bars):
    frame = features.build(bars).frame
    assert frame.loc["2018-03-16", "expiry"] == 1  # a third Friday
    assert frame.loc["2018-03-15", "expiry"] == 0
    assert frame.loc["2018-01-31", "month_end"] == 1
    assert frame.loc["2018-02-01", "month_start"] == 1
    assert frame.loc["2018-01-22", "closed_days"] == 3  # a Monday after a Friday


def test_flat_bars_do_not_divide_by_nothing():
    times = pd.bdate_range("2020-01-01", periods=90)
    flat = pd.DataFrame(dict.fromkeys(features.PRICES, 100.0) | {"volume": 0.0}, index=times)
    flat.iloc[30:, :4] = 101.0
    assert np.isfinite(features.build(flat).frame.to_numpy()).all()


def test_too_few_bars_are_refused(bars):
    with pytest.raises(ValueError, match="60 bars are fewer than the 61"):
        features.build(bars.iloc[:60])


def test_talib_is_imported_only_where_features_are_computed():
    tree = ast.parse(Path(features.__file__).read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert "talib" not in top
