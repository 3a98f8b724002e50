"""What CPU kernels allocate for themselves and give back before they return.

Copies of operands, for the most part: in another dtype where an iterator's operands differ in it, in another layout
where a kernel walks only one. Read in PyTorch 2.13.0; what oneDNN takes is in `asked`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._prims_common import elementwise_dtypes, suggest_memory_format

from .base import Function, stating
from .layout import iterated_strides

aten: Final = torch.ops.aten

SCRATCH: Final[dict[Any, Function]] = {}
"""Op -> the sizes of what its kernel takes, as `base.Rules` says."""

FIRST: Final[set[Any]] = {
    aten.binary_cross_entropy_with_logits.default,
    aten.bincount.default,
    aten.im2col.default,
    aten.col2im.default,
    aten.native_batch_norm.default,
}
"""Ops that make their results after some of it."""

_PROMOTION: Final = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
_ITERATED_BACKWARD: Final = frozenset({aten.threshold_backward.default, aten.sigmoid_backward.default})
_NOT_PROMOTED: Final = frozenset(
    getattr(aten, name)
    for name in (
        *("bernoulli", "bernoulli_", "clone", "copy", "copy_", "exponential_", "fill", "fill_", "_to_copy"),
        *("masked_fill", "masked_fill_", "native_dropout", "native_dropout_backward", "normal_", "uniform_"),
        *("logical_not", "logical_not_", "isnan", "isposinf", "isneginf", "isinf", "signbit", "nan_to_num", "angle"),
    )
    if hasattr(aten, name)
)
"""Ops tagged as pointwise whose kernel makes no copies in a common dtype."""

_WRAPPED: Final = frozenset(
    getattr(aten, name)
    for name in (
        *("add", "sub", "mul", "div", "rsub", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"),
        *("add_", "sub_", "mul_", "div_", "remainder_", "fmod_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_"),
    )
)
"""Ops whose form for a number makes a tensor of it (`ATen/native/BinaryOps.cpp`, `wrapped_scalar_tensor`)."""


def iterated(func: Any) -> Callable[..., Iterable[int]] | None:
    """The scratch of a pointwise op: each operand that is not in the dtype in which all are taken is copied to that.

    An argument that is written in place counts twice, as an operand and as a result (`ATen/TensorIterator.cpp`,
    `compute_types`). A number is a tensor of its own dtype, made by the caller, or where the op takes it as a number by
    the op itself.
    """
    packet = func.overloadpacket
    if (torch.Tag.pointwise not in func.tags and func not in _ITERATED_BACKWARD) or packet in _NOT_PROMOTED:
        return None
    arguments = func._schema.arguments
    operands = [i for i, arg in enumerate(arguments) if str(arg.type) == "Tensor" and not arg.is_out]
    wraps = packet in _WRAPPED and len(arguments) > 1 and str(arguments[1].type) == "number"
    writes = func._schema.is_mutable and bool(operands)
    if packet is aten.where and len(operands) == 3:
        del operands[0]  # the condition
    floats = func._schema.name.removesuffix("_") not in ("aten::pow", "aten::floor_divide")

    def scratch(*args: Any, **kwargs: Any) -> list[int]:
        taken = [args[i] for i in operands if i < len(args)]
        made = []
        if wraps:
            taken.append(args[1])
            made.append(_itemsize(args[1]))
        first = taken[0].dtype if taken and isinstance(taken[0], torch.Tensor) else None
        alike = first is not None and all(isinstance(t, torch.Tensor) and t.dtype == first for t in taken)
        if alike and (first.is_floating_point or writes):
            return made
        if any(not isinstance(t, (torch.Tensor, bool, int, float)) for t in taken):
            return made
        common = elementwise_dtypes(*taken, type_promotion_kind=_PROMOTION)[1]
        if not (common.is_floating_point or common.is_complex) and floats and _gives_fractions(packet, kwargs):
            common = torch.get_default_dtype()
        if writes and taken[0].dtype != common:
            made.append(taken[0].numel() * common.itemsize)
        for t in taken:
            if isinstance(t, torch.Tensor):
                made += [t.numel() * common.itemsize] if t.dtype != common else []
            elif _dtype_of(t) != common:
                made.append(common.itemsize)
        return made

    return scratch


_FRACTIONS: Final = frozenset(
    getattr(aten, name)
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "digamma", "div", "erf", "erfc"),
        *("erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "logit", "reciprocal", "rsqrt"),
        *("sigmoid", "sin", "sinc", "sinh", "sqrt", "tan", "tanh", "xlogy"),
    )
)
"""Ops that take whole numbers as fractions (`ATen/native/UnaryOps.cpp`, `BinaryOps.cpp`: `build_*_float_op`)."""


def _gives_fractions(packet: Any, options: dict[str, Any]) -> bool:
    return packet in _FRACTIONS and options.get("rounding_mode") is None


def _dtype_of(number: complex) -> torch.dtype:
    return torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64


def _itemsize(number: complex) -> int:
    return _dtype_of(number).itemsize


@stating(
    SCRATCH,
    *(
        getattr(aten, f"_foreach_{name}").Scalar
        for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
    ),
    *(getattr(aten, f"_foreach_{name}").ScalarList for name in ("add_", "sub_", "mul_", "div_")),
)
def foreach_scratch(tensors: Any, number: Any) -> list[int]:
    """Tensor by tensor, each with a tensor made of the number (`ATen/native/ForeachOpsKernels.cpp`)."""
    numbers = number if isinstance(number, (list, tuple)) else [number] * len(tensors)
    made = [
        [_itemsize(n), t.element_size()] if _dtype_of(n) != t.dtype else [_itemsize(n)]
        for t, n in zip(tensors, numbers, strict=True)
    ]
    return _one_by_one(made)


def _one_by_one(parts: Iterable[list[int]]) -> list[int]:
    """What is taken for each part, given back before the next."""
    made: list[int] = []
    live: list[int] = []
    for part in parts:
        made += [*(-nbytes for nbytes in reversed(live)), *part]
        live = part
    return made


def _left(taken: list[int]) -> list[int]:
    """What is not given back before the end."""
    live: list[int] = []
    for nbytes in taken:
        live.append(nbytes) if nbytes > 0 else live.remove(-nbytes)
    return live


# -- reductions --------------------------------------------------------------------------------------------------------


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _copied(*tensors: torch.Tensor | None) -> list[int]:
    """Copies of those that are not contiguous."""
    return [_nbytes(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def _divided(dtype: torch.dtype) -> list[int]:
    """Division by how many there are, a whole number that becomes a tensor, and that in the dtype of the sum."""
    return [8, dtype.itemsize]


@stating(SCRATCH, aten.sum.default, aten.prod.default)
def sum_scratch(input: Any, dtype: torch.dtype | None = None) -> list[int]:
    """The input in the dtype in which is summed (`ATen/native/ReduceOpsUtils.h`, `make_reduction_from_out_ty`)."""
    summed = dtype or (input.dtype if input.is_floating_point() or input.is_complex() else torch.int64)
    return [_nbytes(input, summed)] if summed != input.dtype else []


@stating(SCRATCH, aten.sum.dim_IntList, aten.prod.dim_int)
def sum_over_scratch(input: Any, over: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> list[int]:
    """As `sum_scratch`."""
    return sum_scratch(input, dtype)


@stating(SCRATCH, aten.cumsum.default, aten.cumprod.default)
def cumulative_scratch(input: Any, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """The input in the result's dtype (`ATen/native/ReduceOps.cpp`, `impl_func_cum_ops`)."""
    return sum_scratch(input, dtype)


@stating(SCRATCH, aten.mean.default)
def mean_scratch(input: Any, dtype: torch.dtype | None = None) -> list[int]:
    """As `mean_over_scratch`, over all."""
    return mean_over_scratch(input, None, dtype=dtype)


def _mean_in_single(n: int, results: int) -> list[int]:
    return [4 * results, 4 * n, -4 * n, *_divided(torch.float32)]


@stating(SCRATCH, aten.mean.dim)
def mean_over_scratch(input: Any, over: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> list[int]:
    """A sum, divided in place; of half precision in single (`ATen/native/ReduceOps.cpp`, `mean_out`)."""
    dtype = dtype or input.dtype
    if dtype in (torch.bfloat16, torch.float16):
        dims = range(input.dim()) if over is None or not len(over) else [d % max(input.dim(), 1) for d in over]
        return _mean_in_single(input.numel(), math.prod(n for i, n in enumerate(input.shape) if i not in dims))
    cast = [_nbytes(input, dtype)] if dtype != input.dtype else []
    return [*cast, *(-n for n in cast), *_divided(dtype)]


@stating(SCRATCH, aten.std.correction, aten.var.correction)
def deviation_scratch(input: Any, over: Any = None, **options: Any) -> list[int]:
    """Of all numbers the mean first, in single and double precision (`ReduceOps.cpp`, `std_var_all_cpu`)."""
    if over or input.dtype not in (torch.float32, torch.float64):
        return []
    return [input.element_size(), *_divided(input.dtype)]


@stating(SCRATCH, aten.pow.Scalar)
def power_scratch(base: Any, exponent: Any) -> list[int]:
    """A tensor of the base, and both in the dtype of the result (`ATen/native/Pow.cpp`)."""
    if base == 1:
        return []
    common = torch.result_type(exponent, base)
    cast = [common.itemsize] if common != _dtype_of(base) else []
    return [_itemsize(base), *cast, *([_nbytes(exponent, common)] if common != exponent.dtype else [])]


@stating(SCRATCH, aten.linalg_vector_norm.default)
def vector_norm_scratch(
    input: Any, order: Any = 2, over: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> list[int]:
    """The input in the dtype of the norm, if that is asked for (`ATen/native/LinearAlgebra.cpp`)."""
    return [_nbytes(input, dtype)] if dtype not in (None, input.dtype) else []


@stating(SCRATCH, aten.logsumexp.default)
def logsumexp_scratch(input: Any, over: Any, keepdim: bool = False) -> list[int]:
    """Maxima, the check whether they are infinite, then all numbers less these (`ATen/native/ReduceOps.cpp`)."""
    dims = [d % max(input.dim(), 1) for d in over] or range(input.dim())
    results, each = math.prod(n for i, n in enumerate(input.shape) if i not in dims), input.element_size()
    check = [results * each, 8, each, results]
    return [results * each, *check, *(-n for n in reversed(check)), _nbytes(input)]


@stating(SCRATCH, aten._safe_softmax.default)
def safe_softmax_scratch(input: Any, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """Which scores are masked, which rows are wholly, and a zero (`ATen/native/transformers/attention.cpp`)."""
    return [input.numel(), input.numel() // max(input.shape[dim], 1), input.element_size()]


@stating(SCRATCH, aten._softmax.default, aten._log_softmax.default)
def softmax_scratch(input: Any, *rest: Any) -> list[int]:
    """A contiguous copy (`ATen/native/SoftMax.cpp`)."""
    return _copied(input)


@stating(SCRATCH, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward_scratch(gradient: Any, output: Any, *rest: Any) -> list[int]:
    """Contiguous copies (`ATen/native/SoftMax.cpp`)."""
    return _copied(gradient, output)


@stating(SCRATCH, aten.gelu_backward.default)
def gelu_backward_scratch(gradient: Any, input: Any, *, approximate: str = "none") -> list[int]:
    """Both gradients laid out as a contiguous input, which oneDNN takes (`ATen/native/Activation.cpp`)."""
    if approximate != "none" or input.dtype == torch.float64 or not input.is_contiguous():
        return []
    result = iterated_strides(input.shape, (gradient, input))
    return [*_copied(gradient), *([_nbytes(input)] if result != input.stride() else [])]


# -- losses ------------------------------------------------------------------------------------------------------------


@stating(SCRATCH, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def loss_scratch(input: Any, target: Any, reduction: int = 1, *rest: Any) -> list[int]:
    """The loss of each, then their mean (`ATen/native/Loss.cpp`)."""
    if reduction == 0:
        return []
    n = math.prod(torch.broadcast_shapes(input.shape, target.shape))
    return [n * input.element_size(), *(_mean(n, input.dtype) if reduction == 1 else [])]


def _mean(n: int, dtype: torch.dtype) -> list[int]:
    return _mean_in_single(n, 1) if dtype in (torch.bfloat16, torch.float16) else _divided(dtype)


@stating(SCRATCH, aten.binary_cross_entropy.default)
def binary_cross_entropy_scratch(input: Any, target: Any, weight: Any = None, reduction: int = 1) -> list[int]:
    """The mean, copied to where the loss of each is (`ATen/native/Loss.cpp`)."""
    each = input.element_size()
    return [] if reduction == 0 else [each, *(_divided(input.dtype) if reduction == 1 else [])]


@stating(SCRATCH, aten.soft_margin_loss.default)
def soft_margin_scratch(input: Any, target: Any, reduction: int = 1) -> list[int]:
    """As `binary_cross_entropy_scratch`."""
    return binary_cross_entropy_scratch(input, target, None, reduction)


@stating(SCRATCH, aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward_scratch(
    gradient: Any, input: Any, target: Any, weight: Any = None, reduction: int = 1
) -> list[int]:
    """The division of the mean, in place (`ATen/native/Loss.cpp`)."""
    return _divided(input.dtype) if reduction == 1 else []


@stating(SCRATCH, aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits_scratch(
    input: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> list[int | None]:
    """Two terms, the one that is no longer needed given back, and the loss of each (`ATen/native/Loss.cpp`)."""
    n = _nbytes(input)
    if pos_weight is not None:
        weights = [8, input.element_size(), _nbytes(pos_weight)]
        terms = [n, n, -n, *weights, -8, -input.element_size(), n, 8, input.element_size(), -input.element_size(), -8]
        terms += [-_nbytes(pos_weight), -n]
    else:
        terms = [n, n, -n]
    if reduction == 0:
        return [*terms, None]
    return [*terms, n, None, *(_mean(input.numel(), input.dtype) if reduction == 1 else [])]


@stating(SCRATCH, aten._ctc_loss_backward.default)
def ctc_loss_backward_scratch(*args: Any) -> list[int]:
    """As many logarithms of paths as forward keeps, from the end (`ATen/native/LossCTC.cpp`, `log_beta`)."""
    return [_nbytes(args[6])]


# -- normalisations ----------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> int:
    """Bytes of a number in the dtype in which half precision is computed."""
    return max(4, dtype.itemsize)


@stating(SCRATCH, aten.native_batch_norm.default)
def batch_norm_scratch(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> list[int | None]:
    """Sums by channel, then factor and summand (`ATen/native/Normalization.cpp`, `cpu/batch_norm_kernel.cpp`).

    Of an input in no standard layout a mean, or the reciprocal of a deviation, and ones for what is not given.
    """
    c, wide = input.shape[1], _wide(input.dtype)
    mixed = any(t is not None and t.dtype != input.dtype for t in (weight, bias, mean, var))
    dtype = torch.float32 if mixed else input.dtype
    of_channels = c * dtype.itemsize
    if not is_dense(input):
        ones = [dtype.itemsize for t in (weight, bias) if t is None]
        if training:
            means = mean_over_scratch(input, [i for i in range(input.dim()) if i != 1], dtype=dtype)
            return [None, None, *means, *(-n for n in reversed(_left(means))), None, *ones]
        number = _divided(dtype)[: 1 if dtype == torch.float64 else 2]
        root = [*number, of_channels, *(-n for n in reversed(number)), of_channels]
        return [None, *root, of_channels, -of_channels, -of_channels, *ones]
    factors = [c * wide] * 2
    if not training:
        return [None, *factors]
    sums = [of_channels] * 2
    sums += [torch.get_num_threads() * c * wide] if _channels_innermost(input) else []
    return [None, None, None, *sums, *(-n for n in reversed(sums)), *factors]


@stating(SCRATCH, aten.native_batch_norm_backward.default)
def batch_norm_backward_scratch(
    gradient: Any, input: Any, weight: Any, mean: Any, var: Any, saved: Any, rstd: Any, training: bool, *rest: Any
) -> list[int]:
    """A gradient that another one replaces, and sums by channel (`ATen/native/Normalization.cpp`)."""
    c, needed = input.shape[1], rest[-1]
    if not batch_norm_is_ordered(gradient, input):
        return [c * input.element_size()]
    made = [_nbytes(input), -_nbytes(input)] if needed[0] else []
    if _channels_innermost(input):
        made += [] if training else [c * _wide(input.dtype)]
        made += [2 * torch.get_num_threads() * c * _wide(input.dtype)]
    return made


def batch_norm_is_ordered(gradient: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether batch norm's backward walks both as they lie (`ATen/native/Normalization.cpp`, `all_contiguous`)."""
    alike = suggest_memory_format(gradient) == suggest_memory_format(input)
    return alike and is_dense(input) and is_dense(gradient)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has a standard layout, sizes of one apart (`ATen/native/Normalization.cpp`, `is_contiguous`)."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = layouts.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def _channels_innermost(dense: torch.Tensor) -> bool:
    """As batch norm sees it (`ATen/native/cpu/batch_norm_kernel.cpp`)."""
    return math.prod(dense.shape[2:]) == 1 if dense.is_contiguous() else True


def _is_ordered(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=suggest_memory_format(tensor))


@stating(SCRATCH, aten.native_layer_norm.default)
def layer_norm_scratch(input: Any, *rest: Any) -> list[int]:
    """A contiguous copy (`ATen/native/layer_norm.cpp`)."""
    return _copied(input)


@stating(SCRATCH, aten.native_layer_norm_backward.default)
def layer_norm_backward_scratch(gradient: Any, input: Any, shape: Any, *rest: Any) -> list[int]:
    """Contiguous copies, and a row for each thread of both parameters' gradients (`cpu/layer_norm_kernel.cpp`)."""
    rows = 2 * torch.get_num_threads() * math.prod(shape) * input.element_size() if any(rest[-1][1:]) else 0
    return [*_copied(gradient, input), rows]


@stating(SCRATCH, aten.native_group_norm.default)
def group_norm_scratch(input: Any, weight: Any, bias: Any, n: int, c: int, *rest: Any) -> list[int]:
    """Where channels lie side by side, factor and summand of each (`ATen/native/cpu/group_norm_kernel.cpp`)."""
    last = suggest_memory_format(input) is not torch.contiguous_format
    return [2 * n * c * _wide(input.dtype)] if last else []


@stating(SCRATCH, aten.native_group_norm_backward.default)
def group_norm_backward_scratch(gradient: Any, input: Any, mean: Any, rstd: Any, weight: Any, *rest: Any) -> list[int]:
    """Two sums by sample and channel (`ATen/native/cpu/group_norm_kernel.cpp`)."""
    n, c = rest[:2]
    return [n * c * _wide(input.dtype)] * 2


# -- products ----------------------------------------------------------------------------------------------------------


def _not_for_blas(matrix: torch.Tensor) -> bool:
    """Whether neither rows nor columns are contiguous (`ATen/native/LinearAlgebra.cpp`, `addmm_impl_cpu_`)."""
    (rows, columns), (of_row, of_column) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = of_column == 1 and of_row >= max(1, columns)
    return not (by_rows or (of_row == 1 and of_column >= max(1, rows)))


@stating(SCRATCH, aten.mm.default)
def product_scratch(first: Any, second: Any, *rest: Any) -> list[int]:
    """Copies of matrices that BLAS does not take as they lie (`ATen/native/LinearAlgebra.cpp`)."""
    return [_nbytes(matrix) for matrix in (first, second) if _not_for_blas(matrix)] if first.numel() else []


@stating(SCRATCH, aten.addmm.default)
def sum_and_product_scratch(summand: Any, first: Any, second: Any, *rest: Any, **options: Any) -> list[int]:
    """As `product_scratch`."""
    return product_scratch(first, second)


@stating(SCRATCH, aten.mv.default)
def matrix_vector_scratch(matrix: Any, vector: Any) -> list[int]:
    """As `product_scratch` (`ATen/native/Blas.cpp`, `addmv_out`)."""
    return [_nbytes(matrix)] if _not_for_blas(matrix) else []


@stating(SCRATCH, aten.bmm.default)
def batched_product_scratch(first: Any, second: Any, *rest: Any) -> list[int]:
    """One product after another where the batch does not lie so that MKL takes it as a whole; few numbers need none.

    `ATen/native/LinearAlgebra.cpp`, `bmm_out_or_baddbmm_`.
    """
    batch, rows, inner = first.shape
    if inner * rows * second.shape[2] < 400 or not (first.numel() and second.numel()):
        return []
    if torch.backends.mkl.is_available() and _lies_in_batches(first) and _lies_in_batches(second):
        return []
    return _one_by_one([product_scratch(first[0], second[0])] * batch)


@stating(SCRATCH, aten.baddbmm.default)
def sum_and_batched_product_scratch(summand: Any, first: Any, second: Any, *rest: Any, **options: Any) -> list[int]:
    """As `batched_product_scratch`."""
    return batched_product_scratch(first, second)


def _lies_in_batches(matrices: torch.Tensor) -> bool:
    (_, rows, columns), (_, of_row, of_column) = matrices.shape, matrices.stride()
    by_rows = of_column == 1 and (rows == 1 or of_row >= columns)
    return by_rows or (of_row == 1 and (columns == 1 or of_column >= rows))


# -- attention, pictures, the rest -------------------------------------------------------------------------------------


def _blocks(queries: int, keys: int) -> tuple[int, int]:
    """How many queries and keys a block has (`ATen/native/cpu/FlashAttentionKernel.cpp`)."""
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)


@stating(SCRATCH, aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention_scratch(query: Any, key: Any, *rest: Any, **options: Any) -> list[int]:
    """A block of scores with maxima and sums, and one of outputs, for each thread (`FlashAttentionKernel.cpp`)."""
    q, k = _blocks(query.shape[2], key.shape[2])
    threads, each = torch.get_num_threads(), query.element_size()
    in_half = [threads * q * k * each] if each == 2 else []
    return [threads * (q * k + 2 * q + q * query.shape[3]) * _wide(query.dtype), *in_half]


@stating(SCRATCH, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward_scratch(gradient: Any, query: Any, key: Any, *rest: Any, **options: Any) -> list[int]:
    """Two blocks of scores for each thread, sums, and a contiguous gradient (`FlashAttentionKernel.cpp`)."""
    q, k = _blocks(query.shape[2], key.shape[2])
    threads, wide, each = torch.get_num_threads(), _wide(query.dtype), query.element_size()
    in_half = [2 * threads * q * k * each] if each == 2 else []
    return [*_copied(gradient.transpose(1, 2)), 2 * threads * q * k * wide, *in_half, threads * q * wide]


@stating(
    SCRATCH,
    *(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.avg_pool2d.default),
    *(aten.avg_pool3d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default),
    *(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
)
def pool_scratch(input: Any, *rest: Any) -> list[int]:
    """A copy in a standard layout (`ATen/native/cpu/MaxPoolKernel.cpp`, `AvgPoolKernel.cpp`, `AdaptiveAvgPool...`)."""
    return [] if _is_ordered(input) else [_nbytes(input)]


@stating(
    SCRATCH,
    *(aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices_backward.default),
    *(aten._adaptive_avg_pool2d_backward.default, aten.adaptive_max_pool2d_backward.default),
)
def pool_backward_scratch(gradient: Any, input: Any, *rest: Any) -> list[int]:
    """All in the layout of the incoming gradient: the input's gradient, places of maxima (as in `pool_scratch`)."""
    layout = suggest_memory_format(gradient)
    taken = [gradient, input, *(arg for arg in rest if isinstance(arg, torch.Tensor))]
    return [_nbytes(tensor) for tensor in taken if not tensor.is_contiguous(memory_format=layout)]


@stating(SCRATCH, aten.repeat.default)
def repeat_scratch(input: Any, repeats: Any) -> list[int]:
    """Sizes and how often each, as tensors (`ATen/native/TensorShape.cpp`)."""
    r = 8 * len(repeats)
    return [r, 8, r, -8, 2 * r]


@stating(SCRATCH, aten.sort.default, aten.sort.stable)
def sort_scratch(input: Any, *rest: Any, **options: Any) -> list[int]:
    """Places of the numbers that are sorted at once (`ATen/native/cpu/SortingKernel.cpp`)."""
    dims = [arg for arg in (*rest, *options.values()) if type(arg) is int]
    return [8 * input.shape[dims[0] if dims else -1]] if input.dim() else []


@stating(SCRATCH, aten.log_sigmoid_forward.default)
def log_sigmoid_scratch(input: Any) -> list[int]:
    """A contiguous copy (`ATen/native/Activation.cpp`, `log_sigmoid_forward_cpu`)."""
    return _copied(input)


@stating(SCRATCH, aten.embedding_dense_backward.default)
def embedding_backward_scratch(gradient: Any, indices: Any, *rest: Any) -> list[int]:
    """Contiguous copies (`ATen/native/Embedding.cpp`)."""
    return _copied(indices, gradient)


@stating(SCRATCH, aten.embedding.default)
def embedding_scratch(weight: Any, indices: Any, *rest: Any) -> list[int]:
    """The indices in a row (`ATen/native/Embedding.cpp`)."""
    return _copied(indices)


@stating(SCRATCH, aten.histc.default)
def histogram_scratch(input: Any, bins: int = 100, *bounds: Any) -> list[int]:
    """The bins' edges, and what each thread counts (`ATen/native/cpu/HistogramKernel.cpp`)."""
    return [(bins + 1) * input.element_size(), torch.get_num_threads() * bins * input.element_size()]


@stating(SCRATCH, aten.bincount.default)
def bincount_scratch(input: Any, *rest: Any) -> list[int | None]:
    """The least and the largest, one after the other (`ATen/native/SummaryOps.cpp`)."""
    return [*[input.element_size(), -input.element_size()] * 2, None]


@stating(SCRATCH, aten.roll.default)
def roll_scratch(input: Any, shifts: Any, dims: Any = ()) -> list[int]:
    """Over one dimension after the other (`ATen/native/TensorTransformations.cpp`)."""
    return [_nbytes(input)] * (len(dims) - 1)


@stating(SCRATCH, aten.native_dropout.default)
def dropout_scratch(input: Any, p: float, train: bool | None) -> list[int]:
    """The mask in the input's dtype, and the number that scales (`ATen/native/Dropout.cpp`, `native_dropout_cpu`)."""
    if train is False or p == 0 or not input.numel():
        return []
    n = _nbytes(input)
    return [n, -n, 8, input.element_size()]


_INTERPOLATED: Final = {
    **dict.fromkeys((f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)), 1),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), 2),
    "upsample_bicubic2d": 4,
}
"""Op -> how many of the input's positions in a dimension one of the result's is made of."""


def _upsampling(positions: int) -> Function:
    """Channels last, copied there and back, where that is fast; else of each dimension the positions and their weights.

    `ATen/native/cpu/UpSampleKernel.cpp`, `_use_vectorized_kernel_cond_2d` and `upsample_generic_Nd_kernel_impl`.
    """

    def scratch(input: Any, output_size: Any, *rest: Any) -> list[int]:
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
        last = layout is not None and input.is_contiguous(memory_format=layout)
        n, c = input.shape[:2]
        short = input.dim() == 4 and (sum(output_size) <= 128 or (c == 3 and positions == 2))
        if positions < 4 and (short or (last and c > 3)):
            made = n * c * math.prod(output_size) * input.element_size()
            lies_so = suggest_memory_format(input) is layout or c == 1 or math.prod(output_size) == 1
            return [*([] if last else [_nbytes(input)]), *([] if lies_so else [made])]
        tables = [nbytes for size in output_size for nbytes in [8 * size, size * input.element_size()] * positions]
        return [*tables, *(-nbytes for nbytes in tables)]

    return scratch


for _name, _positions in _INTERPOLATED.items():
    SCRATCH[getattr(aten, _name).default] = _upsampling(_positions)


@stating(SCRATCH, *(getattr(aten, f"{name}_backward").default for name in _INTERPOLATED))
def upsampling_backward_scratch(gradient: Any, *rest: Any) -> list[int]:
    """A copy in a standard layout (`ATen/native/cpu/UpSampleMoreKernel.cpp`)."""
    return [] if _is_ordered(gradient) else [_nbytes(gradient)]


@stating(SCRATCH, aten.grid_sampler_2d_backward.default)
def grid_sampler_backward_scratch(gradient: Any, *rest: Any) -> list[int]:
    """A contiguous copy (`ATen/native/cpu/GridSamplerKernel.cpp`)."""
    return _copied(gradient)


@stating(SCRATCH, aten._weight_norm_interface.default)
def weight_norm_scratch(weight: Any, norm: Any, dim: int = 0) -> list[int]:
    """Over the last dimension sums of each thread (`ATen/native/cpu/WeightNormKernel.cpp`)."""
    return [torch.get_num_threads() * _nbytes(norm)] if dim else []


@stating(SCRATCH, aten._weight_norm_interface_backward.default)
def weight_norm_backward_scratch(gradient: Any, weight: Any, norm: Any, saved: Any, dim: int) -> list[int]:
    """The same of the products, and two factors."""
    return [3 * _nbytes(saved)] if dim else []


@stating(SCRATCH, aten.im2col.default)
def im2col_scratch(input: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[int | None]:
    """As `col2im_scratch` (`ATen/native/Im2Col.cpp`)."""
    sizes = zip(input.shape[-2:], kernel, dilation, padding, stride, strict=True)
    blocks = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in sizes)
    return _outgrown(input, blocks * math.prod(kernel) / math.prod(input.shape[-2:]))


@stating(SCRATCH, aten.col2im.default)
def col2im_scratch(input: Any, size: Any, kernel: Any, *rest: Any) -> list[int | None]:
    """A result as large as the input, which is exchanged where it must grow, and a contiguous copy (`Col2Im.cpp`)."""
    return _outgrown(input, math.prod(size) / (math.prod(kernel) * input.shape[-1]))


def _outgrown(input: torch.Tensor, growth: float) -> list[int | None]:
    return [_nbytes(input), *_copied(input), None] if growth > 1 else [None, *_copied(input)]
