"""The strides that real pointwise kernels give their results, against the rule's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from everybyte.rules.layout import as_iterated, iterated_strides

aten = torch.ops.aten
UNARY = [
    aten.exp.default,
    aten.neg.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.relu.default,
    aten.abs.default,
]
BINARY = [
    *(aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.rsub.Tensor, aten.maximum.default),
    *(aten.eq.Tensor, aten.atan2.default, aten.copysign.Tensor, aten.pow.Tensor_Tensor, aten.xlogy.Tensor),
    *(
        aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        aten.gelu_backward.default,
        aten.silu_backward.default,
    ),
    *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
]


@st.composite
def operands(draw, count):
    """Tensors that broadcast together, each contiguous, permuted, with gaps or repeated along some dimensions."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    made = []
    for _ in range(count):
        order = draw(st.permutations(range(len(shape))))
        gap = draw(st.integers(1, 2))
        repeated = draw(st.sets(st.sampled_from(range(len(shape))), max_size=len(shape)))
        sizes = [1 if i in repeated else n for i, n in enumerate(shape)]
        base = torch.ones([sizes[i] * (gap if i == order[-1] else 1) for i in order])
        if gap > 1:
            base = base[..., ::gap]
        tensor = base.permute([order.index(i) for i in range(len(shape))])
        made.append(tensor.expand(shape) if draw(st.booleans()) else tensor)
    return made


def on_meta(tensors):
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta") for t in tensors]


def laid_out(tensor):
    """Strides of the dimensions that have more than one element; the others' are never looked at."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@given(operands(1), st.sampled_from(UNARY))
def test_a_result_lies_as_the_kernel_lays_it(tensors, func):
    assert laid_out(as_iterated(func)(*on_meta(tensors))) == laid_out(func(*tensors))


@given(operands(2), st.sampled_from(BINARY))
def test_a_result_of_two_operands_lies_as_the_kernel_lays_it(tensors, func):
    if "backward" in func.name():  # gradient and value have one shape
        tensors = torch.broadcast_tensors(*tensors)
    real, traced = func(*tensors), as_iterated(func)(*on_meta(tensors))
    assert traced.shape == real.shape
    assert laid_out(traced) == laid_out(real)


@given(operands(3))
def test_a_result_of_three_operands_lies_as_the_kernel_lays_it(tensors):
    assert laid_out(as_iterated(aten.addcmul.default)(*on_meta(tensors))) == laid_out(aten.addcmul.default(*tensors))


def test_repeated_dimensions_say_nothing_about_the_order():
    permuted = torch.empty(4, 3).t()  # [3, 4], dimension 0 innermost
    repeated = torch.empty(1, 4).expand(3, 4)
    assert iterated_strides((3, 4), [repeated, permuted]) == (1, 3)
