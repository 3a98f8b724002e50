"""Numbers that become tensors: `x * 0.5` makes a tensor of 8 bytes, and keeps it if the gradient needs it.

A dispatch mode is shown the number and not the tensor. The tensor is real, though, a 0-dimensional one in host memory,
and the graph that keeps it can be asked for it; so its end is known exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from .storages import Storages

_ACCUMULATE_GRAD = torch._C._functions.AccumulateGrad


class Scalars:
    """Numbers handed to ops of tensors in the call that is running."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._pending: list[tuple[int, int, int]] = []  # graph node that may keep it, event, bytes

    def make(self, number: complex, **what: Any) -> None:
        """Records the tensor that a number becomes (bool, int64, double: `c10/core/ScalarType.h`)."""
        nbytes = 1 if isinstance(number, bool) else 16 if isinstance(number, complex) else 8
        event = self._storages.recorder.alloc(nbytes, shape="[]", **what)
        self._pending.append((torch._C._autograd._get_sequence_nr() - 1, event, nbytes))

    def settle(self, out: Any) -> None:
        """After the call: numbers that its graph has kept live on with it, the others are released."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        kept = _kept(out, {maker for maker, *_ in pending}) if torch.is_grad_enabled() else {}
        for maker, event, nbytes in pending:
            if kept.get(maker):
                self._storages.follow(kept[maker].pop(), event, nbytes)
            else:
                self._storages.recorder.free(event)


def _kept(out: Any, makers: set[int]) -> dict[int, list[torch.UntypedStorage]]:
    """The 0-dimensional host tensors that graph nodes hold, by the nodes' sequence numbers."""
    first = min(makers)
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    frontier = [o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    kept: dict[int, list[torch.UntypedStorage]] = {}
    seen = set()
    while frontier:
        node = frontier.pop()
        number = node._sequence_nr()
        if number < first or number in seen or isinstance(node, _ACCUMULATE_GRAD):
            continue
        seen.add(number)
        frontier += [parent for parent, _ in node.next_functions if parent is not None]
        if number in makers:
            for name in ("_saved_other", "_saved_self", "_saved_tensor1", "_saved_tensor2"):
                saved = getattr(node, name, None)
                if isinstance(saved, torch.Tensor) and saved.dim() == 0 and not saved.is_meta:
                    kept.setdefault(number, []).append(saved.untyped_storage())
    return kept
