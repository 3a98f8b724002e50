"""What kernels take on a CPU that no rule derives: the libraries of this machine are asked.

oneDNN brings operands into blocks of channels and takes a scratchpad. How, and by which algorithm it multiplies, is its
own affair and depends on the processor. So the kernel runs once on zeros, and PyTorch's profiler says what it took, in
order. The same goes for kernels that are a whole layer in one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from .base import Function

aten: Final = torch.ops.aten

MOST_BYTES: Final = 2**26
"""Of the operands of a call about which the library is asked."""

MOST_PRODUCTS: Final = 2**31
"""Multiplications of such a call; about a second."""

_MEMORY: Final = "[memory]"  # `torch/csrc/profiler/collection.cpp`
_HALVES: Final = (torch.bfloat16, torch.float16)


class _Like(NamedTuple):
    """A tensor to be made of zeros."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _of_convolution(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> int:
    steps = [1] * len(stride) if transposed else stride
    positions = math.prod((n + 2 * p) // s for n, p, s in zip(input.shape[2:], padding, steps, strict=True))
    return input.shape[0] * positions * weight.numel()


def _of_convolution_backward(gradient: Any, input: Any, weight: Any, bias: Any, *rest: Any) -> int:
    return 2 * _of_convolution(input, weight, bias, *rest)


def _of_lstm(input: Any, w_ih: Any, w_hh: Any, *rest: Any) -> int:
    return 4 * input.shape[0] * input.shape[1] * (w_ih.numel() + w_hh.numel())


def _of_product(*args: Any, **kwargs: Any) -> int:
    *_, first, second = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return first.numel() * (second.shape[-1] if second.dim() > 1 else 1)


def _of_attention(query: Any, key: Any, *rest: Any) -> int:
    b, s, width = query.shape
    return b * s * width * (4 * width + 2 * key.shape[1])


def _of_layer(src: Any, width: int, *rest: Any) -> int:
    learned = sum(t.numel() for t in tree_leaves(rest) if isinstance(t, torch.Tensor) and t.dim() == 2)
    return src.numel() // width * (learned + 2 * width * src.shape[1])


def _of_three(first: Any, second: Any, third: Any, *rest: Any) -> int:
    def expanded(tensor: Any, at: Any) -> list[int]:
        shape = list(tensor.shape)
        for dim in sorted(at):
            shape.insert(dim, 1)
        return shape

    return math.prod(torch.broadcast_shapes(*map(expanded, (first, second, third), rest[:3])))


PRODUCTS: Final[dict[Any, Callable[..., int]]] = {
    aten.convolution.default: _of_convolution,
    aten.convolution_backward.default: _of_convolution_backward,
    aten.mkldnn_rnn_layer.default: _of_lstm,
    aten.mkldnn_rnn_layer_backward.default: _of_lstm,
    aten._native_multi_head_attention.default: _of_attention,
    aten._transformer_encoder_layer_fwd.default: _of_layer,
    aten._trilinear.default: _of_three,
}
"""Op that is asked about -> a function of the same arguments: how many multiplications it makes at most."""

IN_HALF_PRECISION: Final = dict.fromkeys(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default), _of_product
)
"""The same of ops that are asked about in half precision, in which oneDNN runs them."""

FIRST: Final = frozenset({*PRODUCTS, *IN_HALF_PRECISION})
"""All of them: their results come among the rest."""


def scratch(op: Any, otherwise: Function | None = None) -> Function:
    """What the kernel of one of these ops takes; `otherwise` says it of a product in full precision."""

    def taken(*args: Any, **kwargs: Any) -> Any:
        if op in IN_HALF_PRECISION and args[0].dtype not in _HALVES:
            return otherwise(*args, **kwargs) if otherwise is not None else ()
        return _asked(op, _key(args), tuple(kwargs.items()), _state()).taken if _may_ask(op, args) else ()

    return taken


def made_in(op: Any, otherwise: tuple[int, ...]) -> Callable[..., tuple[int, ...]]:
    """The order in which one of these ops makes its results; `otherwise` where a call is too large to ask about."""

    def order(*args: Any) -> tuple[int, ...]:
        return _asked(op, _key(args), (), _state()).made_in if _may_ask(op, args) else otherwise

    return order


def left_out(op: Any) -> Callable[..., str | None]:
    """A name for what is left out of a call that is too large to ask about."""

    def named(*args: Any, **kwargs: Any) -> str | None:
        if (op in IN_HALF_PRECISION and args[0].dtype not in _HALVES) or _may_ask(op, args):
            return None
        return f"{op.name().split('::')[1]}: what its kernel takes for itself where it is large"

    return named


def _may_ask(op: Any, args: tuple[Any, ...]) -> bool:
    if torch.autograd._profiler_enabled():
        return False
    nbytes = sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    return nbytes <= MOST_BYTES and (PRODUCTS | IN_HALF_PRECISION)[op](*args) <= MOST_PRODUCTS


def _state() -> tuple[Any, ...]:
    mkldnn = torch.backends.mkldnn
    grad = torch.is_grad_enabled()  # an LSTM is another kernel in training
    return grad, torch.get_num_threads(), mkldnn.enabled, torch.are_deterministic_algorithms_enabled()


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Like(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


def _zeros(like: Any) -> Any:
    if isinstance(like, _Like):
        return torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="cpu").zero_()
    return [_zeros(item) for item in like] if isinstance(like, tuple) else like


class _Answer(NamedTuple):
    """What a kernel allocates and gives back (-n), in order, None where it makes a result; and the results' order."""

    taken: tuple[int | None, ...]
    made_in: tuple[int, ...]


@cache
def _asked(op: Any, args: Any, kwargs: Any, state: Any) -> _Answer:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write on stderr
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        given = [_zeros(arg) for arg in args]
        with profile(profile_memory=True) as seen:
            made = op(*given, **dict(kwargs))
        results = [made] if isinstance(made, torch.Tensor) else made
        addresses = [None if t is None else t.untyped_storage().data_ptr() for t in results]
    taken: list[int | None] = []
    live: dict[int, int] = {}  # address -> its place in `taken`
    for address, nbytes in _memory(seen.kineto_results.experimental_event_tree()):
        if nbytes > 0:
            live[address] = len(taken)
            taken.append(nbytes)
        elif address in live:
            taken.append(-taken[live.pop(address)])
    for address in live.keys() & set(addresses):
        taken[live[address]] = None
    places = [live.get(address, len(taken)) for address in addresses]
    return _Answer(tuple(taken), tuple(sorted(range(len(places)), key=places.__getitem__)))


def _memory(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        if event.name == _MEMORY:
            yield event.extra_fields.ptr, event.extra_fields.alloc_size
        else:
            yield from _memory(event.children)
