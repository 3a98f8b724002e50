"""Rounds: how often a loop has asked before, where it asks, whichever function asks for it.

A loop that ends when a value says so would not end in a trace, which answers with the same value again and again.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any


class _Mark(dict[Any, int]):
    """Counts of a running frame, which holds it as its local trace function: it dies with the frame."""

    def __call__(self, *_: Any) -> None:
        """Lines of that frame are not traced."""


class Rounds:
    """Counts, place by place, how often the loop under way has come by."""

    def __init__(self) -> None:
        self._loops: dict[Any, CodeType] = {}

    def count(self, asking: FrameType, lap: int) -> int:
        """How often the loop round a frame has come by before.

        Args:
            asking: The frame that asks, at the instruction that it is at. The loop is in it, or in one that called it:
                the innermost that has come by twice.
            lap: Where this is another number, all counts begin anew.
        """
        place, rounds, loop = (id(asking.f_code), asking.f_lasti), 0, None
        known, frame = self._loops.get(place), asking
        while frame is not None:
            mark = frame.f_trace
            if mark is None:
                mark = frame.f_trace = _Mark()
            if type(mark) is _Mark:  # or a debugger's
                at = (place, frame.f_lasti, lap)
                before = mark.get(at, 0)
                mark[at] = before + 1
                if loop is None and (frame.f_code is known or (known is None and before)):
                    rounds, loop = before, frame.f_code
            frame = frame.f_back
        if loop is not None:
            self._loops[place] = loop
        return rounds
