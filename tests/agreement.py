"""A body of training code, traced and really run: where the two timelines differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

import everybyte as eb
from everybyte.timeline import Timeline


def assert_agree(body: Callable[[Any], None]) -> eb.Trace:
    """Holds peaks and every size allocated of a traced run against those of a real one, scratch apart.

    Args:
        body: Takes the run; the same code for both.

    Returns:
        The traced run.
    """
    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    differences = differences_between(traced.timeline.without("scratch"), measured.timeline.without("scratch"))
    assert not differences, f"\n{differences}"
    return traced


def _makers(timeline: Timeline, nbytes: int) -> str:
    frame = timeline.frame()
    rows = frame[(frame["action"] == "alloc") & (frame["nbytes"] == nbytes)]
    counts = rows.groupby(["phase", "op"], observed=True).size()
    return ", ".join(f"{phase} {op} x{count}" for (phase, op), count in counts.items()) or "none"


def differences_between(traced: Timeline, measured: Timeline) -> str:
    """What differs between the two, in words; empty if nothing does."""
    counts = pd.DataFrame({"traced": traced.allocations(1), "measured": measured.allocations(1)}).fillna(0).astype(int)
    counts = counts[counts["traced"] != counts["measured"]]
    lines = []
    if traced.peak_bytes != measured.peak_bytes:
        lines.append(f"peak: traced {traced.peak_bytes:,} B, measured {measured.peak_bytes:,} B")
    if traced.peak_above_start != measured.peak_above_start:
        lines.append(f"above the start: traced {traced.peak_above_start:,} B, measured {measured.peak_above_start:,} B")
    for nbytes, row in counts.iterrows():
        lines.append(f"{nbytes:,} B: {row['traced']} times traced, {row['measured']} times measured")
        lines.append(f"    traced:   {_makers(traced, nbytes)}")
        lines.append(f"    measured: {_makers(measured, nbytes)}")
    return "\n".join(lines)
