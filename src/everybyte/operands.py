"""Keeping every operand of every recorded operation alive as long as the graph that it belongs to (`rules.candle`).

PyTorch's graph has the shape that is wanted: a result holds its node, which holds the nodes of its operands, until the
last holder of the result is gone; `detach()` lets go of it and a backward pass does not. So operands are hung on nodes.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .scalars import made_since

_OPERANDS: Final = "everybyte.operands"


class Operands:
    """The operands of ops in the call that is running."""

    def __init__(self) -> None:
        self._pending: dict[int, list[torch.UntypedStorage]] = {}  # by the number of the op's node
        self._last = -1

    def note(self, tensors: list[torch.Tensor]) -> None:
        """Before an op runs: its node, if it has one, is already made and is the last that was."""
        number = torch._C._autograd._get_sequence_nr() - 1
        if number > self._last and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self._pending[number] = [tensor.untyped_storage() for tensor in tensors]
            self._last = number

    def settle(self, out: Any) -> None:
        """After the call: what its graph does not reach is let go."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        for number, node in made_since(out, min(pending)):
            if number in pending:
                node.metadata[_OPERANDS] = pending[number]
