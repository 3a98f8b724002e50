"""Tables and figures, each made from a timeline with one line. The figures are those of `figures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import pandas as pd

from .figures import COLOURS, bars, icicle, life, lives, overview, peaks, tensors
from .timeline import CATEGORIES, WORKSPACE, Timeline
from .units import format_bytes

if TYPE_CHECKING:
    from .saved import Saved

__all__ = [
    "COLOURS",
    "EVIDENCE",
    "Table",
    "bars",
    "composition",
    "glue",
    "icicle",
    "kept",
    "ledger",
    "life",
    "lives",
    "overview",
    "peaks",
    "side_by_side",
    "tensors",
]

EVIDENCE: Final = ("claimed", "computed", "traced", "measured", "recorded")


class Table(pd.DataFrame):
    """A frame of whole numbers and words that shows "–" where it has nothing; to code it is a frame like any other.

    >>> print(eb.report.Table({"claimed": [9, None]}, index=["peak", "loss"], dtype="Int64"))
         claimed
    peak       9
    loss       –
    """

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def __repr__(self) -> str:
        return super(Table, self._filled()).__repr__()

    def _repr_html_(self) -> str | None:
        return super(Table, self._filled())._repr_html_()

    def _filled(self) -> Table:
        gaps = self.isna().any()
        return self.astype(dict.fromkeys(gaps.index[gaps], object)).fillna("–")


def ledger(rows: Mapping[str, Mapping[str, int]]) -> Table:
    """Sets the evidence for each quantity side by side.

        >>> eb.report.ledger({"peak": {"computed": 1_024, "traced": 1_024}})["difference"].tolist()
        [0]

    Args:
        rows: For each quantity, its bytes by kind of evidence, for example
            `{"peak": {"computed": 1_024, "traced": 1_024}}`.

    Returns:
        A table with a row for each quantity, a column for each kind of evidence that occurs, in the order of
        `EVIDENCE`, and `difference`: of what was found, the last kind minus the one before it, 0 where they agree to
        the byte. What is claimed does not enter, and where nothing was found in two ways the column is left out.

    Raises:
        ValueError: If a kind of evidence is none of `EVIDENCE`.
    """
    unknown = {kind for evidence in rows.values() for kind in evidence} - set(EVIDENCE)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is no kind of evidence; there are {', '.join(EVIDENCE)}")
    table = Table(
        [{kind: evidence.get(kind) for kind in EVIDENCE} for evidence in rows.values()],
        index=pd.Index(list(rows), name="quantity"),
        columns=EVIDENCE,
        dtype="Int64",
    )
    found = (row.dropna().tolist() for _, row in table.drop(columns="claimed").iterrows())
    table["difference"] = pd.array([v[-1] - v[-2] if len(v) > 1 else None for v in found], dtype="Int64")
    return table.dropna(axis=1, how="all")


def side_by_side(total: str = "total", **evidence: Mapping[str, int]) -> Table:
    """The same, from the bytes of each quantity by kind of evidence, with a row that sums each kind.

        >>> table = eb.report.side_by_side("all", computed={"weights": 8, "bias": 4}, traced={"weights": 8, "bias": 4})
        >>> table["traced"].tolist()
        [8, 4, 12]

    Args:
        total: Name of the last row.
        **evidence: For each kind of evidence the bytes of its quantities; one that it does not know is left out.

    Raises:
        ValueError: If a kind of evidence is none of `EVIDENCE`.
    """
    names = dict.fromkeys(name for parts in evidence.values() for name in parts)
    rows = {name: {kind: parts[name] for kind, parts in evidence.items() if name in parts} for name in names}
    return ledger({**rows, total: {kind: sum(parts.values()) for kind, parts in evidence.items()}})


def kept(saved: Saved, index: str = "op") -> pd.DataFrame:
    """What autograd keeps, as a page shows it: `Saved.frame`, its `nbytes` called `bytes`, shapes as 4×512×64.

    Args:
        saved: What a forward pass keeps.
        index: The column that names the rows.
    """
    rows = saved.frame().rename(columns={"nbytes": "bytes"})
    rows["shape"] = ["×".join(map(str, shape)) for shape in rows["shape"]]
    return rows.set_index(index)


def glue(chapter: str) -> Callable[..., None]:
    """Makes the function that hands a chapter's numbers to its text, by MyST-NB's `glue`.

        say = report.glue("05")
        say(at_peak=1_024, times="3.0")  # what {glue:text}`05-at-peak` and {glue:text}`05-times` show

    Args:
        chapter: What all of its keys begin with.

    Returns:
        A function of named values. An integer is a number of bytes, written by `format_bytes`; text stays as it is.

    Raises:
        ImportError: If MyST-NB is not installed.
    """
    try:
        from myst_nb import glue
    except ImportError as error:
        raise ImportError('numbers go into the text by MyST-NB: pip install "everybyte[book]"') from error

    def say(**values: int | str) -> None:
        for name, value in values.items():
            text = value if isinstance(value, str) else format_bytes(value)
            glue(f"{chapter}-{name.replace('_', '-')}", text, display=False)

    return say


def composition(timeline: Timeline, event: int | None = None) -> pd.DataFrame:
    """What is live at the peak by category: storages, bytes and share, in the order of `CATEGORIES`, with a total.

    >>> data = torch.ones(2, 4)
    >>> with eb.trace() as run:
    ...     x = run.to_device(data)
    >>> eb.report.composition(run.timeline)["nbytes"].to_dict()
    {'input': 32, 'total': 32}
    """
    table = timeline.by("category", event)
    table = table.loc[[c for c in (*CATEGORIES, WORKSPACE) if c in table.index]]
    table["share"] = (table["nbytes"] / table["nbytes"].sum()).round(4)
    table.loc["total"] = [table["nbytes"].sum(), table["storages"].sum(), 1.0]
    return table.astype({"nbytes": "int64", "storages": "int64"})
