"""What tracing and measuring have in common: one body of training code runs under either and means the same."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .host import resident_bytes
from .kinds import other_kind
from .leaving import Leaving
from .timeline import Timeline


class Mark(NamedTuple):
    """Where a step begins: the number of the next node of a gradient graph, and the process's resident bytes."""

    node: int
    resident: int | None


class Run(ABC):
    """The object a `with` block works with: it counts steps, brings data to the device, and ends with a timeline.

    Attributes:
        marks: Where each step began and, under the number that follows them, where the last one ended.
        leaving: How the program that runs is left.
    """

    def __init__(self) -> None:
        self.marks: dict[int, Mark] = {}
        self.leaving = Leaving()

    @abstractmethod
    def _begin_step(self, step: int, *, over: bool = False) -> None: ...

    @abstractmethod
    def _place(self, host: torch.Tensor, category: str) -> torch.Tensor:
        """A new tensor on the run's device, with the host tensor's shape, dtype and (where known) values."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline:
        """What happened. Complete once the `with` block has ended."""

    @abstractmethod
    def live_storages(self) -> dict[int, int]:
        """Addresses of the storages that still live, and their numbers in the timeline."""

    @abstractmethod
    def address(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's storage as in `live_storages`; 0 if it has none."""

    def steps(self, count: int) -> Iterator[int]:
        """Yields 0, 1, ... `count` - 1 and marks where each step begins.

        Events before the loop have step -1, events after it step `count`. Python's collector runs once before step 0,
        so that `start_bytes` holds none of what setting up has dropped in reference cycles. Later it runs when it
        does, in no two runs at the same moments; what then waits for it, `everybyte.leaks` names.

        Raises:
            ValueError: If `count` is not a positive integer.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"steps({count!r}): the number of steps is a positive integer")
        return self._steps(count)

    def _steps(self, count: int) -> Iterator[int]:
        gc.collect()
        for step in range(count):
            self.mark_step(step)
            yield step
        self.mark_step(count, over=True)

    def mark_step(self, step: int, *, over: bool = False) -> None:
        """Marks where a step begins, or what comes after the last one."""
        self._begin_step(step, over=over)
        self.marks[step] = Mark(torch._C._autograd._get_sequence_nr(), resident_bytes())

    def to_device(self, data: Any) -> Any:
        """Copies data from the host to the run's device, as a training loop does with a batch.

        Args:
            data: A tensor, a NumPy array, a pandas frame or series, a number, or a tuple, list or dict of these; or a
                module that was made outside the block.

        Returns:
            New tensors in the same arrangement, counted as inputs; of a module a copy, its tensors counted as
            parameters and buffers.

        Raises:
            TypeError: If something in `data` is none of these, or an array holds objects.
        """
        if isinstance(data, dict):
            return {key: self.to_device(value) for key, value in data.items()}
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self.to_device(value) for value in data))
        if isinstance(data, (tuple, list)):
            return type(data)(self.to_device(value) for value in data)
        if isinstance(data, nn.Module):
            return self._place_module(data)
        return self._place(_host_tensor(data), "input")

    def _place_module(self, module: nn.Module) -> nn.Module:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _check_plain(tensor, f"{name}, ")
        placed: dict[int, Any] = {}  # deepcopy takes these for the copies of the tensors
        for parameter in module.parameters():
            data = self._place(parameter.detach(), "parameter")
            placed[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            placed[id(buffer)] = self._place(buffer, "buffer")
        return copy.deepcopy(module, placed)


def _check_plain(tensor: torch.Tensor, name: str = "") -> None:
    """What a tensor without plain memory is on another device, no copy of bytes says."""
    if (kind := other_kind(tensor)) is not None:
        raise TypeError(f"to_device() takes plain dense tensors, not {name}{kind}; make it inside the block")


def _host_tensor(data: Any) -> torch.Tensor:
    """Looks at data in host memory as a tensor, without a copy where that is possible."""
    if isinstance(data, torch.Tensor):
        _check_plain(data)
        return data
    if hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if not isinstance(data, (np.ndarray, np.generic, int, float, bool)):
        raise TypeError(f"to_device() takes tensors, arrays, frames and numbers, not {type(data).__name__}")
    array = np.asarray(data)
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise TypeError(
            f"to_device() takes numbers, not an array of {array.dtype}; convert it first, e.g. .astype('float32')"
        )
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def empty_caches_of_tensors() -> None:
    """Empties the caches of `functools` that hold tensors, so that a run begins as in a process of its own.

    A function that remembers a table of positions, say, would give a real run the traced tensor, and a later one none
    of its allocations.
    """
    for known in _caches(len(sys.modules)):
        found = known.reference()
        if found is not None and found.cache_info().misses != known.misses:
            if _holds_tensor(gc.get_referents(found)):
                found.cache_clear()
            known.misses = found.cache_info().misses


def _holds_tensor(values: Iterable[Any], depth: int = 2) -> bool:
    return any(
        isinstance(value, torch.Tensor)
        or (depth and isinstance(value, (tuple, list)) and _holds_tensor(value, depth - 1))
        or (depth and isinstance(value, dict) and _holds_tensor(list(value.values()), depth - 1))
        for value in values
    )


@dataclass
class _Cache:
    reference: weakref.ref[Any]
    misses: int = 0  # when it was last looked into


@lru_cache(maxsize=1)
def _caches(modules: int) -> list[_Cache]:
    """All caches there are; looked for anew where modules have been imported, which is what makes them."""
    return [_Cache(weakref.ref(found)) for found in gc.get_objects() if type(found) is type(_caches)]
