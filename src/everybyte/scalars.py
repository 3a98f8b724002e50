"""Numbers that become tensors: `x * 0.5` makes a tensor of 8 bytes, and keeps it if the gradient needs it.

A dispatch mode is shown the number and not the tensor. The tensor is real, though, a 0-dimensional one in host memory,
and the graph that keeps it can be asked for it; so its end is known exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .storages import Storages

_ACCUMULATE_GRAD = torch._C._functions.AccumulateGrad


class Scalars:
    """Numbers handed to ops of tensors in the call that is running."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._pending: list[tuple[int, str, int, int]] = []  # graph node that may keep it, op, event, bytes
        self._inside: dict[int, list[int]] = {}  # node that keeps it out of sight -> events
        self._running: int | None = None
        self._stays = False  # what the node that is running keeps, for another backward pass

    def make(self, number: complex, op: str, **what: Any) -> None:
        """Records the tensor that a number becomes (bool, int64, double: `c10/core/ScalarType.h`)."""
        nbytes = 1 if isinstance(number, bool) else 16 if isinstance(number, complex) else 8
        event = self._storages.recorder.alloc(nbytes, op=op, shape="[]", **what)
        self._pending.append((torch._C._autograd._get_sequence_nr() - 1, op, event, nbytes))

    def release(self, op: str) -> None:
        """After an op that no graph records: nothing keeps its numbers, whatever else its call does."""
        while self._pending and self._pending[-1][1] == op:
            self._storages.recorder.free(self._pending.pop()[2])

    def settle(self, out: Any) -> None:
        """After the call: numbers that its graph has kept live on with it, the others are released."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if not torch.is_grad_enabled():
            for _, _, event, _ in pending:
                self._storages.recorder.free(event)
            return
        kept = _kept(out, {maker for maker, *_ in pending})
        for maker, op, event, nbytes in pending:
            if kept.get(maker):
                self._storages.follow(kept[maker].pop(), event, nbytes)
            elif kept.copy_slices is not None and op in ("mul_", "div_"):
                self._inside.setdefault(kept.copy_slices._sequence_nr(), []).append(event)
                token = _Token()  # dies with the node, if no backward pass comes
                kept.copy_slices.metadata[event] = token
                weakref.finalize(token, self._storages.recorder.free, event).atexit = False
            else:
                self._storages.recorder.free(event)

    def at_node(self, node: Any) -> None:
        """Notes which backward node is running. What it kept is released when it is done."""
        if self._inside or self._running is not None:
            number = node._sequence_nr() if node is not None else None
            if self._running is not None and number != self._running and not self._stays:
                for event in self._inside.pop(self._running, ()):
                    self._storages.recorder.free(event)
            self._running = number
            self._stays = node is not None and torch._C._autograd._get_current_graph_task_keep_graph()


class _Token:
    """An object that can be referred to weakly."""


class _Kept(dict[int, list[torch.UntypedStorage]]):
    """The 0-dimensional host tensors that graph nodes hold, by the nodes' sequence numbers.

    Attributes:
        copy_slices: The node that stands for a write into a view, if any: it hides the node of the op
            that wrote, and what that one holds, until it has run.
    """

    copy_slices: Any = None


def _kept(out: Any, makers: set[int]) -> _Kept:
    kept = _Kept()
    for number, node in made_since(out, min(makers)):
        if node.name().endswith("CopySlices"):
            kept.copy_slices = node
        if number in makers:
            for name in ("_saved_other", "_saved_self", "_saved_tensor1", "_saved_tensor2"):
                saved = getattr(node, name, None)
                if isinstance(saved, torch.Tensor) and saved.dim() == 0 and not saved.is_meta:
                    kept.setdefault(number, []).append(saved.untyped_storage())
    return kept


def made_since(out: Any, first: int) -> Iterator[tuple[int, Any]]:
    """The nodes of the graph of what a call returned that are numbered `first` or more, with their numbers."""
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    frontier = [o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    seen = set()
    while frontier:
        node = frontier.pop()
        number = node._sequence_nr()
        if number < first or number in seen or isinstance(node, _ACCUMULATE_GRAD):
            continue
        seen.add(number)
        frontier += [parent for parent, _ in node.next_functions if parent is not None]
        yield number, node
