"""Draws the front page's figure: of both analyses, what is claimed, and what was computed, traced and measured.

No number of it is typed. Claims come from the ledgers in `src/everybyte/claims`; what was found, from what the chapters
glued. `press.py` draws it anew into each build, so that a reader's own run shows its own numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from matplotlib import rc_context, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from everybyte.audit import packaged
from everybyte.sweep.glued import column, glued
from everybyte.sweep.grid import Value
from everybyte.units import parse_bytes

NAME = "found.svg"
CLAIMED = "#D55E00"
FOUND = {"computed": ("#0072B2", "s"), "traced": ("#CC79A7", "D"), "measured": ("#009E73", "^")}
"""Colour and mark of each kind of evidence, as the chips in the text have them."""


@dataclass(frozen=True)
class Row:
    """A quantity: the id of its claim, and the keys under which the chapters glued what was found of it."""

    name: str
    claim: str = ""
    computed: str = ""
    traced: str = ""
    measured: str = ""


ROWS = {
    "activation_memory_math": (
        Row("24 decoder layers keep", "6.6", "14-all-layers", "14-paper"),
        Row("one of them keeps", "6.5", "11-exact", "11-total"),
        Row("a small one, really run", "", "11-cpu-computed", "11-cpu-traced", "11-cpu-measured"),
    ),
    "tft_memory_analysis": (
        Row("a training step needs", "4.6", "04-found-8", "04-traced", "04-measured"),
        Row("its forward pass keeps", "4.2", "04-forward", "04-forward-traced"),
        Row("210 of its networks keep", "5.8", "04-all-210", "04-traced-210"),
    ),
}
TITLES = {"activation_memory_math": "Activation Memory Math", "tft_memory_analysis": "The TFT memory report"}


def found(notebooks: Path) -> dict[str, dict[str, dict[str, int]]]:
    """For each analysis and quantity its bytes by kind of evidence.

    Raises:
        KeyError: If a ledger has no such claim, or no chapter glued a number of that name.
    """
    said: dict[str, Value] = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        said |= glued(nbformat.read(path, as_version=4))
    stated = {
        path.stem: {c["id"]: c["stated"] for c in tomllib.loads(path.read_text())["claim"]} for path in packaged()
    }
    return {
        analysis: {
            row.name: ({"claimed": parse_bytes(stated[analysis][row.claim])} if row.claim else {})
            | {kind: int(column([said[key]])[0]) for kind in FOUND if (key := getattr(row, kind))}
            for row in rows
        }
        for analysis, rows in ROWS.items()
    }


def drawn(quantities: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Figure:
    """The figure: a row a quantity, on a logarithmic axis of bytes; what agrees to the byte stands in one column."""
    with style.context("everybyte.book"):
        figure = Figure(figsize=(8.6, 4.6), layout="constrained")
        ax = figure.subplots()
        labels, y = {}, 0.0
        for analysis, rows in quantities.items():
            ax.text(0, y, TITLES[analysis], transform=ax.get_yaxis_transform(), ha="right", va="center", weight="bold")
            for name, evidence in rows.items():
                y += 1
                labels[y] = name
                _row(ax, y, evidence)
            y += 1.2
        ax.plot([], [], "o", color=CLAIMED, mfc="white", mew=1.8, label="claimed")
        for kind, (colour, mark) in FOUND.items():
            ax.plot([], [], mark, color=colour, label=kind)
        ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, handletextpad=0.2)
        ax.set(xscale="log", xlim=(1e6, 3e12), ylim=(y - 0.6, -0.5), yticks=[*labels], yticklabels=[*labels.values()])
        ticks = {"1 MB": 10**6, "10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9, "10 GB": 10**10, "100 GB": 10**11}
        ax.set_xticks([*ticks.values()], [*ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
        ax.grid(axis="y", visible=False)
        ax.spines["left"].set_visible(False)
    return figure


def _row(ax: Axes, y: float, evidence: Mapping[str, int]) -> None:
    found = {kind: nbytes for kind, nbytes in evidence.items() if kind != "claimed"}
    truth = max(found.values())
    if "claimed" in evidence:
        claimed = evidence["claimed"]
        ax.plot([claimed, truth], [y, y], color="0.7", linewidth=1.2, zorder=1)
        ax.plot(claimed, y, "o", color=CLAIMED, mfc="white", mew=1.8, ms=9, zorder=3)
        if truth > 1.1 * claimed:
            at = (claimed * truth) ** 0.5, y
            above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
            ax.annotate(f"× {truth / claimed:,.0f}", at, fontsize=9, **above)
    for number, (kind, nbytes) in enumerate(found.items()):
        height = y + 0.26 * (number - (len(found) - 1) / 2)
        ax.plot(nbytes, height, FOUND[kind][1], color=FOUND[kind][0], ms=5, zorder=4)
    ax.text(2.6e12, y, f"{truth:,} B", ha="right", va="center", fontsize=9)


def draw(pages: Path) -> None:
    """Draws what the notebooks of a folder of pages say into its `book/_static`."""
    with rc_context({"svg.hashsalt": "found"}):
        drawn(found(pages / "notebooks")).savefig(pages / "book" / "_static" / NAME, metadata={"Date": None})
