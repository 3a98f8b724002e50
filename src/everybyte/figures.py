"""Figures, each made with one line: a run's life, its peak by module, a layer's saved tensors to scale.

All are drawn in bytes, and only the axes are labelled in MB or GB, so that a height, a width or an area *is* the
number. The colours are Okabe and Ito's, of which the colour-blind tell any two apart once the grey is dark: one a
category, the same on every page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pandas as pd

from .timeline import CATEGORIES, WORKSPACE, Timeline
from .units import GB, MB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .saved import Saved

COLOURS: Final = {
    "parameter": "#0072B2",
    "buffer": "#555555",
    "gradient": "#D55E00",
    "optimizer state": "#E69F00",
    "activation": "#009E73",
    "temporary": "#CC79A7",
    "input": "#56B4E9",
    "scratch": "#F0E442",
    WORKSPACE: "#000000",
}

PHASES: Final = {"forward": ("#dfe5ea", "fwd"), "backward": ("#b9c4cd", "bwd"), "optimizer": ("#8d99a4", "opt")}
GROUPS: Final = ("#4D9CC9", "#EEBC4D", "#4DBB9D", "#E28E4D", "#CCE8F8", "#F8F2A0")
"""The same colours, lighter, for groups, of tensors or lines, which are no categories."""

_SMALL: Final = 8  # points, of the letters inside
_FEWEST: Final = 5  # letters that a name may be cut to
_PALE: Final = "#f1f4f6"
_OUTSIDE: Final = "(outside any module)"


def life(timeline: Timeline, ax: Axes | None = None, *, start: int | None = None) -> Axes:
    """Draws the life of a run: live bytes by category over the events, stacked, the peak marked and named.

    The drawing begins with step 0, or with the peak if that comes earlier, and ends with the last step; a run in which
    no step was marked is drawn whole. A strip on top says which pass an event belongs to. Of a long run some thousand
    events are drawn, the peak always among them. The legend leaves out a category that never reaches a thousandth of
    the peak: it is too thin to be seen.

    Args:
        timeline: The run.
        ax: Axes to draw on; a new figure's if left out.
        start: First event to draw, in place of all that.
    """
    ax = ax or _axes(9, 4)
    steps, peak = _steps(timeline), timeline.peak
    if not len(timeline):
        return _nothing(ax, "nothing was allocated")
    first = min(steps.start, peak) if start is None else start
    end = max(steps.stop, peak + 1) if start is None else max(steps.stop, first + 1)
    curves = {category: curve[first:end] for category, curve in _live_by_category(timeline).items()}
    keep = corners(timeline.live_bytes[first:end])
    ax.stackplot(
        np.append(keep + first, end),  # what is live after an event stays so until the next
        [np.append(curve[keep], curve[-1]) for curve in curves.values()],
        labels=[kind if c.max() >= timeline.peak_bytes / 1000 else f"_{kind}" for kind, c in curves.items()],
        colors=[COLOURS[category] for category in curves],
        linewidth=0,
        step="post",
    )
    top = max(timeline.peak_bytes, 1)
    _in_bytes(ax.yaxis, top)
    if first <= peak < end:
        row = timeline.table.slice(peak, 1).to_pylist()[0]
        when = f"step {row['step']}, {row['phase']}" if row["step"] >= 0 else f"{row['phase']}, before the steps"
        what = f"{row['op'] or ''} in {row['module']}" if row["module"] else row["op"] or ""
        size = f"{timeline.peak_bytes / unit_of(timeline.peak_bytes)[0]:,.3f}".removesuffix(".000")
        ax.plot(peak, timeline.peak_bytes, marker="v", color="0.2")  # it may last for one event only
        along = (peak - first) / (end - first)
        right = along > 0.5
        letters = int(max(along, 1 - along) * _points_across(ax) / (0.62 * _SMALL)) - 2
        rows = f"peak {size} {unit_of(timeline.peak_bytes)[1]}", when, what
        ax.annotate(
            "\n".join(shortened(row, letters) for row in rows if row),
            (peak, timeline.peak_bytes),
            xytext=(-7 if right else 7, 3),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=_SMALL,
            linespacing=1.15,
        )
    _strip(ax, timeline, first, end)
    ax.set(xlabel="allocations and releases, in order", xlim=(first, end), ylim=(0, 1.4 * top))
    ax.set_ylabel(f"live, {unit_of(top)[1]}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    return ax


def lives(timelines: Mapping[str, Timeline], ax: Axes | None = None) -> Axes:
    """Draws the live bytes of several runs into one picture, a line each, from their first step to the end of the last.

    Args:
        timelines: For each line its name and its run.
        ax: Axes to draw on; a new figure's if left out.
    """
    ax = ax or _pyplot().subplots()[1]
    top = max(timeline.peak_bytes for timeline in timelines.values())
    for (label, timeline), style in zip(timelines.items(), cycle(["-", "--", "-.", ":"]), strict=False):
        live = timeline.live_bytes[_steps(timeline)]
        keep = corners(live)
        ax.plot(keep / max(1, len(live) - 1), live[keep], style, label=label)
    _in_bytes(ax.yaxis, top)
    ax.set(xlabel="progress of the steps", ylabel=f"live, {unit_of(top)[1]}", ylim=(0, None))
    ax.legend()
    return ax


def peaks(timelines: Mapping[str, Timeline], ax: Axes | None = None) -> Axes:
    """Draws what is live at the peak of several runs: a bar each, stacked by category.

    Args:
        timelines: For each bar its name and its run.
        ax: Axes to draw on; a new figure's if left out.
    """
    ax = ax or _axes(9, 0.45 * len(timelines) + 1)
    top = max(timeline.peak_bytes for timeline in timelines.values())
    alive = {name: timeline.by("category")["nbytes"] for name, timeline in timelines.items()}
    lefts = np.zeros(len(alive))
    for category, colour in COLOURS.items():
        widths = [int(table.get(category, 0)) for table in alive.values()]
        if any(widths):
            ax.barh([*alive], widths, left=lefts, color=colour, label=category)
        lefts += widths
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    _in_bytes(ax.xaxis, top)
    ax.set_xlabel(f"live at the peak, {unit_of(top)[1]}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax


def bars(table: pd.DataFrame, ax: Axes | None = None, *, column: str = "nbytes", most: int = 12) -> Axes:
    """Draws a table of bytes as horizontal bars, the largest on top; what is beyond `most` rows is drawn as one bar."""
    values = table[column].sort_values(ascending=False)
    if len(values) > most:
        rest = values.iloc[most - 1 :]
        values = pd.concat([values.iloc[: most - 1], pd.Series({f"{len(rest)} others": rest.sum()})])
    unit, name = unit_of(int(values.max()))
    ax = ax or _axes(9, 0.35 * len(values) + 1)
    labels = [str(label) or _OUTSIDE for label in values.index]
    ax.barh(labels, values / unit, color=[COLOURS.get(label, COLOURS["parameter"]) for label in labels])
    ax.invert_yaxis()
    ax.set(xlabel=name)
    return ax


# -- the peak by module ------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    nbytes: int = 0
    names: set[str] = field(default_factory=set)  # of the modules that are drawn as this one
    kinds: dict[str, int] = field(default_factory=dict)
    parts: dict[str, _Node] = field(default_factory=dict)

    def add(self, nbytes: int, kind: str, name: str) -> None:
        self.nbytes += nbytes
        self.kinds[kind] = self.kinds.get(kind, 0) + nbytes
        self.names.add(name)


def icicle(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    event: int | None = None,
    levels: int = 3,
    numbered: bool = False,
) -> Axes:
    """Draws who holds the peak: the modules, each under the one that it is in, as wide as its bytes.

    The lowest row says what the bytes above it are for, by category. What is too narrow for a name is drawn as one with
    its neighbours, "other, 12 modules".

    Args:
        timeline: The run.
        ax: Axes to draw on; a new figure's if left out.
        event: An event other than the peak.
        levels: How deep to go into modules of modules.
        numbered: Draw the modules of a list ("blocks.0", "blocks.1") one by one, not as one ("24 × blocks").
    """
    from matplotlib.patches import Patch

    ax = ax or _axes(9, 0.62 * (levels + 2) + 0.7)
    event = timeline.peak if event is None else event
    tree = module_tree(timeline, event, levels, numbered)
    if not tree.nbytes:
        return _nothing(ax, "nothing is live")
    seen = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if tree.kinds.get(kind)]
    ax.legend(handles=seen, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    ax.set(xlim=(0, tree.nbytes), ylim=(0, levels + 2), yticks=[], xlabel=f"live, {unit_of(tree.nbytes)[1]}")
    _in_bytes(ax.xaxis, tree.nbytes)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    draw_tree(
        tree, levels, "peak" if event == timeline.peak else f"event {event:,}", _Labels(ax, tree.nbytes, levels + 2)
    )
    return ax


def module_tree(timeline: Timeline, event: int, levels: int, numbered: bool = False) -> _Node:
    """What is live after an event, summed for each module and those in it, `levels` deep."""
    tree = _Node()
    rows = timeline.live(event) if len(timeline) else pd.DataFrame(columns=["module", "category", "nbytes"])
    names = rows["module"].astype(object).where(rows["module"].notna(), "").astype(str)
    groups = rows["nbytes"].groupby([names, rows["category"].astype(str)], sort=True).sum()
    for (module, kind), nbytes in groups[groups > 0].items():
        node, path = tree, []
        node.add(int(nbytes), kind, "")
        for name, part in _steps_down(module, numbered)[:levels]:
            path.append(name)
            node = node.parts.setdefault(part, _Node())
            node.add(int(nbytes), kind, ".".join(path))
    return tree


class Pen(Protocol):
    """What a tree is drawn with: `box` draws one and its text, and what is narrower than `least` bytes has no room."""

    least: float

    def box(self, x: int, width: int, y: int, height: int, text: str, colour: str) -> None: ...


def draw_tree(tree: _Node, levels: int, title: str, pen: Pen) -> None:
    """Draws a tree of modules in boxes from its bytes across and `levels` + 2 rows up."""
    pen.box(0, tree.nbytes, levels + 1, 1, f"{title}\n{amount(tree.nbytes)}", _PALE)
    _rows_below(tree, 0, levels, pen)


def _steps_down(module: str, numbered: bool) -> list[tuple[str, str]]:
    """Of each module on the way to this one its own name and the name under which it is drawn."""
    steps: list[tuple[str, str]] = []
    for name in module.split(".") if module else [_OUTSIDE]:
        if name.isdecimal() and steps and not numbered:
            before = steps.pop()
            steps.append((f"{before[0]}.{name}", f"{before[1].removesuffix('.*')}.*"))
        else:
            steps.append((name, name))
    return steps


def _rows_below(node: _Node, left: int, level: int, pen: Pen) -> None:
    """Draws a module's parts from `left` on, each down to the lowest row, and there what they are for."""
    parts = sorted(node.parts.items(), key=lambda part: -part[1].nbytes) if level else []
    wide = [part for part in parts if part[1].nbytes >= pen.least]
    small = [part for _, part in parts[len(wide) :]]
    if len(small) == 1:
        wide, small = parts, []
    for name, part in wide:
        down = level if not part.parts or level == 1 else 1  # a module without parts fills the rows below it
        several = len(part.names) > len(node.names)
        title = f"{len(part.names):,} × {name.removesuffix('.*')}" if several else name.removesuffix(".*")
        pen.box(left, part.nbytes, level + 1 - down, down, f"{title}\n{amount(part.nbytes)}", "white")
        if down == level:
            _kinds(part.kinds, left, pen)
        else:
            _rows_below(part, left, level - 1, pen)
        left += part.nbytes
    kinds: dict[str, int] = dict(node.kinds)
    for _, part in wide:
        kinds = {kind: n - part.kinds.get(kind, 0) for kind, n in kinds.items()}
    rest = sum(kinds.values())
    if rest:
        own = rest - sum(part.nbytes for part in small)
        count = sum(len(part.names) for part in small)
        title = f"other, {count:,} modules" if small else "itself"
        title += " + itself" if small and own else ""
        pen.box(left, rest, 1, level, f"{title}\n{amount(rest)}", _PALE)
        _kinds(kinds, left, pen)


def _kinds(kinds: Mapping[str, int], left: int, pen: Pen) -> None:
    for kind in COLOURS:
        if nbytes := kinds.get(kind):
            pen.box(left, nbytes, 0, 1, amount(nbytes), COLOURS[kind])
            left += nbytes


# -- saved tensors to scale --------------------------------------------------------------------------------------------


def tensors(saved: Saved, ax: Axes | None = None, *, group: Callable[[Mapping[str, Any]], str] | None = None) -> Axes:
    """Draws what autograd keeps as rectangles to scale: the area of each is its bytes, so that all of them are the sum.

    Each is labelled with its module and operation, its shape and its size, as far as there is room. What is too small
    to be seen is drawn as one with others of its group.

    Args:
        saved: What a forward pass keeps.
        ax: Axes to draw on; a new figure's if left out.
        group: From a row of `Saved.rows` the name of its group, which is drawn together in one colour; the first part
            of the module's name if left out.
    """
    from matplotlib.patches import Patch

    ax = ax or _axes(9, 5)
    total = saved.total_bytes
    if not total:
        return _nothing(ax, "nothing is kept")
    groups: dict[str, list[tuple[int, str]]] = {}
    for row in saved.rows:
        shape = "×".join(map(str, row["shape"])) or "a number"
        label = "\n".join(filter(None, [row["module"], row["op"], shape, amount(row["nbytes"])]))
        name = group(row) if group else row["module"].split(".")[0]
        groups.setdefault(name or _OUTSIDE, []).append((row["nbytes"], label))
    sums = {name: sum(nbytes for nbytes, _ in rows) for name, rows in groups.items()}
    order = sorted((name for name in sums if sums[name]), key=lambda name: -sums[name])
    colours = dict(zip(order, [*GROUPS, *["#c9d0d6"] * len(order)], strict=False))
    shown = order if len(order) <= len(GROUPS) else order[: len(GROUPS)]
    width, height = total**0.5 * 4 / 3, total**0.5 * 3 / 4  # their product is the total
    ax.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[], title=f"{amount(total)} kept, to scale")
    ax.spines[:].set_visible(False)
    patches = [Patch(color=colours[name], label=f"{shortened(name, 28)}, {amount(sums[name])}") for name in shown]
    ax.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(len(shown), 4), fontsize="small"
    )
    say = _Labels(ax, width, height)
    for name, outer in zip(order, _squares([sums[name] for name in order], 0, 0, width, height), strict=True):
        rows = _large(groups[name], total // 400)
        for (_, label), (x, y, w, h) in zip(rows, _squares([n for n, _ in rows], *outer), strict=True):
            say.box(x, w, y, h, label, colours[name])
    return ax


def _large(rows: Iterable[tuple[int, str]], least: int) -> list[tuple[int, str]]:
    """Largest first, those below `least` bytes as one, and those of none not at all."""
    rows = sorted((row for row in rows if row[0]), key=lambda row: -row[0])
    small = [nbytes for nbytes, _ in rows if nbytes < least]
    if len(small) < 2:
        return rows
    both = sum(small), f"other, {len(small):,} tensors\n{amount(sum(small))}"
    return [*rows[: len(rows) - len(small)], both]


def _squares(
    areas: Sequence[int], x: float, y: float, width: float, height: float
) -> Iterator[tuple[float, float, float, float]]:
    """Cuts a rectangle into rectangles of these areas, largest first, each as square as can be.

    Bruls, Huizing and van Wijk, "Squarified treemaps" (2000): fill the shorter side, as long as that makes the worst
    rectangle of the row no thinner.

    Args:
        areas: Of which the sum is the rectangle's area.
        x, y, width, height: The rectangle.

    Yields:
        Left, bottom, width and height, in the order of `areas`.
    """
    rest = list(areas)
    while rest:
        side, row, worst = min(width, height), 0, float("inf")
        while row < len(rest):
            deep = sum(rest[: row + 1]) / side
            thin = max(max(area / deep**2, deep**2 / area) for area in (rest[0], rest[row]))
            if thin > worst:
                break
            row, worst = row + 1, thin
        deep, along = sum(rest[:row]) / side, 0.0
        for area in rest[:row]:
            if width >= height:
                yield x, y + along, deep, area / deep
            else:
                yield x + along, y, area / deep, deep
            along += area / deep
        rest = rest[row:]  # whose sum says what is left, where a difference of lengths would be inexact
        if width >= height:
            x, width = x + deep, sum(rest) / height
        else:
            y, height = y + deep, sum(rest) / width


def overview(timeline: Timeline) -> Figure:
    """One figure of a run for a file: its life, and below it who holds the peak.

        overview(run.timeline).savefig("step.svg")

    Raises:
        ImportError: If matplotlib is not installed.
    """
    _pyplot()
    from matplotlib import figure, style

    with style.context("everybyte.book"):
        whole = figure.Figure(figsize=(9.6, 7.6), layout="constrained")  # not pyplot's, so it opens no window
        above, below = whole.subplots(2, 1)
        life(timeline, above)
        icicle(timeline, below)
    return whole


# -- what they share ---------------------------------------------------------------------------------------------------


class _Labels:
    """Draws boxes with as much of a text in them as there is room for."""

    def __init__(self, ax: Axes, width: float, height: float) -> None:
        ax.figure.canvas.figure.draw_without_rendering()  # places the axes; all else must be there
        extent, points = ax.get_window_extent(), 72 / ax.figure.dpi
        self._ax = ax
        self._across = extent.width * points / width  # points to a unit of x
        self._up = extent.height * points / height
        self.least = 1.5 * _SMALL / self._across  # narrower than that there is no room for a line

    def box(self, x: float, width: float, y: float, height: float, text: str, colour: str) -> None:
        from matplotlib.patches import Rectangle

        edge = "white" if colour not in ("white", _PALE) else "#8a949c"
        self._ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=0.8))
        rows, turned = fitted(text, width * self._across, height * self._up, _SMALL)
        if rows:
            middle = {"ha": "center", "va": "center", "rotation": 90 * turned, "linespacing": 1.2}
            at = x + width / 2, y + height / 2
            self._ax.text(*at, "\n".join(rows), fontsize=_SMALL, color=ink(colour), **middle)


def fitted(text: str, width: float, height: float, size: float) -> tuple[list[str], bool]:
    """The lines of a text that a box has room for, and whether they stand upright in it, read from below.

    Only the first line is cut, if it is a name; of the others the last are said first.

    Args:
        text: Its lines.
        width, height: Of the box, in the unit of `size`.
        size: Of the letters.
    """
    upright, turned = _fitting(text, width, height, size), _fitting(text, height, width, size)
    turn = _letters(turned) > 1.5 * _letters(upright)
    return (turned, True) if turn else (upright, False)


def _fitting(text: str, width: float, height: float, size: float) -> list[str]:
    letters, lines = int(width / (0.66 * size)), int(height / (1.3 * size))
    name, *rest = text.split("\n")
    rows = [shortened(name, letters)] if len(name) <= letters or (rest and letters >= _FEWEST) else []
    rest = [row for row in rest if len(row) <= letters]
    return [*rows, *rest[max(0, len(rest) + len(rows) - lines) :]][: max(0, lines)]


def _letters(rows: Sequence[str]) -> int:
    return sum(map(len, rows))


def ink(colour: str) -> str:
    """Black or white, whichever stands out more: at least 4.5 to 1 on any colour (WCAG 2, relative luminance)."""
    if colour == "white":
        return "black"
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = np.dot([0.2126, 0.7152, 0.0722], linear)
    return "black" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "white"


def _strip(ax: Axes, timeline: Timeline, first: int, end: int) -> None:
    """A strip along the top that names the passes."""
    phase = timeline.table["phase"].slice(first, end - first).to_pandas().to_numpy(dtype=object)
    turns = np.flatnonzero(phase[1:] != phase[:-1]) + 1
    edges = [0, *turns.tolist(), len(phase)]
    across = ax.get_xaxis_transform()
    for name, (colour, short) in PHASES.items():
        spans = [(a + first, b - a) for a, b in pairwise(edges) if b > a and phase[a] == name]
        ax.broken_barh(spans, (0.94, 0.06), transform=across, facecolors=colour, linewidth=0)
        for left, width in spans:
            letters = width / len(phase) * _points_across(ax) / (0.62 * _SMALL)
            fits = [text for text in (name, short) if len(text) + 0.5 < letters]
            if fits:
                ax.text(left + width / 2, 0.97, fits[0], ha="center", va="center", fontsize=_SMALL, transform=across)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('figures are drawn by matplotlib: pip install "everybyte[book]"') from error
    return pyplot


def _axes(width: float, height: float) -> Axes:
    return _pyplot().subplots(figsize=(width, height), layout="constrained")[1]


def _nothing(ax: Axes, text: str) -> Axes:
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes)
    ax.set_axis_off()
    return ax


def _in_bytes(axis: Any, top: int) -> None:
    """Labels an axis of bytes in the unit of its largest number."""
    unit = unit_of(top)[0]
    axis.set_major_formatter(lambda nbytes, _: f"{nbytes / unit:g}")


def _points_across(ax: Axes) -> float:
    """How wide the axes are, before they are laid out: at least about."""
    return ax.get_window_extent().width * 72 / ax.figure.dpi


def shortened(text: str, most: int) -> str:
    """A text cut in its middle."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"


def amount(nbytes: int) -> str:
    unit, name = unit_of(nbytes)
    number = nbytes / unit
    return f"{number:,.0f} {name}" if unit == 1 or number >= 999.5 else f"{number:#.3g}".rstrip(".") + f" {name}"


def unit_of(nbytes: int) -> tuple[int, str]:
    return (GB, "GB") if nbytes >= GB else (MB, "MB") if nbytes >= MB else (1, "B")


def _steps(timeline: Timeline) -> slice:
    """The events of the steps; where none was marked, all."""
    return slice(int(timeline.info.get("start_event", 0)), int(timeline.info.get("end_event", len(timeline))))


def _live_by_category(timeline: Timeline) -> dict[str, np.ndarray]:
    frame = timeline.frame()
    change = np.where(frame["action"] == "alloc", frame["nbytes"], -frame["nbytes"])
    category = frame["category"].to_numpy()
    names = (*CATEGORIES, *({WORKSPACE} & set(category)))
    return {name: np.cumsum(np.where(category == name, change, 0)) for name in names}


def corners(total: np.ndarray, most: int = 2000) -> np.ndarray:
    """Which events to draw so that no peak is lost: in each of `most` stretches its first, highest and lowest."""
    if len(total) <= 3 * most:
        return np.arange(len(total))
    edges: Sequence[np.ndarray] = np.array_split(np.arange(len(total)), most)
    return np.unique([i for part in edges for i in (part[0], part[total[part].argmax()], part[total[part].argmin()])])
