"""Leaves a program that is not done, past whatever it catches.

First an exception is raised out of the call under way, and the program unwinds as if it were interrupted. Where a bare
`except` has caught that, the next one is raised again as soon as it is caught, however many loops lie round each other,
until the program is left. Blocks that it leaves then may not be ended as they should (`torch.no_grad()`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch.overrides import _pop_mode

_Result = TypeVar("_Result")

_raise_soon: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
"""Has a thread raise an exception, given as a class, at its next call or a loop's turn, in place of one that waits."""


class _Over(BaseException):
    """Takes the place of an exception that is not to be raised any more."""


_OVER: Final = ctypes.py_object(_Over)


class Leaving:
    """Leaves the program that `of` runs."""

    def __init__(self) -> None:
        self._caught = self._insists = False
        self._thread: Any = None

    def of(self, program: Callable[[], _Result]) -> _Result:
        """What a program returns, or raises; what `now` was given, if it was left."""
        self._thread = ctypes.c_ulong(threading.get_ident())
        grad, modes = torch.is_grad_enabled(), torch._C._len_torch_function_stack()
        said, main = sys.unraisablehook, sys.modules["__main__"]
        try:
            return program()
        finally:
            insisted, self._insists = self._insists, False  # nothing may be called between this and the next line
            if insisted:
                try:  # with None in its place Python would look for one for ever, under a profiler without going on
                    _raise_soon(self._thread, _OVER)
                    for _ in range(10**6):
                        pass
                except _Over:
                    pass
                sys.unraisablehook, sys.modules["__main__"] = said, main  # the one that `runpy` has replaced
                torch.set_grad_enabled(grad)
                while torch._C._len_torch_function_stack() > modes:
                    _pop_mode()

    def now(self, error: type[BaseException], why: str = "") -> NoReturn:
        """Leaves the program.

        Args:
            error: What is raised; no `except Exception` should catch it.
            why: Its message.
        """
        if self._caught and self._thread is not None:
            self._insists, sys.unraisablehook = True, id  # finalizers are not spared; that it says nothing of them
            _raise_soon(self._thread, ctypes.py_object(self._again(error, why)))  # here, where that returns
        self._caught = True
        raise error(why)

    def _again(self, error: type[BaseException], why: str) -> type[BaseException]:
        """An exception of which, as soon as Python makes an instance, which is where it is caught, another follows."""

        def initialise(instance: BaseException, *_: Any) -> None:
            error.__init__(instance, why)
            if self._insists:
                soon = map(_raise_soon, (self._thread,), (ctypes.py_object(type(instance)),))
                _ = [*soon]  # a plain call would raise it here

        return type(error.__name__, (error,), {"__init__": initialise})
