"""The strides that real pointwise kernels give their results, against the rule's."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import everybyte
from everybyte import kernels
from everybyte.rules import RULES
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
LOSSES = [
    *(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default),
    *(aten.soft_margin_loss.default, aten.binary_cross_entropy.default),
]
LOSSES_BACKWARD = [
    *(aten.mse_loss_backward.default, aten.soft_margin_loss_backward.default),
    aten.binary_cross_entropy_backward.default,
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


@given(operands(2), st.sampled_from(LOSSES))
def test_an_unreduced_loss_lies_as_the_kernel_lays_it(tensors, func):
    pair = torch.broadcast_tensors(*tensors)
    rest = (None, 0) if func is aten.binary_cross_entropy.default else (0,)
    assert laid_out(RULES["cpu"].kernel(func)(*on_meta(pair), *rest)) == laid_out(func(*pair, *rest))


@given(operands(3), st.sampled_from(LOSSES_BACKWARD))
def test_a_loss_s_gradient_lies_as_the_kernel_lays_it(tensors, func):
    arguments = torch.broadcast_tensors(*tensors)
    rest = (None, 0) if func is aten.binary_cross_entropy_backward.default else (0,)
    assert laid_out(RULES["cpu"].kernel(func)(*on_meta(arguments), *rest)) == laid_out(func(*arguments, *rest))


@given(operands(3), st.booleans())
def test_rrelu_and_its_gradient_lie_as_the_kernel_lays_them(tensors, training):
    gradient, value, noise = torch.broadcast_tensors(*tensors)
    bounds = (0.1, 0.3, training)
    for func, given_tensors, rest in (
        (aten.rrelu_with_noise.default, (value, torch.empty(value.shape)), bounds),
        (aten.rrelu_with_noise_backward.default, (gradient, value, noise), (*bounds, False)),
    ):
        traced = RULES["cpu"].kernel(func)(*on_meta(given_tensors), *rest)
        assert laid_out(traced) == laid_out(func(*given_tensors, *rest))


@given(operands(3))
def test_log_sigmoid_s_gradient_lies_as_the_kernel_lays_it(tensors):
    gradient, value, _ = torch.broadcast_tensors(*tensors)
    three, func = (gradient, value, torch.ones(value.shape)), aten.log_sigmoid_backward.default
    assert laid_out(as_iterated(func)(*on_meta(three))) == laid_out(func(*three))


@given(operands(2))
def test_mish_s_gradient_lies_as_the_kernel_lays_it(tensors):
    gradient, value = torch.broadcast_tensors(*tensors)
    with everybyte.trace(rules="cpu"):
        traced_gradient, traced_value = on_meta((gradient, value))
        out = F.mish(traced_value.requires_grad_())
        (traced,) = torch.autograd.grad(out, traced_value, traced_gradient)
        strides = laid_out(traced)
    assert strides == laid_out(aten.mish_backward(gradient, value))


def test_an_op_that_is_not_remembered_lies_as_the_kernel_lays_it(monkeypatch):
    monkeypatch.setattr(kernels, "_is_plain", lambda out, args: False)
    run = kernels.Kernels(RULES["cpu"])
    pair, func = (torch.ones(3, 4)[:, ::2].t(), torch.ones(1, 1).expand(2, 3)), aten.hardswish_backward.default
    for _ in range(2):
        assert laid_out(run(func, tuple(on_meta(pair)), {})) == laid_out(func(*pair))


def test_repeated_dimensions_say_nothing_about_the_order():
    permuted = torch.empty(4, 3).t()  # [3, 4], dimension 0 innermost
    repeated = torch.empty(1, 4).expand(3, 4)
    assert iterated_strides((3, 4), [repeated, permuted]) == (1, 3)
