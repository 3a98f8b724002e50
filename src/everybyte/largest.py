"""The largest size that fits, found by trying: the answer fits and one more does not, both really tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_BY_LINE: Final = 6
"""So many guesses are made along a straight line, which bytes nearly follow; after them the range is halved."""


class Tried(Protocol):
    """What a try at one size says."""

    fits: bool
    nbytes: int


@dataclass(frozen=True)
class Largest:
    """The largest size that fits.

    Attributes:
        now: The size that the program has.
        size: The largest that fits; 0 if not even 1 does.
        nbytes: What it needs; 0 if none fits.
        next_nbytes: What one more needs; None if there is no more to try.
    """

    now: int
    size: int
    nbytes: int
    next_nbytes: int | None


def largest(tried: Callable[[int], Tried], now: int, room: int, most: int) -> Largest:
    """Looks for the largest size that fits.

    Args:
        tried: Says of a size whether it fits, and how many bytes it needs.
        now: The size to begin with.
        room: Bytes that there are; a guide for guesses alone, what fits is what `tried` says.
        most: The largest size there is.

    Raises:
        ValueError: Unless 1 <= now <= most.
    """
    if not 1 <= now <= most:
        raise ValueError(f"now={now} lies outside of 1 to {most}")
    found: dict[int, Tried] = {}
    low, high, guess = 0, most + 1, now
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        found[guess] = tried(guess)
        low, high = (guess, high) if found[guess].fits else (low, guess)
        guess = (low + high) // 2 if len(found) > _BY_LINE else _next_guess(found, low, high, room)
    beyond = found[high].nbytes if high in found else None
    return Largest(now, low, found[low].nbytes if low else 0, beyond)


def _next_guess(found: dict[int, Tried], low: int, high: int, room: int) -> int:
    """Where the line through the two nearest sizes meets the room; in proportion where there is one size alone."""
    near = sorted(found, key=lambda size: min(abs(size - low), abs(size - high)))[:2]
    if len(near) == 1:
        return near[0] * room // max(found[near[0]].nbytes, 1)
    first, second = near
    slope = (found[second].nbytes - found[first].nbytes) / (second - first)
    return first + int((room - found[first].nbytes) // slope) if slope > 0 else high - 1
