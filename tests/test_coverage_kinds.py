"""Kinds of differences that architectures of transformers brought to light, each in the smallest program that has it.

Traced and really run are equal in their peaks and in every size allocated, what kernels take for themselves included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import differences_between
from torch.nn import functional as F

import everybyte as eb
from everybyte.timeline import Timeline

aten = torch.ops.aten


def ones(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(shape, dtype=dtype).requires_grad_(learns)


def learns(*shape: int) -> Callable[[], torch.Tensor]:
    return ones(*shape, learns=True)


WHOLE, TRUTH, DOUBLE, HALF = (
    lambda *shape, dtype=dtype: ones(*shape, dtype=dtype)
    for dtype in (torch.int64, torch.bool, torch.float64, torch.bfloat16)
)
LAST = {"memory_format": torch.channels_last}


def backward(function: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args: function(*args).sum().backward()


def timeline(run: Any, made: tuple[Callable[[], torch.Tensor], ...], function: Callable[..., Any]) -> Timeline:
    with run:
        args = [make() for make in made]
        for _ in run.steps(1):
            out = function(*args)
            del out
    return run.timeline


def assert_same(*made: Callable[[], torch.Tensor], function: Callable[..., Any]) -> None:
    real = timeline(eb.measure(device="cpu"), made, function)
    assert differences_between(timeline(eb.trace(rules="cpu"), made, function), real) == ""


def assert_same_order(*made: Callable[[], torch.Tensor], function: Callable[..., Any], but: str | None = None) -> None:
    """As `assert_same`, event by event, but for a category."""
    runs = eb.trace(rules="cpu"), eb.measure(device="cpu")
    ours, real = (timeline(run, made, function).without(*([but] if but else [])).frame() for run in runs)
    assert [*zip(ours["action"], ours["nbytes"], strict=True)] == [*zip(real["action"], real["nbytes"], strict=True)]


@pytest.mark.parametrize(
    "operands",
    [
        *((ones(5, 4), WHOLE(4)), (ones(5, 4), TRUTH(5, 1)), (ones(5, 4), DOUBLE(4)), (HALF(5, 4), ones(4))),
        *((WHOLE(5, 4), TRUTH(4)), (WHOLE(5, 4), WHOLE(4)), (ones(5, 4), DOUBLE()), (ones(5, 4), ones(5, 4))),
    ],
)
@pytest.mark.parametrize(
    "function",
    [torch.mul, torch.sub, torch.div, torch.eq, torch.logical_and, torch.pow, torch.maximum, lambda x, y: x.mul_(y)],
)
def test_an_operand_of_another_dtype_is_copied_into_the_one_that_is_computed_in(operands, function):
    dtypes = {make().dtype for make in operands}
    if torch.bool in dtypes and function is torch.sub:
        pytest.skip("PyTorch does not subtract truth values")
    assert_same(*operands, function=function)


@pytest.mark.parametrize("kind", [ones, WHOLE, TRUTH, HALF, DOUBLE])
@pytest.mark.parametrize(
    "function",
    [
        *(lambda x: x * 2, lambda x: x / 3.0, lambda x: x == 0, lambda x: x >= 0.5, lambda x: 2.0**x, lambda x: x % 2),
        *(
            lambda x: aten.mul.Scalar(x, 2),
            lambda x: aten.add.Scalar(x, 2.0),
            lambda x: 1.5 - x if x.dtype != torch.bool else x,
        ),
    ],
)
def test_a_number_becomes_a_tensor_and_that_a_copy_in_the_operand_s_dtype(kind, function):
    assert_same(kind(5, 4), function=function)


@pytest.mark.parametrize(
    ("made", "function"),
    [
        *(
            ((ones(5, 4),), lambda x: x.mean(-1)),
            ((HALF(5, 4),), lambda x: x.mean(-1)),
            ((TRUTH(5, 4),), lambda x: x.sum(-1)),
        ),
        *(((ones(5, 4),), lambda x: x.sum(dtype=torch.float64)), ((TRUTH(5, 4),), lambda x: x.cumsum(1))),
        *(
            ((ones(5, 4),), lambda x: x.std()),
            ((ones(5, 4),), lambda x: x.var(-1)),
            ((ones(5, 4),), lambda x: x.logsumexp(-1)),
        ),
    ],
)
def test_sums_copy_into_their_dtype_and_divide_by_a_count(made, function):
    assert_same(*made, function=function)


@pytest.mark.parametrize(
    ("made", "function"),
    [
        *(
            ((ones(5, 40),), lambda x: x.sort(0)),
            ((WHOLE(40),), torch.argsort),
            ((ones(40),), lambda x: x.histc(8, 0, 7)),
        ),
        *(
            ((WHOLE(40),), lambda x: x.bincount(minlength=4)),
            ((ones(2, 3, 4),), lambda x: x.roll((1, 1, 1), (0, 1, 2))),
        ),
        *(((ones(5, 4),), lambda x: x.repeat(2, 3)), ((ones(4),), lambda x: x.repeat(3, 1, 2))),
        *(
            ((ones(5, 4),), lambda x: torch._safe_softmax(x, -1)),
            ((ones(2, 4, 8),), lambda x: x.transpose(1, 2).softmax(-1)),
        ),
    ],
)
def test_kernels_that_order_count_and_copy(made, function):
    assert_same(*made, function=function)


@pytest.mark.parametrize(
    ("made", "function"),
    [
        ((ones(5, 1), ones(4, 3)), lambda x, y: x.expand(5, 4) @ y),
        ((ones(3, 20, 80), ones(3, 40, 20)), lambda x, y: x[:, :, ::2] @ y),
        ((ones(3, 20, 20), ones(3, 20, 80), ones(3, 40, 20)), lambda c, x, y: torch.baddbmm(c, x[:, :, ::2], y)),
        ((ones(3, 5, 80), ones(3, 40, 1)), lambda x, y: x[:, :, ::2] @ y),
    ],
)
def test_products_copy_what_blas_does_not_take(made, function):
    assert_same(*made, function=function)


@pytest.mark.parametrize(
    ("made", "function"),
    [
        ((learns(10, 7), learns(7), learns(7)), lambda x, w, b: F.layer_norm(x, (7,), w, b)),
        ((learns(4, 10), learns(4), learns(4)), lambda x, w, b: F.layer_norm(x.t(), (4,), w, b)),
        ((learns(10, 4), lambda: torch.zeros(3, 2, dtype=torch.int64).t()), lambda w, x: F.embedding(x, w)),
        ((learns(10, 4),), F.gelu),
        ((learns(2, 6, 8),), lambda x: F.gelu(x).transpose(1, 2).contiguous() * 2),
        ((learns(2, 6, 8),), lambda x: F.gelu(x.transpose(1, 2)) * 2),
        ((learns(2, 6, 8),), lambda x: F.gelu(x, approximate="tanh").transpose(1, 2).contiguous() * 2),
        ((learns(2, 8, 4, 4),), lambda x: F.max_pool2d(x, 2)),
        ((learns(2, 3, 8, 8), learns(2, 4, 5, 2)), lambda x, at: F.grid_sample(x, at, align_corners=False)),
        ((learns(2, 3, 8, 8, 4), learns(2, 4, 5, 6, 3)), lambda x, at: F.grid_sample(x, at, align_corners=False)),
        ((learns(10, 4),), lambda x: x.softmax(-1)),
    ],
)
def test_gradients_are_taken_contiguous(made, function):
    assert_same(*made, function=backward(function))


@pytest.mark.parametrize("shape", [(20, 8), (2, 8, 5), (2, 8, 4, 4)])
@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_makes_the_input_s_gradient_last_where_all_is_contiguous(shape, times, training):
    def function(x, w, b, mean, var):
        y = F.batch_norm(x, mean, var, w, b, training)
        return y * x if times else y

    assert_same(learns(*shape), learns(8), learns(8), ones(8), ones(8), function=backward(function))


@pytest.mark.parametrize("last", [False, True])
def test_normalisation_keeps_channels_last(last):
    layout = LAST if last else {}

    def batch(x, w, b, mean, var):
        x = x.to(**layout)
        return F.batch_norm(x, mean, var, w, b, True) * x

    assert_same(learns(2, 8, 4, 4), learns(8), learns(8), ones(8), ones(8), function=backward(batch))
    assert_same(
        learns(2, 8, 4, 4),
        learns(8),
        learns(8),
        function=backward(lambda x, w, b: F.group_norm(x.to(**layout), 2, w, b)),
    )


@pytest.mark.parametrize("alike", [True, False])
def test_batch_norm_makes_the_input_s_gradient_first_where_the_two_lie_otherwise(alike):
    def function(x, w, b):
        y = F.batch_norm(x, None, None, w, b, True)
        return (y if alike else y.transpose(1, 2).contiguous()) * 2

    assert_same_order(learns(2, 8, 5), learns(8), learns(8), function=backward(function), but="scratch")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("kind", [ones, DOUBLE, HALF])
def test_batch_norm_of_a_transposed_input_takes_means_or_reciprocals(kind, learned, training):
    def function(x, mean, var, w, b):
        given = (w, b) if learned else (None, None)
        return F.batch_norm(x.transpose(1, 2), mean, var, *given, training)

    assert_same_order(kind(2, 5, 8), *[kind(8)] * 4, function=function)


def test_batch_norm_sees_channels_innermost_where_a_size_of_one_is_moved():
    def function(x, w, b):
        return F.batch_norm(x.transpose(1, 3), None, None, w, b, True) * 2

    assert_same(learns(2, 1, 5, 8), learns(8), learns(8), function=backward(function))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_a_convolution_makes_its_gradients_in_the_order_of_its_library(groups, width):
    def function(x, w, b):
        return F.conv1d(x, w, b, groups=groups)

    made = learns(2, 8, 12), learns(16, 8 // groups, width), learns(16)
    assert_same_order(*made, function=backward(function), but="scratch")


@pytest.mark.parametrize(("rows", "columns", "width"), [(24, 24, 8), (100, 100, 16), (300, 40, 8), (800, 600, 8)])
def test_fused_attention_keeps_a_block_of_scores_for_each_thread(rows, columns, width):
    made = (learns(1, 2, rows, width), *[learns(1, 2, columns, width)] * 2)
    assert_same(*made, function=backward(F.scaled_dot_product_attention))


@pytest.mark.parametrize(
    ("shape", "weight", "options"),
    [
        ((2, 3, 16, 16), (8, 3, 3, 3), {"padding": 1}),
        ((2, 3, 32, 32), (24, 3, 8, 8), {"stride": 8}),
        ((2, 8, 16, 16), (8, 1, 3, 3), {"padding": 1, "groups": 8}),
        ((2, 16, 8, 8), (32, 16, 1, 1), {}),
        ((2, 24, 12), (24, 6, 1), {"groups": 4}),
        ((2, 1, 400), (16, 1, 10), {"stride": 5}),
        ((2, 1, 512, 128), (96, 1, 16, 16), {"stride": 10}),
    ],
)
def test_convolutions_lay_out_anew_what_onednn_says(shape, weight, options):
    convolution = F.conv2d if len(shape) == 4 else F.conv1d
    made = (learns(*shape), learns(*weight), learns(weight[0]))
    assert_same(*made, function=backward(lambda x, w, b: convolution(x, w, b, **options)))


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.l1_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_reduce_beside_what_they_return(loss, reduction):
    assert_same(learns(5, 4), ones(5, 4), function=backward(lambda x, y: loss(x, y, reduction=reduction)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lengths", [((20, 18), (4, 3)), None])
def test_ctc_takes_its_lengths_from_tensors_whose_values_are_known(reduction, lengths):
    def function(x, targets, steps, sizes):
        given = lengths or (steps, sizes)
        return F.ctc_loss(x.log_softmax(-1), targets, *given, reduction=reduction)

    made = (learns(20, 2, 9), WHOLE(2, 4), lambda: torch.tensor([20, 18]), lambda: torch.tensor([4, 3]))
    assert_same(*made, function=backward(function))


def test_a_convolution_too_large_to_ask_is_named():
    with eb.trace(rules="cpu") as run:
        F.conv2d(torch.ones(64, 256, 56, 56), torch.ones(256, 256, 3, 3))
    assert any("convolution" in what for what in run.left_out)


def test_numbers_drawn_by_size_are_on_the_traced_device():
    assert_same(learns(6), function=backward(lambda x: x * torch.normal(0, 0.1, size=(6,))))
    with eb.trace(rules="cuda"):
        assert torch.normal(0.0, 1.0, (2, 3)).is_cuda and torch.normal(torch.zeros(3), 1.0).is_cuda


def test_pooling_without_gradients_keeps_what_is_known_and_copies_after_it_has_made_its_result():
    def function(x):
        F.max_pool1d(x.expand(2, 3, 24), 4, 4, ceil_mode=True)
        return x.exp() if F.max_pool1d(x, 4, 4).bool().all() else x

    assert_same(ones(2, 1, 24), function=function)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(20, 10), (120, 60)])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("layout", [{}, LAST])
def test_pictures_grow_by_tables_of_positions_and_weights_or_with_channels_last(channels, size, mode, layout):
    made = ones(2, channels, 9, 8)
    assert_same_order(made, function=lambda x: F.interpolate(x.to(**layout), size, mode=mode))


@pytest.mark.parametrize("function", [lambda x: x[:, :, :, :1], lambda x: x[:, :1], lambda x: x])
def test_one_channel_and_one_position_lie_last_as_they_are(function):
    for size in ((1, 1), (2, 4)):
        assert_same_order(ones(2, 2, 8, 8), function=lambda x, size=size: F.interpolate(function(x), size))


@pytest.mark.parametrize(
    ("shape", "size", "mode"),
    [
        *(((2, 3, 8), (20,), mode) for mode in ("nearest", "linear")),
        *(((2, 3, 8, 4, 4), (10, 9, 7), mode) for mode in ("nearest", "trilinear")),
    ],
)
def test_lines_and_volumes_grow_by_tables_of_positions_and_weights(shape, size, mode):
    assert_same_order(learns(*shape), function=backward(lambda x: F.interpolate(x, size, mode=mode)))


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_unfolding_makes_its_result_as_large_as_the_input_first(stride, turned):
    def function(x):
        x = x.transpose(2, 3) if turned else x
        return F.unfold(x, 3, padding=1, stride=stride)

    assert_same_order(learns(2, 3, 8, 8), function=backward(function))


def test_folding_copies_what_is_not_contiguous():
    assert_same_order(learns(2, 64, 27), function=backward(lambda x: F.fold(x.transpose(1, 2), (8, 8), 3, padding=1)))


def test_group_norm_of_single_positions_takes_nothing_for_itself():
    assert_same_order(learns(2, 8, 1, 1), function=backward(lambda x: F.group_norm(x, 2)))


def test_complex_numbers_are_not_taken_for_whole_ones():
    assert_same(lambda: torch.ones(3, 4, dtype=torch.complex64), function=lambda x: x.exp() / x)


@pytest.mark.parametrize("dim", [0, 2])
def test_norms_of_weights_are_summed_by_threads(dim):
    norm = [8, 1, 1] if dim == 0 else [1, 1, 3]
    made = learns(8, 4, 3), learns(*norm)
    assert_same_order(*made, function=backward(lambda v, g: torch._weight_norm(v, g, dim)))


def test_sizes_of_one_have_the_strides_that_decide_a_convolution_s_layout():
    def function(x, w):
        y = F.layer_norm(x.permute(0, 2, 3, 1), (96,)).permute(0, 3, 1, 2)
        y = F.conv2d(y, w, padding=3, groups=96)
        return F.conv2d(y.permute(0, 2, 3, 1).sigmoid().permute(0, 3, 1, 2) + x, w, padding=3, groups=96)

    assert_same_order(learns(2, 96, 1, 1), learns(96, 1, 7, 7), function=backward(function))
