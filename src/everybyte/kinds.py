"""Which tensors a run can follow: those that are a stretch of memory, looked at through sizes and strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@cache
def runs_own_code(kind: type) -> bool:
    """Whether tensors of a class compute in Python (`__torch_dispatch__`), as a rule from others that they hold.

    Such a tensor has a storage of the size that its shape says, in which there is no memory: to read there ends the
    process.
    """
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def other_kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is that is not plain: no memory of its own, several parts, or bytes that are not its numbers.

    Returns:
        None for a plain tensor, of whatever dtype, strides and class without code of its own.
    """
    with torch._C.DisableTorchFunction():
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "a tensor inside a function transform"
        if runs_own_code(type(tensor)):
            return f"a {type(tensor).__name__}, a class with code of its own"
        if is_lazy(tensor):
            return f"a {type(tensor).__name__}, which has no shape yet"
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.layout is not torch.strided:
            return f"a tensor of layout {tensor.layout}"
        if tensor.is_quantized:
            return f"a quantized tensor ({tensor.dtype})"
    return None


def parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The plain tensors that these consist of: themselves, or what their class says it holds (`__tensor_flatten__`).

    Raises:
        NotImplementedError: If one is neither plain nor says so.
    """
    for tensor in tensors:
        if (kind := other_kind(tensor)) is None:
            yield tensor
        elif is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from parts(getattr(tensor, name) for name in names)
        else:
            raise NotImplementedError(f"what bytes are kept cannot be said of {kind}; use a plain dense tensor")


def has_no_memory(kind: type) -> bool:
    """Whether tensors of a class take no memory in a real run either: PyTorch's own tensors to trace with."""
    return issubclass(kind, FakeTensor)
