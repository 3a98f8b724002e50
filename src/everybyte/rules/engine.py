"""What the tracer's own presence changes in a backward pass, and how it is undone.

While a dispatch mode is active, PyTorch takes every tensor for "subclass-like" (`ATen/TensorSubclassLikeUtils.h`) and
avoids writing in place: a gradient formula that would scatter into a fresh tensor makes a second one instead, and the
engine sums the contributions to a gradient out of place. A real run writes in place wherever nobody else can see the
tensor. So an op of the lists below takes over its argument's storage, as it does in a real run, if the argument has no
other holder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten: Final = torch.ops.aten

_storage_use_count = torch._C._storage_Use_Count

ENGINE_SUM: Final = aten.add.Tensor
"""How the engine sums two contributions to one gradient (`torch/csrc/autograd/input_buffer.cpp`, `accumulate`)."""


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references there are to a tensor and to its storage, our own while we look included."""
    return tensor._use_count(), _storage_use_count(tensor.untyped_storage()._cdata)


class _Probe(TorchDispatchMode):
    """Watches one sum of two contributions that nobody else holds."""

    seen: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ENGINE_SUM and torch._C._current_autograd_node() is not None:
            self.seen = self.look(func, args)
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, args: Any) -> tuple[int, int]:
        return holders(args[0])


@cache
def unshared() -> tuple[int, int]:
    """What `holders` says of a tensor that only the engine holds, looked at from one call below a dispatch mode.

    Wrappers hold references too, and how many has changed between PyTorch versions; so it is observed, not assumed.
    """
    with torch.enable_grad(), _Probe() as probe:
        x = torch.empty(1, device="meta", requires_grad=True)
        (x.sin() + x.cos()).backward(torch.empty(1, device="meta"))
    if probe.seen is None:
        raise RuntimeError("this PyTorch sums gradients in a way that is not known here; tested are 2.11 to 2.13")
    return probe.seen


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


Rule = Callable[[str], bool]
IN_PLACE: Final[dict[Any, frozenset[str] | None]] = {}
"""Op -> names of the backward nodes in which a real run writes into argument 0; None for every node."""


def takes_over(func: Any, args: tuple[Any, ...], node: Any) -> bool:
    """Whether a real run would write this op's result into argument 0, given the backward node that is running."""
    if func is ENGINE_SUM:
        old, new = args[0], args[1]
        return (
            isinstance(new, torch.Tensor)
            and old.shape == new.shape
            and holders(old) == unshared()
            and is_dense(old)
        )
    nodes = IN_PLACE.get(func, frozenset())
    return nodes is None or node.name() in nodes
