"""What a benchmark found, as rows, and the one table that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Row:
    """Something that a tool did several times.

    Attributes:
        what: What it was done to. The first row of a `what` is the one that the others are compared with.
        tool: Who did it, and how.
        seconds: What each time took, at least two.
        peak: The peak that the tool states, in bytes; None if it states none.
        evidence: How it knows the peak, "measured" or "traced"; "" for what it says otherwise.
        units: How many layers, events or runs the seconds are for. Ratios are of seconds for each.
        memory: Bytes that the process took for this beyond what it had after its imports, each time.
        beside: A row that took turns with this one, to be compared with in place of the first.
    """

    what: str
    tool: str
    seconds: tuple[float, ...]
    peak: int | None = None
    evidence: str = ""
    units: int = 1
    memory: tuple[int, ...] = ()
    beside: Row | None = None


def timed(step: Callable[[], object], times: int) -> tuple[float, ...]:
    """Seconds of each of some calls."""
    return tuple(_seconds(step, times))


def _seconds(step: Callable[[], object], times: int) -> Iterator[float]:
    for _ in range(times):
        began = time.perf_counter()
        step()
        yield time.perf_counter() - began


def table(rows: Iterable[Row]) -> pd.DataFrame:
    """A row each, with its ratio to the one it is compared with, and its peak less the true one.

    A ratio is that of the least times, since what else the machine does only adds to a time; its spread is from least
    over most to most over least. The true peak is the measured one; of what was not really run, the traced one.
    """
    rows = list(rows)
    first = {row.what: row for row in reversed(rows)}
    true = {row.what: row for kind in ("traced", "measured") for row in reversed(rows) if row.evidence == kind}
    columns = [_columns(row, row.beside or first[row.what], true.get(row.what)) for row in rows]
    return pd.DataFrame(columns).astype(dict.fromkeys(("peak", "true", "difference", "memory"), "Int64"))


def _columns(row: Row, beside: Row, true: Row | None) -> dict[str, object]:
    if len(row.seconds) < 2:
        raise ValueError(f"{row.what}, {row.tool}: done {len(row.seconds)} times, and one time has no spread")
    least, most = min(row.seconds), max(row.seconds)
    for_each = beside.units / row.units
    compared = true is not None and row.peak is not None and row.evidence != "measured"
    return {
        "what": row.what,
        "tool": row.tool,
        "times": len(row.seconds),
        "least": least,
        "most": most,
        "units": row.units,
        "beside": beside.tool,
        "ratio": for_each * least / min(beside.seconds),
        "ratio least": 1.0 if row is beside else for_each * least / max(beside.seconds),
        "ratio most": 1.0 if row is beside else for_each * most / min(beside.seconds),
        "peak": row.peak,
        "evidence": row.evidence,
        "true": true.peak if compared else None,
        "difference": row.peak - true.peak if compared else None,
        "memory": max(row.memory, default=None),
    }
