"""What the tracer's own presence changes in a backward pass, and how it is undone.

While a dispatch mode is active, PyTorch takes every tensor for "subclass-like" (`ATen/TensorSubclassLikeUtils.h`) and
avoids writing in place: a gradient formula that would scatter into a fresh tensor makes a second one instead, and the
engine sums the contributions to a gradient out of place. A real run writes in place wherever nobody else can see the
tensor. So an op of the lists below takes over its argument's storage, as it does in a real run, if the argument has no
other holder.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

aten: Final = torch.ops.aten

_storage_use_count = torch._C._storage_Use_Count

ENGINE_SUM: Final = aten.add.Tensor
"""How the engine sums two contributions to one gradient (`torch/csrc/autograd/input_buffer.cpp`, `accumulate`)."""


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references there are to a tensor and to its storage, our own while we look included."""
    return tensor._use_count(), _storage_use_count(tensor.untyped_storage()._cdata)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose ops PyTorch does not guard, one by one, against being compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Probe(DispatchMode):
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
    """What `holders` says of a tensor that only C++ code holds, looked at from two calls below a dispatch mode.

    Wrappers hold references too, and how many has changed between PyTorch versions; so it is observed, not assumed.
    """
    with torch.enable_grad(), _Probe() as probe:
        x = torch.empty(1, device="meta", requires_grad=True)
        (x.sin() + x.cos()).backward(torch.empty(1, device="meta"))
    if probe.seen is None:
        raise RuntimeError("this PyTorch sums gradients in a way that is not known here; tested are 2.11 to 2.14")
    return probe.seen


def is_unshared(tensor: torch.Tensor) -> bool:
    """Whether only C++ code holds a tensor; autograd's kernel, which inference mode leaves out, is one holder of it."""
    references, of_storage = unshared()
    return holders(tensor) == (references - torch.is_inference_mode_enabled(), of_storage)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{n}" for name, n in (word.split(":") for word in names.split()))


IN_PLACE: Final[dict[Any, frozenset[str]]] = {
    aten.scatter_add.default: _nodes("Gather:0 Cummax:0 Cummin:0"),
    aten.scatter.src: _nodes("Max:0 Min:0 Median:1 Nanmedian:1 Mode:0 Kthvalue:0 Sort:0 Sort:1 Topk:0"),
    aten.index_add.default: _nodes("IndexSelect:0"),
    aten.index_put.default: _nodes("Index:0"),
    aten.put.default: _nodes("Take:0"),
    aten.masked_scatter.default: _nodes("MaskedSelect:0"),
    aten.index_fill.int_Tensor: _nodes("Trace:0"),
    aten.masked_fill.Scalar: _nodes("Atan2:0"),
    aten.logical_and.default: _nodes("Clamp:0"),
    aten.logical_or.default: _nodes("Clamp:0"),
    aten.diagonal_scatter.default: _nodes("LinalgEigh:0 LinalgEig:0"),
    aten.mul.Tensor: _nodes("BinaryCrossEntropy:0 BinaryCrossEntropyWithLogits:0"),
    aten.sub.Tensor: _nodes("BinaryCrossEntropyWithLogits:0"),
}
"""Op -> backward nodes whose formula, in a real run, writes the op's result into argument 0 (a tensor it made itself).
Found by running every differentiable op of PyTorch's own test suite with and without a dispatch mode."""

_FACTORS: Final = _nodes("BinaryCrossEntropy:0")
"""Nodes that write any product in place; the others only one with a difference that they have taken in place."""

COMPOSITES: Final = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
    }
)
"""Functions that add a bias or a mask to a product of their own, in place in a real run (`ATen/native/Linear.cpp`)."""

NOT_REPRODUCED: Final = _nodes(
    "MaskedFill:1 Prod:0 Prod:1 Cumprod:0 Max:1 Min:1 Median:0 Nanmedian:0 CtcLoss:1 "
    "LinalgMatrixExp:0 LinalgHouseholderProduct:0 LinalgEig:0 Ormqr:0"
)
"""Nodes for which PyTorch takes another algorithm under a dispatch mode, not only another variant of the same op."""


def _keeps_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the result has argument 0's shape, so that it can be written there; what scatters always has."""
    if torch.Tag.pointwise not in func.tags:
        return True
    others = [arg.shape for arg in args[1:] if isinstance(arg, torch.Tensor)]
    return torch.broadcast_shapes(args[0].shape, *others) == args[0].shape


COPY: Final = aten._to_copy.default
"""What the sum of a tensor and a tensor of zeros is (`ATen/native/BinaryOps.cpp`, `maybe_add_maybe_sub`)."""

WRITES: Final = frozenset({ENGINE_SUM, COPY, *IN_PLACE})


BODY_SUMS: Final = {
    **dict.fromkeys(_nodes("Atan2:0 Mvlgamma:0 SpecialI1E:0 SpecialLogNdtr:0 StdMean:0 VarMean:0 LinalgDet:0"), 1),
    **dict.fromkeys(_nodes("LinalgCholeskyEx:0 LinalgLu:0 LinalgLuFactorEx:0 TriangularSolve:0 CholeskySolve:0"), 1),
    **dict.fromkeys(_nodes("Logcumsumexp:0 LinalgPinv:0"), 2),
}
"""Backward nodes whose formula itself sums tensors out of place, and how often: what follows is the engine's."""


class Writes:
    """Decides which ops of a trace write where a real run writes."""

    def __init__(self) -> None:
        self._node = -1  # number of the node that runs; the node itself would be kept alive
        self._sums = 0  # how many sums it has made
        self._subtracted = -1  # the storage in which it has taken a difference last
        self._retained: list[weakref.ref[torch.Tensor]] = []  # tensors that are no leaves and keep their gradients
        self._kept = 0  # how many such gradients are still to be summed, before its formula
        self._zeros: tuple[bool, ...] = ()  # whether the operands of the sum under way are tensors of zeros

    def retains(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor keeps its gradient, to which another backward pass adds out of place.

        `torch/csrc/autograd/variable.cpp`, `retain_grad`.
        """
        if tensor.grad_fn is not None:
            self._retained.append(weakref.ref(tensor))

    def asks_of_zeros(self, operand: Any) -> bool:
        """Notes an operand of a sum or product with a tensor of zeros, whose shape is about to be asked for.

        Returns:
            Whether another tensor must stand in for it, to be asked in its place.
        """
        is_zeros = isinstance(operand, torch.Tensor) and operand._is_zerotensor()
        self._zeros = (*self._zeros[-1:], is_zeros)
        return is_zeros or not isinstance(operand, torch.Tensor)

    def at_node(self, number: int) -> bool:
        """Notes which backward node is running, -1 outside any, and says whether it was another one before."""
        if number == self._node:
            return False
        self._node, self._sums, self._subtracted = number, 0, -1
        self._kept = self._kept_at(number) if self._retained else 0
        return True

    def _kept_at(self, number: int) -> int:
        """How many gradients that are kept already are a node's, of which its tensors are the results now."""
        self._retained = [tensor for tensor in self._retained if tensor() is not None]
        alive = [tensor() for tensor in self._retained]
        nodes = [tensor.grad_fn for tensor in alive if tensor is not None and tensor.grad is not None]
        return sum(node is not None and node._sequence_nr() == number for node in nodes)

    def takes_over(self, func: Any, args: tuple[Any, ...], node: Any, caller: Any, from_python: bool) -> bool:
        """Whether a real run would write this op's result into argument 0.

        Args:
            func: The op as a dispatch mode sees it, one of `WRITES`.
            args: Its arguments.
            node: The backward node that is running, or None.
            caller: The function of torch's Python face that is running, or None.
            from_python: Whether it was called since the node began (by a custom function, a hook, a recomputation).
        """
        if func is COPY:  # zeros are added to the first contribution where it lies
            zeros, self._zeros = self._zeros, ()
            first = zeros == (False, True) and not from_python and node is not None and not torch.is_grad_enabled()
            return first and holders(args[0])[1] == unshared()[1] + 1 and is_dense(args[0])  # it is an expanded view
        if func is not ENGINE_SUM:
            in_place = node is not None and node.name() in IN_PLACE[func]
            recorded = torch.is_grad_enabled() and args[0].requires_grad  # for a second backward pass, which needs it
            if not in_place or recorded or holders(args[0])[1] != unshared()[1] or not _keeps_shape(func, args):
                return False
            address = args[0].untyped_storage()._cdata
            if func is aten.sub.Tensor:
                self._subtracted = address
            return func is not aten.mul.Tensor or node.name() in _FACTORS or address == self._subtracted
        if node is None or caller in COMPOSITES:
            return caller in COMPOSITES and is_unshared(args[0])
        if from_python:
            return False
        if self._kept > 0:
            self._kept -= 1
            return False
        self._sums += 1
        old, new = args[0], args[1]
        return (
            self._sums > BODY_SUMS.get(node.name(), 0)
            and isinstance(new, torch.Tensor)
            and old.shape == new.shape
            and not torch.is_grad_enabled()
            and is_unshared(old)
            and is_dense(old)
        )
