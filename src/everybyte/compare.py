"""What grew between two runs: who holds the peak of the one, and who that of the other.

Both peaks are of what was requested, which is what modules, operations and categories hold to the byte: the differences
of all rows add up to that of the peaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from .timeline import Timeline
from .units import parse_bytes

KEYS: Final = ("module", "category", "op")
"""What holders can be told apart by."""

_ALIKE: Final = ("evidence", "rules", "gpu", "steps", "torch")  # what two runs should have in common to be compared
_UNCERTAIN: Final = ("not_covered", "conditional")


@dataclass(frozen=True)
class Change:
    """What one holder has at the peak: bytes before and after, and storages."""

    name: str
    before: int
    after: int
    storages: tuple[int, int]

    @property
    def difference(self) -> int:
        """Bytes more than before; negative for less."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two peaks, and who makes the difference.

    Attributes:
        before, after: Requested bytes at the peaks, `Timeline.peak_bytes`.
        key: What holders are told apart by.
        changes: A holder each, the largest growth first, those that stayed left out.
        unlike: What the two runs do not have in common, as texts: other things than the code may make the difference.
        uncertain: What makes the figures of one of them uncertain: operations that no rule covers, and lines where a
            value that the trace did not know decided the way.
    """

    before: int
    after: int
    key: str
    changes: tuple[Change, ...]
    unlike: tuple[str, ...]
    uncertain: tuple[str, ...]

    @property
    def difference(self) -> int:
        """Bytes more than before: the sum of all differences of `changes`."""
        return self.after - self.before

    def over(self, allowance: int) -> bool:
        """Whether the peak grew by more than so many bytes."""
        return self.difference > allowance


def compare(before: Timeline, after: Timeline, key: str = "module") -> Comparison:
    """Compares two runs at their peaks.

    Args:
        before: The run to compare with.
        after: The run to be judged.
        key: One of `KEYS`.

    Raises:
        ValueError: If there is no such key.
    """
    if key not in KEYS:
        raise ValueError(f"by={key!r}: choose one of {', '.join(KEYS)}")
    tables = [timeline.by(key) for timeline in (before, after)]
    held = [
        dict(zip(table.index, zip(table["nbytes"], table["storages"], strict=True), strict=True)) for table in tables
    ]
    changes = []
    for name in held[0].keys() | held[1].keys():
        (was, was_count), (now, now_count) = (holders.get(name, (0, 0)) for holders in held)
        if was != now:
            changes.append(Change(name, int(was), int(now), (int(was_count), int(now_count))))
    changes.sort(key=lambda change: (-change.difference, change.name))
    uncertain = {str(x) for t in (before, after) for name in _UNCERTAIN for x in t.info.get(name) or ()}
    unlike = tuple(_unlike(before, after))
    return Comparison(before.peak_bytes, after.peak_bytes, key, tuple(changes), unlike, tuple(sorted(uncertain)))


def _unlike(before: Timeline, after: Timeline) -> Iterable[str]:
    for name in _ALIKE:
        was, now = (timeline.info.get(name) for timeline in (before, after))
        if was != now:
            yield f"{name}: {was} before, {now} after"


_ALLOWED: Final = re.compile(r"\+?\s*(?:(\d+(?:\.\d+)?)\s*%|([\d.,_]+\s*[A-Za-z]*))")


def allowance(text: str, before: int) -> int:
    """Bytes by which a peak may grow, from "+1%", "+10MB" or "0".

        >>> eb.compare.allowance("+1%", 250_099), eb.compare.allowance("10 MiB", 0)
        (2500, 10485760)

    Args:
        text: A share of the peak before, or a size as `parse_bytes` reads it.
        before: The peak before, in bytes.

    Raises:
        ValueError: If the text is neither.
    """
    match = _ALLOWED.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no growth: write for example +1%, +10MB, +10MiB or 0")
    return int(Fraction(match[1]) * before / 100) if match[1] else parse_bytes(match[2])
