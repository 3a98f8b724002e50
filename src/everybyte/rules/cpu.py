"""What CPU kernels return and keep where the meta device shows something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

aten: Final = torch.ops.aten

Kernel = Callable[..., Any]

KERNELS: Final[dict[Any, Kernel]] = {}
"""Op -> a function of the same arguments that returns, on the meta device, what the CPU kernel returns."""

FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {}
"""Function of torch's Python face -> what it does on CPU, for composite functions that choose their path by device."""


def kernel(*ops: Any) -> Callable[[Kernel], Kernel]:
    """Registers a rule for an op."""

    def register(function: Kernel) -> Kernel:
        for op in ops:
            KERNELS[op] = function
        return function

    return register
