"""Other threads of the code that is traced: a trace follows one, and says so of others.

The order in which threads ask for memory is the machine's, so no trace can know it. What another one does is not
counted; it goes on with shapes alone, so that whoever waits for it does not wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .attribution import user_line
from .kernels import META
from .rules.engine import DispatchMode


class Run(Protocol):
    """What is needed of the trace under way."""

    not_covered: set[str]

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes memory of the GPU."""


@contextmanager
def told(run: Run) -> Iterator[None]:
    """While the block lasts, a trace is told where a thread that begins in it works on the GPU."""
    start = threading.Thread.start

    @wraps(start)
    def watched(thread: threading.Thread) -> None:
        thread.run = _watched(run, thread.run)
        start(thread)

    with mock.patch.object(threading.Thread, "start", watched):
        yield


def _watched(run: Run, work: Callable[[], None]) -> Callable[[], None]:
    def worked() -> None:
        with _Asked(run), _Done(run):
            work()

    return worked


def _tell(run: Run) -> None:
    run.not_covered.add(f"what another thread does on the GPU at {user_line()}")


def _is_gpu(leaf: Any) -> bool:
    return (isinstance(leaf, torch.device) and leaf.type == "cuda") or (
        isinstance(leaf, str) and leaf.partition(":")[0] == "cuda"
    )


class _Asked(TorchFunctionMode):
    """Sees where the GPU is named, which PyTorch looks for before any op reaches a kernel."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], "cuda"), {}
        if any(_is_gpu(leaf) for leaf in tree_leaves((args, kwargs))):
            _tell(self._run)
            named = (str, torch.device)
            args, kwargs = tree_map_only(named, lambda leaf: META if _is_gpu(leaf) else leaf, (args, kwargs))
        return func(*args, **kwargs)


class _Done(DispatchMode):
    """Sees what is computed with the trace's tensors."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta and self._run.counts(leaf) for leaf in leaves):
            _tell(self._run)
        return func(*args, **(kwargs or {}))
