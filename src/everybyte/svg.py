"""A run's life and its peak by module as SVG inside a page: the pictures of `figures`, without a drawing library.

A picture is drawn for a width, at which its letters have `SIZE`; a page shows the one that its reader's screen is wide
enough for. Colours are classes, which the page's style gives: `kind-…` a category's, `group-…` a line's of code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import floor, log10
from typing import Any, Final

import numpy as np

from . import figures
from .figures import amount, corners, draw_tree, fitted, module_tree, shortened, unit_of
from .markup import Markup, tag
from .timeline import CATEGORIES, WORKSPACE, Timeline

SIZE: Final = 12  # of letters, px
LETTER: Final = 0.58 * SIZE  # about as wide as one is
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 6, 74, 22  # px around the area that is drawn in
CLASSES: Final = {colour: f"kind-{name.replace(' ', '-')}" for name, colour in figures.COLOURS.items()}


def series(timeline: Timeline) -> dict[str, tuple[str, np.ndarray]]:
    """What a run's memory is for, bytes after each event: by name, the class of its colour and the curve.

    Of a recording, which knows no categories, the lines of code that hold most at the peak.
    """
    frame = timeline.frame()
    change = np.where(frame["action"] == "alloc", frame["nbytes"], -frame["nbytes"])
    if (frame["category"] != "").any():
        names = frame["category"].to_numpy(dtype=object)
        classes = {name: CLASSES[figures.COLOURS[name]] for name in (*CATEGORIES, WORKSPACE)}
    else:
        names = np.asarray(frame["line"].astype(object).fillna(""), dtype=object)
        largest = [line for line in timeline.by("line").index if line][: len(figures.GROUPS)]
        names = np.where(np.isin(names, largest), names, "")
        classes = {line: f"group-{i}" for i, line in enumerate(largest)} | {"": "group-rest"}
    curves = {name: (kind, np.cumsum(np.where(names == name, change, 0))) for name, kind in classes.items()}
    return {name: both for name, both in curves.items() if both[1].any()}


def life(timeline: Timeline, width: int, limit: int | None = None) -> Markup:
    """The life of a run: live bytes over the events, stacked, the passes above, the peak marked and named.

    Args:
        timeline: The run, with at least one event.
        width: px.
        limit: Bytes that the process can have, drawn as a line where it is near.
    """
    top, peak = timeline.peak_bytes or 1, timeline.peak
    start, end = (int(timeline.info.get(key, at)) for key, at in (("start_event", 0), ("end_event", len(timeline))))
    first, end = min(start, peak), max(end, peak + 1)
    limit = limit if limit is not None and limit <= 1.5 * top else None
    height = _TOP + _BOTTOM + (230 if width > 600 else 180)
    high = max(top, limit or 0)
    inner, tall = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(event: float) -> float:
        return round(_LEFT + inner * (event - first) / (end - first), 1)

    def y(nbytes: float) -> float:
        return round(height - _BOTTOM - tall * nbytes / high, 1)

    keep = corners(timeline.live_bytes[first:end], inner // 2)
    lines = _grid(high, width, y)
    areas, below = [], sum(curve for _, curve in series(timeline).values())
    for name, (kind, curve) in reversed(series(timeline).items()):
        levels = [y(n) for n in below[first:end][keep].tolist()]
        most = figures.amount(int(curve[first:end].max()))
        areas.append(
            tag(
                "path",
                tag("title", f"{name or 'other lines'}: {most} at most"),
                class_=kind,
                d=_steps(keep + first, levels, x, y(0), x(end)),
            )
        )
        below = below - curve
    if limit is not None:
        lines.append(tag("line", x1=_LEFT, x2=width - _RIGHT, y1=y(limit), y2=y(limit), class_="limit"))
        lines.append(
            tag("text", f"a process can have {amount(limit)}", x=_LEFT + 4, y=round(y(limit) + 13, 1), class_="limit")
        )
    return tag(
        "svg",
        tag("title", "Live bytes over the run"),
        tag("desc", f"{', '.join(_said_of(timeline))}."),
        *areas,
        *lines,
        *_passes(timeline, first, end, inner, x),
        *_beginnings(timeline, first, end, height, x),
        *_peak(_said_of(timeline), x(peak), y(top), width),
        viewBox=f"0 0 {width} {height}",
        role="img",
        class_="life",
    )


def icicle(timeline: Timeline, width: int, levels: int = 3) -> Markup:
    """Who holds the peak: the modules, each under the one that it is in, as wide as its bytes, and what they are for.

    Args:
        timeline: The run, with at least one byte at its peak.
        width: px.
        levels: How deep to go into modules of modules.
    """
    tree = module_tree(timeline, timeline.peak, levels)
    pen = _Pen(width, tree.nbytes, levels + 2)
    draw_tree(tree, levels, "peak", pen)
    return tag(
        "svg",
        tag("title", "The peak by module"),
        tag("desc", "The table below has the same numbers."),
        *pen.boxes,
        viewBox=f"0 0 {width} {(levels + 2) * pen.ROW}",
        role="img",
        class_="icicle",
    )


def card(parts: Mapping[str, int], usable: Sequence[int], total: int, width: int) -> Markup:
    """A card and what a run reserves of it, to scale: the parts one after another, and what the card cannot give.

    Args:
        parts: Bytes by class of colour.
        usable: What a process can have of the card, at least and at most.
        total: The card's memory.
        width: px.
    """
    reserved = sum(parts.values())
    scale = width / max(total, reserved)
    boxes, at = [tag("rect", x=0, y=14, width=round(total * scale, 1), height=36, class_="room")], 0
    for kind, nbytes in parts.items():
        boxes.append(tag("rect", x=round(at * scale, 1), y=14, width=round(nbytes * scale, 1), height=36, class_=kind))
        at += nbytes
    context = tag("title", "What a CUDA context takes of it")
    boxes.append(
        tag(
            "rect",
            context,
            x=round(usable[0] * scale, 1),
            y=14,
            width=round((total - usable[0]) * scale, 1),
            height=36,
            class_="context",
        )
    )
    ends = []
    for nbytes, text in (
        (usable[0], f"a process can have {amount(usable[0])}"),
        (reserved, f"reserved {amount(reserved)}"),
    ):
        edge, up = nbytes * scale, nbytes == reserved
        right = edge > width / 2
        ends.append(
            tag("line", x1=round(edge, 1), x2=round(edge, 1), y1=10 if up else 14, y2=50 if up else 54, class_="mark")
        )
        ends.append(
            tag(
                "text",
                text,
                x=round(edge, 1),
                y=9 if up else 66,
                text_anchor="end" if right else "start",
                class_="mark",
            )
        )
    return tag(
        "svg",
        tag("title", "The card and what is reserved of it"),
        *boxes,
        *ends,
        viewBox=f"0 0 {width} 72",
        role="img",
        class_="card",
    )


def bar(share: float) -> Markup:
    """A share of a row as a bar."""
    filled = tag("rect", width=f"{max(0, min(share, 1)):.1%}", height="100%")
    return tag("svg", filled, class_="bar", aria_hidden="true")


def swatch(kind: str) -> Markup:
    """The colour of a class."""
    return tag("svg", tag("rect", width="100%", height="100%", class_=kind), class_="swatch", aria_hidden="true")


# -- what the pictures are made of -------------------------------------------------------------------------------------


class _Pen:
    """Draws the boxes of a tree, with as much of a text in each as there is room for."""

    ROW: Final = 46  # px

    def __init__(self, width: int, total: int, rows: int) -> None:
        self._across, self._rows = width / total, rows
        self.least = 1.5 * SIZE / self._across
        self.boxes: list[Markup] = []

    def box(self, x: int, width: int, y: int, height: int, text: str, colour: str) -> None:
        left, across = x * self._across, width * self._across
        top, up = (self._rows - y - height) * self.ROW, height * self.ROW
        rows, turned = fitted(text, across - 4, up - 2, SIZE)
        middle, centre = left + across / 2, top + up / 2
        first = centre - (len(rows) - 1) * 0.6 * SIZE + 0.35 * SIZE
        parts = [tag("title", text.replace("\n", ", "))]
        parts.append(tag("rect", x=round(left, 1), y=top, width=round(across, 1), height=up))
        if rows:
            spans = (
                tag("tspan", row, x=round(middle, 1), y=round(first + i * 1.2 * SIZE, 1)) for i, row in enumerate(rows)
            )
            turn = f"rotate(-90 {middle:.1f} {centre:.1f})" if turned else None
            parts.append(tag("text", *spans, text_anchor="middle", transform=turn))
        self.boxes.append(
            tag("g", *parts, class_=f"box {CLASSES.get(colour, 'module' if colour == 'white' else 'pale')}")
        )


def _steps(events: np.ndarray, levels: Sequence[float], x: Any, bottom: float, end: float) -> Markup:
    """A path under a curve that stays after each event as it is until the next; what would not be seen is left out."""
    path, at = [f"M{x(int(events[0]))} {bottom}"], bottom
    for event, level in zip(events.tolist(), levels, strict=True):
        if level != at:
            path.append(f"H{x(event)}V{level}")
            at = level
    return Markup("".join([*path, f"H{end}V{bottom}Z"]).replace(".0H", "H").replace(".0V", "V"))


def _grid(high: int, width: int, y: Any) -> list[Markup]:
    unit, name = unit_of(high)
    rough = high / unit / 4
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    ticks = [i * step for i in range(int(high / unit / step) + 1)]
    parts = []
    for tick in ticks:
        at = y(tick * unit)
        label = f"{tick:g} {name}" if tick == ticks[-1] else f"{tick:g}"
        parts.append(tag("line", x1=_LEFT, x2=width - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", label, x=_LEFT - 5, y=round(at + 0.35 * SIZE, 1), text_anchor="end", class_="tick"))
    return parts


def _passes(timeline: Timeline, first: int, end: int, inner: int, x: Any) -> list[Markup]:
    phase = np.asarray(timeline.table["phase"].slice(first, end - first).to_pandas(), dtype=object)
    edges = [0, *(np.flatnonzero(phase[1:] != phase[:-1]) + 1).tolist(), len(phase)]
    parts = []
    for a, b in pairwise(edges):
        if b > a and phase[a] in figures.PHASES:
            short = figures.PHASES[phase[a]][1]
            left, across = x(a + first), inner * (b - a) / len(phase)
            parts.append(
                tag(
                    "rect",
                    tag("title", phase[a]),
                    x=left,
                    y=0,
                    width=round(across, 1),
                    height=17,
                    class_=f"pass-{phase[a]}",
                )
            )
            text = next((text for text in (phase[a], short) if (len(text) + 1) * LETTER < across), None)
            if text:
                parts.append(
                    tag(
                        "text",
                        text,
                        x=round(left + across / 2, 1),
                        y=12.5,
                        text_anchor="middle",
                        class_=f"pass-{phase[a]}",
                    )
                )
    return parts


def _beginnings(timeline: Timeline, first: int, end: int, height: int, x: Any) -> list[Markup]:
    """Where each step begins."""
    numbers, begins = np.unique(timeline.table["step"].to_numpy(), return_index=True)
    parts, free = [], 0.0
    for number, event in zip(numbers.tolist(), begins.tolist(), strict=True):
        if 0 <= number < _steps_of(timeline) and first <= event < end and x(event) >= free:
            parts.append(tag("line", x1=x(event), x2=x(event), y1=_TOP, y2=height - _BOTTOM + 4, class_="step"))
            parts.append(tag("text", f"step {number}", x=x(event), y=height - 5, class_="tick"))
            free = x(event) + 9 * LETTER
    return parts


def _peak(texts: Sequence[str], x: float, y: float, width: int) -> list[Markup]:
    right = x > width / 2
    letters = int((x - 8 if right else width - x - 8) / LETTER) - 1
    at, anchor = (x - 8, "end") if right else (x + 8, "start")
    parts = [
        tag("path", d=f"M{x} {y}l-5 -9h10z", class_="peak"),
        tag("line", x1=x, x2=x, y1=22, y2=y - 9, class_="peak"),
    ]
    for i, text in enumerate(filter(None, texts)):
        parts.append(
            tag(
                "text",
                shortened(text, letters),
                x=at,
                y=round(32 + i * 1.25 * SIZE, 1),
                text_anchor=anchor,
                class_="peak",
            )
        )
    return parts


def _steps_of(timeline: Timeline) -> int:
    """How many steps were marked; a recording knows of none."""
    return 0 if timeline.info.get("evidence") == "recorded" else timeline.info.get("steps", 0)


def _said_of(timeline: Timeline) -> list[str]:
    """The peak in three texts: how much, when, and who asked for the last of it."""
    row = timeline.table.slice(timeline.peak, 1).to_pylist()[0]
    if not _steps_of(timeline):
        when = f"event {timeline.peak:,}"
    else:
        when = f"step {row['step']}, {row['phase']}" if row["step"] >= 0 else f"{row['phase']}, before the steps"
    who = f"{row['op']} in {row['module']}" if row["module"] else f"{row['op']} {row['line']}".strip()
    return [f"peak {amount(timeline.peak_bytes)}", when, who]
