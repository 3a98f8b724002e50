"""The largest size that fits, found by trying: the answer fits and one more does not, both really tried.

What an allocator reserves does not always grow with the size, so a larger one may fit again by luck. That is not looked
for: the answer is where a program that grows stops fitting.
"""

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
    why: str


@dataclass(frozen=True)
class Largest:
    """The largest size that fits.

    Attributes:
        now: The size that the program has.
        size: The largest that fits; 0 if not even 1 does.
        nbytes: What it needs; 0 if none fits.
        next_nbytes: What one more needs, 0 if the program fails there; None if there is no more to try.
        next_why: Why one more does not fit.
    """

    now: int
    size: int
    nbytes: int
    next_nbytes: int | None
    next_why: str = ""


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
    nbytes, beyond = found[low].nbytes if low else 0, found.get(high)
    return Largest(now, low, nbytes, *((beyond.nbytes, beyond.why) if beyond else (None,)))


def _next_guess(found: dict[int, Tried], low: int, high: int, room: int) -> int:
    """Where the line through the two nearest sizes meets the room; in proportion where there is one size alone."""
    near = sorted(found, key=lambda size: min(abs(size - low), abs(size - high)))[:2]
    if len(near) == 1:
        return near[0] * room // max(found[near[0]].nbytes, 1)
    first, second = near
    slope = (found[second].nbytes - found[first].nbytes) / (second - first)
    return first + int((room - found[first].nbytes) // slope) if slope > 0 else high - 1
