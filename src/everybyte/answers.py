"""What a timeline answers, as rows of plain data for JSON: who holds the peak, what waits for backward, what grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .names import of_all
from .timeline import CATEGORIES, Timeline

_MAKER: Final = ("op", "line", "own", "module")


def by(timeline: Timeline, key: str) -> list[dict[str, Any]]:
    """Who holds the peak, by a column of the timeline, largest first."""
    table = timeline.by(key)
    rows = zip(table.index, table["nbytes"].tolist(), table["storages"].tolist(), strict=True)
    return [{key: name, "bytes": nbytes, "storages": count} for name, nbytes, count in rows]


def extent(answer: Mapping[str, Any]) -> str:
    """How much was traced: "3 steps"; of a program that goes on "the first 3 steps"; "one run" if unmarked."""
    steps = answer["steps"]
    if not steps:
        return "one run"
    first = "" if answer["ended"].endswith("end") else "the first "
    return f"{first}{steps} steps" if steps > 1 else f"{first}step" if first else "1 step"


def moment(timeline: Timeline, event: int, *columns: str) -> dict[str, Any]:
    """An event, and what is known of it in these columns."""
    row = timeline.table.slice(event, 1).to_pylist()[0]
    return {"event": event, **{column: row[column] for column in columns}}


def saved_for_backward(timeline: Timeline) -> dict[str, Any]:
    """What forward passes made and backward passes wait for: at the peak, or where none is there, when most of it is.

    Rows are by operation, lines and module, of which those of a list are one, largest first.
    """
    event, kept = timeline.peak, _kept(timeline, timeline.peak)
    at_peak = not kept.empty
    if not at_peak:
        saved = np.flatnonzero(timeline.table["category"].to_pandas() == "activation")
        if len(saved):
            event = int(saved[timeline.without(*(set(CATEGORIES) - {"activation"})).peak])
            kept = _kept(timeline, event)
    kept["module"] = kept["module"].map(of_all)
    groups = kept.groupby([*_MAKER])["nbytes"].agg(["sum", "count"])
    groups = groups.sort_values("sum", ascending=False, kind="stable")
    return {
        **moment(timeline, event, "step", "phase"),
        "at_peak": at_peak,
        "bytes": int(kept["nbytes"].sum()),
        "rows": [
            {**dict(zip(_MAKER, maker, strict=True)), "bytes": int(nbytes), "storages": int(count)}
            for maker, nbytes, count in zip(groups.index, groups["sum"], groups["count"], strict=True)
        ],
    }


def growth_per_step(timeline: Timeline) -> list[dict[str, int]]:
    """What each step leaves behind."""
    return timeline.growth_per_step().reset_index().to_dict("records")


def _kept(timeline: Timeline, event: int) -> Any:
    live = timeline.live(event)
    kept = live[live["category"] == "activation"]
    return kept.astype({name: str for name in _MAKER})
