"""Bars are checked before they are used, split by time, scaled by the past alone, and windows are views."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from everybyte import data, features
from everybyte.data import DataError
from everybyte.models.tft import TFTConfig

STORED = Path(__file__).parent.parent / "notebooks" / "data"
SMALL, TABLE = STORED / "sp500_small.parquet", STORED / "sp500_small_features.parquet"


def spoil(frame: pd.DataFrame, rows: list[int], column: str, value: object) -> pd.DataFrame:
    frame.loc[rows, column] = value
    return frame


def swapped(frame: pd.DataFrame) -> pd.DataFrame:
    order = list(range(len(frame)))
    order[10], order[11] = order[11], order[10]
    return frame.iloc[order]


FAULTS = {
    "missing column": (lambda f: f.drop(columns="volume"), ["volume", "300 rows", "rename or add it"]),
    "missing time": (lambda f: f.rename(columns={"timestamp": "date"}), ["timestamp", "date", "rename or add it"]),
    "NaN": (lambda f: spoil(f, [17, 40], "close", np.nan), ["close", "rows 17, 40", "fill in or drop"]),
    "infinite": (lambda f: spoil(f, [5], "volume", np.inf), ["volume", "row 5", "fill in or drop"]),
    "no timestamp": (lambda f: spoil(f, [3], "timestamp", pd.NaT), ["timestamp", "row 3", "fill in or drop"]),
    "duplicate": (
        lambda f: spoil(f, [8], "timestamp", f["timestamp"][7]),
        ["timestamp", "row 8", "keep one row for each"],
    ),
    "unsorted": (swapped, ["timestamp", "row 11", "sort the file by timestamp"]),
    "too few rows": (lambda f: f.head(100), ["100 bars", "40 rows", "give more bars"]),
    "fewer than warm-up": (lambda f: f.head(60), ["60 rows", "give more bars"]),
    "zero rows": (lambda f: f.head(0), ["0 rows", "export it again"]),
    "zero price": (lambda f: spoil(f, [9], "low", 0.0), ["low", "row 9", "correct or drop"]),
    "negative price": (lambda f: spoil(f, list(range(9)), "open", -1.0), ["open", "0, 1, 2, 3, 4 and 4 more", "drop"]),
    "negative volume": (lambda f: spoil(f, [2], "volume", -5.0), ["volume", "row 2", "correct or drop"]),
    "high below close": (lambda f: spoil(f, [6], "high", 1.0), ["high", "row 6", "correct those bars"]),
    "low above open": (lambda f: spoil(f, [6], "low", 1e9), ["row 6", "correct those bars"]),
    "prices as text": (lambda f: f.assign(close=f["close"].astype(str)), ["close", "string", "store numbers"]),
    "times as text": (lambda f: f.assign(timestamp=f["timestamp"].astype(str)), ["timestamp", "string", "timestamps"]),
    "times as numbers": (
        lambda f: f.assign(timestamp=range(len(f))),
        ["timestamp", "int64", "store them as timestamps"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_parquet_is_refused_with_file_column_rows_and_mend(fault, tmp_path):
    damage, wanted = FAULTS[fault]
    frame = pd.read_parquet(SMALL).astype({"volume": "float64"})
    path = tmp_path / "bars.parquet"
    damage(frame).to_parquet(path)
    with pytest.raises(DataError) as error:
        data.tft_windows(path, TFTConfig())
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in wanted:
        assert part in message
    assert list(tmp_path.iterdir()) == [path]  # nothing written


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"open,high\n1,2\n", "no parquet"), (b"", "no parquet"), (b"PAR1" + bytes(40) + b"PAR1", "no parquet")],
)
def test_what_is_no_parquet_is_called_so(content, message, tmp_path):
    path = tmp_path / "bars.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.tft_windows(path, TFTConfig())


def test_a_cut_parquet_and_a_missing_file_and_a_folder_are_refused(tmp_path):
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(SMALL.read_bytes()[:-200])
    for path, message in ((cut, "no parquet"), (tmp_path / "none.parquet", "no such file"), (tmp_path, "no such file")):
        with pytest.raises(DataError, match=message):
            data.load_bars(path)


def test_a_damaged_feature_table_is_refused_as_bars_are(tmp_path):
    frame = pd.read_parquet(TABLE)
    path = tmp_path / "features.parquet"
    frame.drop(columns="rsi_14").to_parquet(path)
    with pytest.raises(DataError, match="rsi_14 is missing"):
        data.load_features(path)
    frame.assign(rsi_14=np.nan).to_parquet(path)
    with pytest.raises(DataError, match="rsi_14 is unknown or infinite in rows 0, 1, 2, 3, 4 and 235 more"):
        data.load_features(path)


def test_stored_files_are_the_ones_their_provenance_describes():
    provenance = json.loads((STORED / "provenance.json").read_text())
    for name in ("sp500.parquet", "sp500_small.parquet", "sp500_small_features.parquet"):
        entry, content = provenance[name], (STORED / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["rows"] == len(pd.read_parquet(STORED / name))
        assert "NCSA" in entry["terms"] and "arch" in entry["source"]
    assert "Permission is hereby granted" in (STORED / "LICENSE-arch.txt").read_text()


def test_small_file_is_the_end_of_the_full_one():
    full, small = data.load_bars(STORED / "sp500.parquet"), data.load_bars(SMALL)
    assert (len(full), len(small)) == (5031, 300)
    pd.testing.assert_frame_equal(full.tail(300), small)


def test_stored_features_are_what_talib_gives():
    pytest.importorskip("talib")
    stored, built = data.load_features(TABLE), data.load_features(SMALL)
    np.testing.assert_allclose(stored.frame, built.frame, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(stored.log_return, built.log_return, rtol=0, atol=1e-15)
    assert stored.frame.index.equals(built.frame.index)
    assert stored.dropped == built.dropped


def test_stored_features_need_no_talib_and_bars_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "talib", None)
    assert len(data.tft_windows(TABLE, TFTConfig()).train) > 0
    with pytest.raises(ImportError, match=r'pip install "everybyte\[book\]"'):
        data.tft_windows(SMALL, TFTConfig())


def test_300_bars_make_181_windows_of_which_those_across_the_border_are_left_out():
    split = data.tft_windows(TABLE, TFTConfig())
    possible = 300 - features.warm_up() - 50 - 10 + 1  # one more than the 180 of the report, which counts gaps
    assert possible == 181
    assert (len(split.train), len(split.validation)) == (133, 39)
    assert possible - 133 - 39 == 9  # targets that straddle the border: 10 bars long, less one


def test_each_window_shows_the_bars_it_should():
    table, config = data.load_features(TABLE), TFTConfig()
    split = data.split(table, config)
    border = round(len(table.frame) * 0.8)
    scale = table.log_return.to_numpy()[:border].std()
    known, observed = features.names("known"), features.names("observed")
    z = (table.frame - table.frame.iloc[:border].mean()) / table.frame.iloc[:border].std(ddof=0).replace(0, 1)
    for windows, first, index in ((split.train, 0, 5), (split.validation, border - 50, 7)):
        start = first + index
        window = windows[index]
        np.testing.assert_allclose(window.past, z[observed].iloc[start : start + 50], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(window.future, z[known].iloc[start + 50 : start + 60], rtol=1e-4, atol=1e-5)
        returns = table.log_return.iloc[start + 50 : start + 60] / scale
        np.testing.assert_allclose(window.target, returns, rtol=1e-5)


def test_no_bar_is_a_target_in_both_parts_and_scaling_never_sees_the_later_part():
    table, config = data.load_features(TABLE), TFTConfig()
    border = round(len(table.frame) * 0.8)
    later = features.Features(table.frame.copy(), table.log_return.copy(), table.dropped)
    later.frame.iloc[border:] *= 7.0
    later.log_return.iloc[border:] *= 7.0
    before, after = data.split(table, config), data.split(later, config)
    assert before.train.target_scale == after.train.target_scale
    for name in ("past", "future", "target"):
        assert torch.equal(getattr(before.train, name), getattr(after.train, name))
    assert not torch.isclose(before.validation.target, after.validation.target).any()


def test_scaled_training_columns_have_mean_0_and_deviation_1_and_constants_survive():
    table = data.load_features(TABLE)
    frame = table.frame.copy()
    frame["cdl_doji"] = 0.0  # constant at nothing
    frame["cdl_hammer"] = -3.0  # constant at something
    split = data.split(features.Features(frame, table.log_return, table.dropped), TFTConfig())
    assert torch.isfinite(split.train.past).all() and torch.isfinite(split.validation.past).all()
    assert set(split.train.static.unique().tolist()) == {0.0, 1.0}  # an index: 1; no future: 0; the others: 1
    observed = features.names("observed")
    assert (split.train.past[..., observed.index("cdl_doji")] == 0).all()
    assert (split.train.past[..., observed.index("cdl_hammer")] == -1).all()
    rows = torch.cat([split.train.past[:, 0], split.train.past[-1, 1:]])[:, observed.index("rsi_14")]
    assert abs(rows.mean()) < 0.2 and 0.8 < rows.std() < 1.2


def test_windows_are_views_of_one_table():
    config = TFTConfig()
    split = data.tft_windows(TABLE, config)
    past = split.train.past
    assert past.untyped_storage().nbytes() == 240 * 210 * 4
    assert past.numel() * 4 > 25 * past.untyped_storage().nbytes()
    pointer = past.untyped_storage().data_ptr()
    assert split.validation.past.untyped_storage().data_ptr() == pointer
    assert split.train[3].past.untyped_storage().data_ptr() == pointer


def test_windows_cost_their_tables_once_and_as_copies_every_number_of_every_window():
    split = data.tft_windows(TABLE, TFTConfig())
    assert split.bytes_as_views() == 4 * 240 * (5 + 210 + 10 + 1)
    copied = [batch for part in split for batch in part.batches(len(part))]
    assert split.bytes_as_copies() == sum(x.untyped_storage().nbytes() for batch in copied for x in batch)


def test_a_stored_file_that_was_changed_or_lost_is_found_out(tmp_path):
    for name in ("sp500_small.parquet", "sp500_small_features.parquet"):
        (tmp_path / name).write_bytes((TABLE.parent / name).read_bytes())
        data.record(tmp_path, name, {"made_by": "python -m everybyte.data"})
    assert list(data.provenance(tmp_path)) == ["sp500_small.parquet", "sp500_small_features.parquet"]
    (tmp_path / "sp500_small.parquet").write_bytes(TABLE.read_bytes())
    with pytest.raises(data.DataError, match="not the file that was noted: make it again with py"):
        data.provenance(tmp_path)
    (tmp_path / "sp500_small.parquet").unlink()
    with pytest.raises(data.DataError, match="no such file: make it again with py"):
        data.provenance(tmp_path)


def test_batches_hold_every_window_once_and_repeat_with_their_generator():
    train = data.tft_windows(TABLE, TFTConfig()).train
    plain = list(train.batches(8))
    assert [len(batch.past) for batch in plain] == [8] * 16 + [5]
    assert torch.equal(torch.cat([batch.target for batch in plain]), train.target)
    assert all(x.is_contiguous() for batch in plain for x in batch)
    first, second = (
        torch.cat([batch.target for batch in train.batches(8, shuffle=torch.Generator().manual_seed(1))])
        for _ in range(2)
    )
    assert torch.equal(first, second) and not torch.equal(first, train.target)
    assert torch.equal(first.sort(0).values, train.target.sort(0).values)


def test_a_standard_loader_reads_the_windows_too():
    train = data.tft_windows(TABLE, TFTConfig()).train
    batch = next(iter(torch.utils.data.DataLoader(train, batch_size=4)))
    assert torch.equal(batch.past, train.past[:4])


def test_published_model_gets_the_calendar_of_past_bars():
    split = data.tft_windows(TABLE, TFTConfig.published())
    assert split.train.past.shape[1:] == (50, 220)
    assert torch.equal(split.train.past[10, -1, 210:], split.train.future[9, 0])


@pytest.mark.parametrize("wrong", [0, -1, "eight", 2.0, True])
def test_impossible_batch_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match="give a whole number from 1 up"):
        next(data.tft_windows(TABLE, TFTConfig()).train.batches(wrong))


def test_other_feature_counts_and_shares_are_refused():
    other = replace(TFTConfig(), observed_features=200, features=215)
    with pytest.raises(ValueError, match="there are 210 observed features"):
        data.tft_windows(TABLE, other)
    with pytest.raises(ValueError, match="is no share"):
        data.tft_windows(TABLE, TFTConfig(), validation_share=1.5)


def test_making_the_data_again_gives_the_stored_files_and_keeps_other_records(tmp_path):
    pytest.importorskip("arch.data", reason="made from the package arch, in the extra [data]")
    (tmp_path / "provenance.json").write_text('{"other.parquet": {"rows": 1}}')
    data.make(tmp_path)
    for name in ("sp500.parquet", "sp500_small.parquet"):
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / name), pd.read_parquet(STORED / name))
    assert json.loads((tmp_path / "provenance.json").read_text())["other.parquet"] == {"rows": 1}
