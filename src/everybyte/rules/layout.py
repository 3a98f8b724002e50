"""How pointwise results lie in memory: the meta device guesses where a real kernel iterates.

A pointwise kernel walks its operands through one iterator, and a new result gets the order of dimensions that the
iterator chose (`ATen/TensorIterator.cpp`, `reorder_dimensions`). The order decides whether a later `reshape` is a view
or a copy, and so it decides bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

aten: Final = torch.ops.aten

_BACKWARD: Final = frozenset(
    getattr(aten, f"{name}_backward").default
    for name in (
        *("elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "sigmoid", "silu"),
        *("softplus", "softshrink", "tanh", "threshold"),
    )
) | {aten._prelu_kernel_backward.default}

_NOT_ITERATED: Final = frozenset(
    {
        aten.clone.default,
        aten.glu_backward.default,
        aten.log_sigmoid_backward.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.pow.Scalar,
    }
)
"""Ops that are tagged as pointwise and lay out their result in another way."""

_ORDER: Final = {
    aten.leaky_relu_backward.default: (1, 0),
    aten.threshold_backward.default: (1, 0),
    aten.rsub.Tensor: (1, 0),
    aten._prelu_kernel_backward.default: (1, 2, 0),
}
"""The order in which an op hands its operands to the iterator, where it is not that of its arguments."""


def as_iterated(func: Any) -> Callable[..., Any]:
    """An op that returns, on the meta device, results with the strides that the real kernel gives them."""
    pointwise = (torch.Tag.pointwise in func.tags and func not in _NOT_ITERATED) or func in _BACKWARD
    if not pointwise or func._schema.is_mutable:
        return func

    slots = [i for i, arg in enumerate(func._schema.arguments) if str(arg.type) == "Tensor"]
    makes_tensor_of_number = "Scalar" in func._overloadname and len(slots) == 1 and func is not aten.pow.Tensor_Scalar

    def alike(args: tuple[Any, ...], shape: torch.Size) -> bool:
        """Whether the iterator sorts nothing (`fast_set_up`): all operands of one shape, and contiguous."""
        if makes_tensor_of_number:
            return False
        operands = [args[i] for i in slots if i < len(args)]
        return all(isinstance(t, torch.Tensor) and t.shape == shape and t.is_contiguous() for t in operands)

    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and alike(args, out.shape):
            return out.new_empty(out.shape)
        operands = [args[i] for i in _ORDER.get(func, range(len(args)))]
        tensors = [arg for arg in operands if isinstance(arg, torch.Tensor)]
        if isinstance(out, torch.Tensor):
            return _laid_out(out, tensors)
        return type(out)(_laid_out(part, tensors) if isinstance(part, torch.Tensor) else part for part in out)

    return run


def _laid_out(out: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    strides = iterated_strides(out.shape, operands)
    return out if out.stride() == strides else out.new_empty_strided(out.shape, strides)


def iterated_strides(shape: Sequence[int], operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The strides of a new result of this shape, given the operands in the iterator's order.

    Dimensions are sorted, from the innermost out, by the first operand that tells two of them apart: by its strides, or
    where these are equal by size. A dimension that an operand repeats (stride 0) says nothing.
    """
    known = [_broadcast_strides(operand, shape) for operand in operands]

    def belongs_outside(inner: int, outer: int) -> int:
        """1 if `inner` should lie outside `outer`, -1 if not, 0 if nobody knows."""
        for strides in known:
            a, b = strides[inner], strides[outer]
            if a and b and (a != b or shape[inner] > shape[outer]):
                return 1 if a >= b else -1
        return 0

    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(shape)):
        at = start
        for before in range(start - 1, -1, -1):
            verdict = belongs_outside(order[before], order[at])
            if verdict > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif verdict < 0:
                break
    strides, step = [0] * len(shape), 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


def _broadcast_strides(operand: torch.Tensor, shape: Sequence[int]) -> list[int]:
    new = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[new:], strict=True)
    return [0] * new + [stride if size == full else 0 for size, stride, full in own]
