"""Worlds: other answers to what no trace knows, to find whether they decide what a program allocates.

Where a program asks for a value that a trace does not know, it is answered with a number, which tells while it stays
ours if it decides something (`everybyte.values`). `math.exp(loss.item())` is ours no more, nor is an element of an
array. So a program that asks is traced again in other worlds, whose answers are large, small or negative, rise or fall.
What it allocates in all of them alike hangs on none of them (`everybyte.otherwise`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

MOST: Final = 2**20
"""So many elements of an array are answered; those after them are zero, which costs no memory."""


@dataclass(frozen=True)
class World:
    """A way of answering.

    Attributes:
        name: In a word.
        fraction, whole: The number, or whole number, that answers the first, second, ... question.
        slope: By how much the last element of an array is more than its first, as a part of that.
    """

    name: str
    fraction: Callable[[int], float]
    whole: Callable[[int], int]
    slope: float


def _mixed(k: int) -> int:
    """The sequence of Thue and Morse: numbers that are asked for in pairs or threes are large and small in turn."""
    return k.bit_count() & 1


ZEROS: Final = World("zeros", lambda k: 0.0, lambda k: 0, 0.0)
LARGE: Final = World("large", lambda k: 2.0**20 * (2 - 1 / (k + 1)), lambda k: 1000 + k, 0.25)
RISING: Final = World("rising", lambda k: 700 - 200 / (k + 1), lambda k: 1, 0.0)  # exp(700) is still a number
FALLING: Final = World("falling", lambda k: 1 / (k + 2), lambda k: 1, -0.5)
MIXED: Final = World("mixed", lambda k: 1 / (k + 2) if _mixed(k) else 2.0 ** (k % 8 + 1), _mixed, -0.125)
NEGATIVE: Final = World("negative", lambda k: -(2.0 ** (k % 16)), lambda k: 1, 0.25)
WORLDS: Final = {world.name: world for world in (ZEROS, LARGE, RISING, FALLING, MIXED, NEGATIVE)}

OTHERS: Final = ("large", "falling", "mixed", "negative")
"""Those in which a program is traced again."""

_IN_TURN: Final = (ZEROS, RISING, FALLING, MIXED, NEGATIVE)

GENTLER: Final = {"large": "rising"}
"""What is tried where one of them does not suit the program: `exp` of a large number is none."""


PATIENT: Final = 1024
"""So often a loop is answered in one way; then in each of the others in turn, for a loop that waits for another."""

ENDLESS: Final = 2**16
"""A loop that has asked so often does not end, for all that a trace can know."""


class Answers:
    """What one trace answers, question by question.

    Attributes:
        asked: How often there was a question.
    """

    def __init__(self, world: World = ZEROS) -> None:
        self._world = world
        self.asked = 0

    def _next(self, rounds: int) -> World:
        self.asked += 1
        return self._world if rounds < PATIENT else _IN_TURN[rounds % len(_IN_TURN)]

    def number(self, rounds: int = 0) -> float:
        """The next answer, a number, to a loop that has asked so often before."""
        return self._next(rounds).fraction(self.asked - 1)

    def times(self, rounds: int = 0) -> float:
        """By how much what is so in a run that goes well may be more or less: between 1/1024 and 1024; 1 if it is."""
        world, number = self._next(rounds), self.asked - 1
        return 1.0 if world is ZEROS else min(max(abs(world.fraction(number)), 2.0**-10), 2.0**10)

    def fill(self, real: torch.Tensor, rounds: int = 0) -> torch.Tensor:
        """Lets a real tensor, which holds zeros, hold the next answer."""
        number, world = self.asked, self._next(rounds)
        if world is ZEROS:
            return real
        some = real.view(-1)[:MOST] if real.is_contiguous() else real
        if real.is_floating_point() or real.is_complex():
            first, limits = world.fraction(number), torch.finfo(real.dtype)
            least, most = limits.min, limits.max
            values = torch.linspace(first, first * (1 + world.slope), some.numel(), dtype=torch.float64)
        else:
            least, most = 0, 1 if real.dtype == torch.bool else min(torch.iinfo(real.dtype).max, 2**62)
            values = world.whole(number) - torch.arange(some.numel()) % 2
        some.copy_(values.clamp(least, most).reshape(some.shape))
        return real


@contextmanager
def same_draws() -> Iterator[None]:
    """Whatever is drawn at random in the block is the same in each process; after it, as if there had been no block."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
