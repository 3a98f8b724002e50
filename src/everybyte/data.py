"""From a parquet of bars to batches: read, checked, split by time, scaled, and laid out as windows that are views.

    load_bars ──► features.build ──► split ──► Windows.batches
                                       │
    load_features (bars, or a table of features made where TA-Lib is) ┘

Nothing here writes, except ``python -m everybyte.data``, which makes the book's stored market data anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import Dataset

from everybyte import features
from everybyte.features import COLUMNS, PRICES, Features
from everybyte.models.tft import TFTConfig

TIME = "timestamp"
RETURN = "log_return"


class DataError(ValueError):
    """A file that cannot be used. The message names the file, the column, the rows and the way to mend it."""


class Batch(NamedTuple):
    """What one step needs; the first three are the arguments of the model."""

    static: Tensor  # (b, 5)
    past: Tensor  # (b, 50, 210)
    future: Tensor  # (b, 10, 10)
    target: Tensor  # (b, 10)

    def fit_to(self, config: TFTConfig) -> Batch:
        """With only as many features as a model takes, the first ones; views."""
        shapes = config.input_shapes(len(self.target)).values()
        return Batch(*(x[..., : shape[-1]] for x, shape in zip(self, shapes, strict=True)))


class Windows(Dataset[Batch]):
    """Consecutive windows over one table: views, so w windows take no more memory than the table's rows.

    Attributes:
        static, past, future, target: [w, 5], [w, 50, 210], [w, 10, 10] and [w, 10]; strided views of the tables.
        target_scale: log return that one unit of target stands for.
    """

    def __init__(self, static: Tensor, past: Tensor, future: Tensor, target: Tensor, target_scale: float) -> None:
        self.static, self.past, self.future, self.target = static, past, future, target
        self.target_scale = target_scale

    def __len__(self) -> int:
        return len(self.past)

    def __getitem__(self, index: int) -> Batch:
        return Batch(self.static[index], self.past[index], self.future[index], self.target[index])

    def part(self, start: int | None = None, stop: int | None = None, step: int | None = None) -> Windows:
        """Some of the windows, chosen as a slice chooses; still views."""
        chosen = slice(start, stop, step)
        return Windows(
            self.static[chosen], self.past[chosen], self.future[chosen], self.target[chosen], self.target_scale
        )

    def fit_to(self, config: TFTConfig) -> Windows:
        """With only as many features as a model takes, as `Batch.fit_to`; still views."""
        return Windows(
            *Batch(self.static, self.past, self.future, self.target).fit_to(config), target_scale=self.target_scale
        )

    def batches(
        self, batch_size: int, device: torch.device | str | None = None, shuffle: torch.Generator | None = None
    ) -> Iterator[Batch]:
        """All windows once, each batch copied out of the table when its turn comes; the last may be smaller.

        Args:
            batch_size: windows in a batch.
            device: where the batch goes; by default it stays.
            shuffle: a generator on the CPU that sets the order; without one the order is time's.

        Raises:
            ValueError: batch_size is not a whole number of at least 1.
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} is not a number of windows: give a whole number from 1 up")
        order = torch.arange(len(self)) if shuffle is None else torch.randperm(len(self), generator=shuffle)
        for chosen in order.split(batch_size):
            yield Batch(*(x[chosen].to(device) for x in (self.static, self.past, self.future, self.target)))


class Split(NamedTuple):
    """Earlier and later windows of one series; no bar is a target in both."""

    train: Windows
    validation: Windows

    def bytes_as_views(self) -> int:
        """Bytes of the tables under all windows, each table once."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._tensors()}
        return sum(storages.values())

    def bytes_as_copies(self) -> int:
        """Bytes that the windows would take if each were written out on its own."""
        return sum(x.numel() * x.element_size() for x in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for part in self:
            yield from (part.static, part.past, part.future, part.target)


def load_bars(path: str | Path) -> pd.DataFrame:
    """Reads bars and refuses any that could not be trusted.

    Args:
        path: a parquet with the columns timestamp, open, high, low, close and volume; others are ignored.

    Returns:
        float64 columns open, high, low, close, volume, indexed by timestamp.

    Raises:
        DataError: the file is missing or no parquet; a column is missing or has the wrong type; there are no rows,
            unknown values, timestamps twice or out of order, prices that are not positive, a low above a high.
    """
    table = _read(path)
    _check_columns(path, table, (TIME, *COLUMNS))
    bars = _index_by_time(path, table)[list(COLUMNS)]
    _check_numbers(path, bars)
    for name in PRICES:
        _refuse(path, name, bars[name] <= 0, "is not positive", "correct or drop those bars")
    _refuse(path, "volume", bars["volume"] < 0, "is negative", "correct or drop those bars")
    _refuse(path, "high", bars["high"] < bars[[*PRICES]].max(axis=1), "is not the highest price", "correct those bars")
    _refuse(path, "low", bars["low"] > bars[[*PRICES]].min(axis=1), "is not the lowest price", "correct those bars")
    return bars


def load_features(path: str | Path) -> Features:
    """Features of the bars in a parquet, or features made elsewhere and stored by `store_features`.

    Only bars need TA-Lib; the result is the same to the last bit.

    Raises:
        DataError: as `load_bars`, or there are too few bars for one row of features.
        ImportError: the file holds bars and TA-Lib is not installed.
    """
    names = [feature.name for feature in features.catalogue()]
    table = _read(path)
    if RETURN not in table.column_names:
        bars = load_bars(path)
        if len(bars) <= features.warm_up():
            raise DataError(
                f"{path}: column {TIME} has {len(bars)} rows, and the slowest feature alone takes the first "
                f"{features.warm_up()}: give more bars"
            )
        return features.build(bars)
    _check_columns(path, table, (TIME, *names, RETURN))
    frame = _index_by_time(path, table)[[*names, RETURN]]
    _check_numbers(path, frame)
    return Features(frame[names], frame[RETURN], features.warm_up())


def tft_windows(path: str | Path, config: TFTConfig, validation_share: float = 0.2) -> Split:
    """Training and validation windows for a model, straight from a parquet of bars or of features.

    Raises:
        DataError: as `load_features`, or there are too few bars for one window in each part.
        ValueError: the config asks for other features than there are.
    """
    table = load_features(path)
    try:
        return split(table, config, validation_share)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def split(table: Features, config: TFTConfig, validation_share: float = 0.2) -> Split:
    """Cuts a table by time, scales it by its earlier part, and lays windows over both parts.

    A training window lies whole in the earlier part. A validation window has its whole target in the later part; its
    history may reach back, as it would in use. Windows whose target straddles the border belong to neither.

    Args:
        table: features of one symbol.
        config: sizes of the windows.
        validation_share: part of the rows that the later part gets, between 0 and 1.

    Raises:
        DataError: too few rows for one window in each part.
        ValueError: the config asks for other features than there are, or the share is not between 0 and 1.
    """
    wanted = {"static": config.static_features, "known": config.known_features, "observed": config.observed_features}
    for group, count in wanted.items():
        if count != len(features.names(group)):
            raise ValueError(
                f"{group}_features={count}, but there are {len(features.names(group))} {group} features: "
                f"set it to that, or make windows of your own"
            )
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share={validation_share!r} is no share: give a number between 0 and 1")
    rows, span = len(table.frame), config.history + config.horizon
    border = round(rows * (1 - validation_share))
    if border < span or rows - border < config.horizon:
        raise DataError(
            f"{rows + table.dropped} bars leave {rows} rows after {table.dropped} of warm-up, {border} to train on and "
            f"{rows - border} to validate: windows of {config.history} + {config.horizon} need at least {span} and "
            f"{config.horizon}; give more bars"
        )

    scaled = _scale(table.frame.to_numpy(), border)
    columns = dict(zip(table.frame.columns, scaled.T, strict=True))
    static, known, observed = (
        torch.from_numpy(np.stack([columns[name] for name in features.names(group)], axis=1).astype(np.float32))
        for group in ("static", "known", "observed")
    )  # (rows, 5), (rows, 10), (rows, 210)
    past = torch.cat([observed, known], dim=1) if config.known_in_history else observed
    returns = table.log_return.to_numpy()
    target_scale = float(returns[:border].std())
    target = torch.from_numpy((returns / target_scale).astype(np.float32))

    windows = Windows(
        static[0].expand(rows - span + 1, -1),
        past[: rows - config.horizon].unfold(0, config.history, 1).transpose(1, 2),
        known[config.history :].unfold(0, config.horizon, 1).transpose(1, 2),
        target[config.history :].unfold(0, config.horizon, 1),
        target_scale,
    )
    return Split(windows.part(stop=border - span + 1), windows.part(start=max(0, border - config.history)))


def store_features(table: Features, path: str | Path) -> None:
    """Writes a table that `load_features` reads without TA-Lib."""
    _write(table.frame.assign(**{RETURN: table.log_return}), path)


def _scale(x: np.ndarray, border: int) -> np.ndarray:
    """Mean 0 and deviation 1 over the first ``border`` rows; a column constant there keeps its sign, as ±1 or 0."""
    fitted = x[:border]
    centre, scale = fitted.mean(axis=0), fitted.std(axis=0)
    constant = np.ptp(fitted, axis=0) == 0
    magnitude = np.abs(fitted[0])
    centre = np.where(constant, 0.0, centre)
    scale = np.where(constant, np.where(magnitude == 0, 1.0, magnitude), scale)
    return (x - centre) / scale


def _read(path: str | Path) -> pa.Table:
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file: give the path of a parquet of bars")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise DataError(f"{path}: no parquet that can be read: export it again as parquet") from error
    if table.num_rows == 0:
        raise DataError(f"{path}: columns {', '.join(table.column_names)} have 0 rows: export it again with its bars")
    return table


def _check_columns(path: str | Path, table: pa.Table, wanted: Iterable[str]) -> None:
    if missing := [name for name in wanted if name not in table.column_names]:
        raise DataError(
            f"{path}: column {', '.join(missing)} is missing in all {table.num_rows} rows, there are "
            f"{', '.join(table.column_names)}: rename or add it"
        )
    for name in wanted:
        kind = table.schema.field(name).type
        if name == TIME and not pa.types.is_timestamp(kind) and not pa.types.is_date(kind):
            raise DataError(
                f"{path}: column {name} holds {kind} in all {table.num_rows} rows: store them as timestamps"
            )
        if name != TIME and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{path}: column {name} holds {kind} in all {table.num_rows} rows: store numbers")


def _index_by_time(path: str | Path, table: pa.Table) -> pd.DataFrame:
    frame = table.to_pandas(ignore_metadata=True)
    time = pd.Series(pd.to_datetime(frame[TIME]))
    _refuse(path, TIME, time.isna(), "is unknown", "fill in or drop those rows")
    _refuse(path, TIME, time.duplicated(), "repeats an earlier timestamp", "keep one row for each")
    _refuse(path, TIME, time.diff() < pd.Timedelta(0), "lies before the row above", "sort the file by timestamp")
    return frame.set_index(pd.DatetimeIndex(time, name=TIME))


def _check_numbers(path: str | Path, frame: pd.DataFrame) -> None:
    for name in frame.columns:
        frame[name] = frame[name].astype(np.float64)
        _refuse(path, name, ~np.isfinite(frame[name]), "is unknown or infinite", "fill in or drop those rows")


def _refuse(path: str | Path, column: str, bad: pd.Series, fault: str, mend: str) -> None:
    """Raises if any row is bad, naming the first few, counted from 0."""
    rows = np.flatnonzero(bad.to_numpy())
    if len(rows):
        shown = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
        raise DataError(f"{path}: column {column} {fault} in row{'s' if len(rows) > 1 else ''} {shown}: {mend}")


def _write(frame: pd.DataFrame, path: str | Path) -> None:
    table = pa.Table.from_pandas(frame.rename_axis(TIME).reset_index(), preserve_index=False)
    pq.write_table(table.replace_schema_metadata(None), path)


def provenance(folder: Path) -> dict[str, dict]:
    """Where the stored files of a folder come from, by name, as `record` noted it.

    Raises:
        DataError: a file is missing or is not the one that was noted.
    """
    known = json.loads((folder / "provenance.json").read_text())
    for name, entry in known.items():
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: no such file: make it again with {entry['made_by']}")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != entry["sha256"]:
            raise DataError(f"{folder / name}: not the file that was noted: make it again with {entry['made_by']}")
    return known


def record(folder: Path, name: str, entry: dict) -> None:
    """Notes in ``provenance.json`` where a stored file comes from; its hash, size, rows and columns are read off it."""
    book = folder / "provenance.json"
    known = json.loads(book.read_text()) if book.exists() else {}
    content, table = (folder / name).read_bytes(), pq.read_metadata(folder / name)
    known[name] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "rows": table.num_rows,
        "columns": table.num_columns,
        **entry,
    }
    book.write_text(json.dumps(dict(sorted(known.items())), indent=2, ensure_ascii=False) + "\n")


def make(folder: Path) -> list[Path]:
    """Makes the book's market data from the package ``arch``: all bars, the last 300, and the features of those.

    Returns:
        The files written: three parquet, the licence they come under, and ``provenance.json``.

    Raises:
        ImportError: arch or TA-Lib is not installed.
    """
    try:
        from arch.data import sp500
    except ImportError as error:
        raise ImportError('the market data is made from the package arch: pip install "everybyte[data]"') from error
    bars = sp500.load().rename(columns=str.lower)[list(COLUMNS)]
    small = bars.tail(300)
    table = features.build(small)

    folder.mkdir(parents=True, exist_ok=True)
    _write(bars, folder / "sp500.parquet")
    _write(small, folder / "sp500_small.parquet")
    store_features(table, folder / "sp500_small_features.parquet")
    package = metadata.distribution("arch")
    licence = next(file for file in package.files or () if file.name.startswith("LICENSE"))
    (folder / "LICENSE-arch.txt").write_text(licence.read_text())

    source = {
        "source": f"S&P 500 daily bars shipped with the Python package arch {package.version}, arch.data.sp500",
        "terms": f"{package.metadata['License-Expression']} licence of that package, in LICENSE-arch.txt",
        "made_by": "python -m everybyte.data",
    }
    for name, frame, what in (
        ("sp500.parquet", bars, "every row; the column Adj Close, equal to Close throughout, is left out"),
        ("sp500_small.parquet", small, "the last 300 rows of sp500.parquet"),
        (
            "sp500_small_features.parquet",
            table.frame,
            f"everybyte.features.build of sp500_small.parquet with TA-Lib {metadata.version('TA-Lib')}, "
            f"{table.dropped} bars of warm-up dropped",
        ),
    ):
        dates = {"first": str(frame.index[0].date()), "last": str(frame.index[-1].date())}
        record(folder, name, source | dates | {"content": what})
    made = (
        "sp500.parquet",
        "sp500_small.parquet",
        "sp500_small_features.parquet",
        "LICENSE-arch.txt",
        "provenance.json",
    )
    return [folder / name for name in made]


if __name__ == "__main__":
    for made in make(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks/data")):
        print(f"{made}  {made.stat().st_size:,} B")
