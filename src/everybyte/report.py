"""Tables and figures, each made from a timeline with one line.

The colours are Okabe and Ito's eight, which the colour-blind tell apart: one a category, the same on every page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd

from .timeline import CATEGORIES, WORKSPACE, Timeline
from .units import GB, MB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .saved import Saved

COLOURS: Final = {
    "parameter": "#0072B2",
    "buffer": "#999999",
    "gradient": "#D55E00",
    "optimizer state": "#E69F00",
    "activation": "#009E73",
    "temporary": "#CC79A7",
    "input": "#56B4E9",
    "scratch": "#F0E442",
}

EVIDENCE: Final = ("claimed", "computed", "traced", "measured", "recorded")


def ledger(rows: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """Sets the evidence for each quantity side by side.

    Args:
        rows: For each quantity, its bytes by kind of evidence, for example
            `{"peak": {"computed": 1_024, "traced": 1_024}}`.

    Returns:
        A frame with a row for each quantity, a column for each kind of evidence that occurs, in the order of
        `EVIDENCE`, and `difference`: the last kind minus the one before it, 0 where they agree to the byte.

    Raises:
        ValueError: If a kind of evidence is none of `EVIDENCE`.
    """
    unknown = {kind for evidence in rows.values() for kind in evidence} - set(EVIDENCE)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is no kind of evidence; there are {', '.join(EVIDENCE)}")
    table = pd.DataFrame(
        [{kind: evidence.get(kind) for kind in EVIDENCE} for evidence in rows.values()],
        index=pd.Index(list(rows), name="quantity"),
        dtype="Int64",
    ).dropna(axis=1, how="all")
    last = table.apply(lambda row: row.dropna().tolist(), axis=1)
    table["difference"] = pd.array([v[-1] - v[-2] if len(v) > 1 else None for v in last], dtype="Int64")
    return table


def side_by_side(total: str = "total", **evidence: Mapping[str, int]) -> pd.DataFrame:
    """The same, from the bytes of each quantity by kind of evidence, with a row that sums each kind.

        >>> side_by_side("all", computed={"weights": 8, "bias": 4}, traced={"weights": 8, "bias": 4})["traced"].tolist()
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
    """What is live at the peak by category: storages, bytes and share, in the order of `CATEGORIES`, with a total."""
    table = timeline.by("category", event)
    table = table.loc[[c for c in (*CATEGORIES, WORKSPACE) if c in table.index]]
    table["share"] = (table["nbytes"] / table["nbytes"].sum()).round(4)
    table.loc["total"] = [table["nbytes"].sum(), table["storages"].sum(), 1.0]
    return table.astype({"nbytes": "int64", "storages": "int64"})


def life(timeline: Timeline, ax: Axes | None = None, *, start: int | None = None) -> Axes:
    """Draws the life of a run: live bytes by category over the events, stacked, the peak marked and named.

    The drawing ends with the last step, or with the run where no step was marked. The legend leaves out a category that
    never reaches a thousandth of the peak: it is too thin to be seen.

    Args:
        timeline: The run.
        ax: Axes to draw on; a new figure's if left out.
        start: First event to draw; the start of step 0 if left out.
    """
    from matplotlib import pyplot as plt

    ax = ax or plt.subplots(figsize=(9, 4))[1]
    steps = _steps(timeline)
    first, end = steps.start if start is None else start, steps.stop
    unit, name = _unit(timeline.peak_bytes)
    curves = {category: curve[first:end] for category, curve in _live_by_category(timeline).items()}
    visible = timeline.peak_bytes / 1000
    keep = _corners(timeline.live_bytes[first:end])
    ax.stackplot(
        np.arange(first, end)[keep],
        [curve[keep] / unit for curve in curves.values()],
        labels=[kind if curve.max(initial=0) >= visible else f"_{kind}" for kind, curve in curves.items()],
        colors=[COLOURS.get(category, "black") for category in curves],
        linewidth=0,
    )
    ax.axvline(timeline.peak, color="0.5", linewidth=0.8, linestyle=":")
    ax.plot(timeline.peak, timeline.peak_bytes / unit, marker="v", color="0.3")  # it may last for one event only
    ax.annotate(
        f"peak {timeline.peak_bytes / unit:,.3f} {name}",
        (timeline.peak, timeline.peak_bytes / unit),
        xytext=(4, 4),
        textcoords="offset points",
    )
    ax.set(xlabel="allocations and releases, in order", ylabel=f"live, {name}", xlim=(first, end))
    ax.set_ylim(0, timeline.peak_bytes / unit * 1.12)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax


def lives(timelines: Mapping[str, Timeline], ax: Axes | None = None) -> Axes:
    """Draws the live bytes of several runs into one picture, a line each, from their first step to the end of the last.

    Args:
        timelines: For each line its name and its run.
        ax: Axes to draw on; a new figure's if left out.
    """
    from matplotlib import pyplot as plt

    ax = ax or plt.subplots()[1]
    unit, name = _unit(max(timeline.peak_bytes for timeline in timelines.values()))
    for (label, timeline), style in zip(timelines.items(), cycle(["-", "--", "-.", ":"]), strict=False):
        live = timeline.live_bytes[_steps(timeline)]
        keep = _corners(live)
        ax.plot(keep / max(1, len(live) - 1), live[keep] / unit, style, label=label)
    ax.set(xlabel="progress of the steps", ylabel=f"live, {name}", ylim=(0, None))
    ax.legend()
    return ax


def bars(table: pd.DataFrame, ax: Axes | None = None, *, column: str = "nbytes", most: int = 12) -> Axes:
    """Draws a table of bytes as horizontal bars, the largest on top; what is beyond `most` rows is drawn as one bar."""
    from matplotlib import pyplot as plt

    values = table[column].sort_values(ascending=False)
    if len(values) > most:
        rest = values.iloc[most - 1 :]
        values = pd.concat([values.iloc[: most - 1], pd.Series({f"{len(rest)} others": rest.sum()})])
    unit, name = _unit(int(values.max()))
    ax = ax or plt.subplots(figsize=(9, 0.35 * len(values) + 1))[1]
    labels = [str(label) or "(outside any module)" for label in values.index]
    ax.barh(labels, values / unit, color=[COLOURS.get(label, COLOURS["parameter"]) for label in labels])
    ax.invert_yaxis()
    ax.set(xlabel=name)
    return ax


def _steps(timeline: Timeline) -> slice:
    """The events of the steps; where none was marked, all."""
    return slice(int(timeline.info.get("start_event", 0)), int(timeline.info.get("end_event", len(timeline))))


def _unit(nbytes: int) -> tuple[int, str]:
    return (GB, "GB") if nbytes >= GB else (MB, "MB") if nbytes >= MB else (1, "B")


def _live_by_category(timeline: Timeline) -> dict[str, np.ndarray]:
    frame = timeline.frame()
    change = np.where(frame["action"] == "alloc", frame["nbytes"], -frame["nbytes"])
    category = frame["category"].to_numpy()
    names = (*CATEGORIES, *({WORKSPACE} & set(category)))
    return {name: np.cumsum(np.where(category == name, change, 0)) for name in names}


def _corners(total: np.ndarray, most: int = 4000) -> np.ndarray:
    """Which events to draw so that no peak is lost: in each of `most` stretches its first, highest and lowest."""
    if len(total) <= 3 * most:
        return np.arange(len(total))
    edges: Sequence[np.ndarray] = np.array_split(np.arange(len(total)), most)
    return np.unique([i for part in edges for i in (part[0], part[total[part].argmax()], part[total[part].argmin()])])
