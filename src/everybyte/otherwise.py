"""What a program allocates in other worlds (`everybyte.worlds`), compared: does it hang on values that no trace knows?

Two runs are alike if they ask the allocator for the same, in the same order, and give it back in the same order. Where
they are not, the first event that differs says which line of the code hangs on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from .timeline import Timeline
from .units import format_bytes
from .verdict import CANNOT_SAY, DOES_NOT_FIT, Verdict, doubts

PESSIMISM: Final = 100
"""Runs that differ in little are alike for a verdict that this many times the difference would not change."""


@dataclass(frozen=True)
class Seen:
    """What a program did in one world.

    Attributes:
        world: Its name.
        timeline: The run, up to where it ended.
        ended: As `script.Ran` says; "" if it failed.
        why: Why it failed.
        is_own: Whether by an error of its own, after it was answered: other values than these may spare it that.
        verdict: Of this run alone.
        decisions: What comparisons and conditions came to, by their lines (`Trace.decisions`).
        not_covered: As in the trace.
    """

    world: str
    timeline: Timeline
    ended: str
    why: str
    is_own: bool
    verdict: Verdict
    decisions: Mapping[str, set[Any]]
    not_covered: set[str]

    @classmethod
    def of(cls, world: str, run: Any, verdict: Verdict, ended: str, why: str = "", is_own: bool = False) -> Self:
        """That of a trace that is over."""
        return cls(world, run.timeline, ended, why, is_own, verdict, run.decisions, run.not_covered)

    @property
    def word(self) -> str:
        """The verdict's."""
        return self.verdict.word

    @property
    def peak_allocated(self) -> int:
        """Whole blocks, with workspaces."""
        return self.verdict.replay.peak_allocated


@dataclass(frozen=True)
class Found:
    """What the other worlds say of a program.

    Attributes:
        others: The runs in other worlds.
        conditional: Lines at which a value that no trace knows decided in any of the runs.
        parts: Of those that allocate otherwise, because of values alone, by world: where, as `difference` says.
        doubts: Why the base may not be what a real run does, a reason a text.
        remarks: What is worth knowing.
        settled: Those of `conditional` that leave the verdict as it is, whichever way they go.
    """

    others: Sequence[Seen]
    conditional: Sequence[str]
    parts: Mapping[str, tuple[int, str]]
    doubts: Sequence[str]
    remarks: Sequence[str] = ()
    settled: frozenset[str] = frozenset()


def compared(base: Seen, others: Sequence[Seen] = (), again: Callable[[], Seen] | None = None) -> Found:
    """Compares a run with those in other worlds.

    Args:
        again: Runs the program in the base's world once more. Where it then allocates otherwise, it is not values, or
            not they alone, that make the difference: it draws other numbers, say, or reads the clock.
    """
    parts, remarks, reasons = _parts(base, others, None), [], []
    if parts and (moves := difference(base, first := again())) is not None:
        second = again()
        drawn = difference(first, second)
        parts = _parts(first, others, drawn)
        remarks.append(f"{moves[1]}: from here on two runs of the program do not allocate alike; figures are of one")
        if len(words := {seen.word for seen in (base, first, second, *others)}) > 1:
            reasons.append(f"{remarks[0]}, and of some the verdict is {' and of others '.join(sorted(words))}")
    lines = _lines(base, others)
    settled = frozenset(lines) if _settles(base, others) else frozenset()
    peak, way = format_bytes(base.peak_allocated), "figures are of the way taken"
    if parts:
        peaks = [seen.peak_allocated for seen in others if seen.world in parts]
        other = format_bytes(max(peaks, key=lambda nbytes: abs(nbytes - base.peak_allocated)))
        way = (
            f"with others it peaks at {other}, not {peak}" if other != peak else f"with others, too, it peaks at {peak}"
        )
        where = next(line for _, line in sorted(parts.values()))
        if not lines:
            reasons.append(f"the values that no trace knows decide what is allocated from {where} on: {way}")
    elif all(map(_went_both_ways, lines.values())):
        way = f"either way it peaks at {peak}"
    failed = [seen for seen in others if not seen.ended]
    if foreign := [seen for seen in failed if not seen.is_own]:
        reasons.append(f"with other values {foreign[0].why}")
    elif others and len(failed) == len(others) and not parts:
        reasons.append(f"with other values {failed[0].why}; nobody knows what would come then")
    if settled:
        remarks.append(f"{', '.join(lines)}: a value that no trace knows decides the way; {way}")
    not_covered = base.not_covered.union(*(seen.not_covered for seen in others))
    open_ = [line for line in lines if line not in settled]
    return Found(others, [*lines], parts, [*doubts(not_covered, open_, way), *reasons], remarks, settled)


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `worlds` of an answer says, a world a line; nothing where the program allocates alike in all."""
    if not any(row["parts_at"] for row in rows):
        return []
    return [
        f"{row['answers']} numbers: it peaks at {format_bytes(row['peak_allocated'])}"
        + ("" if row["ended"] else " up to where it fails")
        + (f", otherwise from {row['parts_at']} on" if row["parts_at"] else ", alike")
        for row in rows
    ]


def _parts(base: Seen, others: Sequence[Seen], before: tuple[int, str] | None) -> dict[str, tuple[int, str]]:
    """Where the others part from a run, before it parts from another of its own world."""
    found = {seen.world: where for seen in others if (where := difference(base, seen)) is not None}
    if before is None:
        return found
    return {
        world: at for world, at in found.items() if at[0] < before[0] or (at[0] == before[0] and at[1] != before[1])
    }


def _lines(base: Seen, others: Sequence[Seen]) -> dict[str, set[Any]]:
    """Lines at which values decided, and what they did in any of these runs."""
    lines: dict[str, set[Any]] = {}
    for seen in (base, *others):
        for line, outcomes in seen.decisions.items():
            lines.setdefault(line, set()).update(outcomes)
    return lines


def _settles(base: Seen, others: Sequence[Seen]) -> bool:
    """Whether each comparison went both ways in runs that came to their end, and hardly changed what they need.

    Those of the user's own code are not settled so: he knows which way they go, and is told to see to it.
    """
    ended = [base, *(seen for seen in others if seen.ended)]
    lines, everywhere = _lines(base, ended[1:]), _lines(base, others)
    if not lines or lines.keys() != everywhere.keys() or not all(map(_went_both_ways, lines.values())):
        return False
    outcomes = frozenset().union(*everywhere.values())
    if None in outcomes or any(is_own or type(answer) is not bool for _, answer, is_own in outcomes):
        return False  # his to say; or a size, or who knows what
    if {seen.word for seen in ended} != {base.word} or base.word == CANNOT_SAY:
        return False
    replays = [seen.verdict.replay for seen in ended]
    ranges = [[replay.peak_allocated for replay in replays], [replay.peak_reserved for replay in replays]]
    spread = PESSIMISM * max(max(peaks) - min(peaks) for peaks in ranges)
    least, most = base.verdict.left
    return most + spread < 0 if base.word == DOES_NOT_FIT else least - spread >= 0


def _went_both_ways(outcomes: set[Any]) -> bool:
    """Whether each comparison of a line came to more than one answer: of two in a chain the second may not have."""
    answers: dict[int, set[Any]] = {}
    for instruction, answer, _ in outcomes - {None}:
        answers.setdefault(instruction, set()).add(answer)
    return bool(answers) and all(len(given) > 1 for given in answers.values())


def difference(one: Seen, other: Seen) -> tuple[int, str] | None:
    """Where two runs of a program part: the first event that differs, and the line of the one that has more there.

    A run that failed says nothing of what would have come; what it gave back as it unwound does not count.

    Returns:
        None if what the allocator is asked for is the same.
    """
    events = [_events(seen.timeline) for seen in (one, other)]
    stop = min((_last_made(e) for seen, e in zip((one, other), events, strict=True) if not seen.ended), default=None)
    events = [e[:stop] for e in events]
    common = min(len(e) for e in events)
    unlike = np.flatnonzero((events[0][:common] != events[1][:common]).any(axis=1))
    goes_on = one.ended != other.ended and stop is None  # one comes to its end, the other has steps to do
    if not (len(unlike) or len(events[0]) != len(events[1]) or goes_on):
        return None
    at = int(unlike[0]) if len(unlike) else common - (len(events[0]) == len(events[1]))
    first, second = (seen.timeline.table["line"].to_pylist() for seen in (one, other))
    lines = [line[at] if at < len(line) else "" for line in (first, second)]
    more = second.count(lines[1]) > first.count(lines[1])
    return at, lines[more] or lines[not more]


def _events(timeline: Timeline) -> np.ndarray:
    """`[events, 4]`: storage, bytes (negative where they are given back), stream, workspaces taken before it."""
    table = timeline.table
    signs = np.where(np.asarray(table["action"].to_pylist(), dtype=object) == "alloc", 1, -1)
    columns = [table[name].to_numpy() for name in ("storage", "nbytes", "stream")]
    taken = np.zeros(len(table), np.int64)
    for workspace in timeline.info["workspaces"]:
        taken[workspace["event"] :] += workspace["nbytes"]
    return np.stack([columns[0], signs * columns[1], columns[2], taken], axis=1)


def _last_made(events: np.ndarray) -> int:
    made = np.flatnonzero(events[:, 1] > 0)
    return int(made[-1]) + 1 if len(made) else 0
