"""What CUDA kernels return and keep where the meta device shows something else.

Nothing here was run on a GPU: each rule is read off PyTorch's source, and names the file and the function. Read were
the main branch up to 2.13, and the headers that the 2.13.0 package holds; `tests/recorded` compares the rules with
runs that were recorded on GPUs, one of them by 2.11. Tables as in `cpu`, and two more: `SCRATCH`, what a kernel
allocates for itself, and `LEFT_OUT`, what is known to be allocated and not derived here.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, Final

import torch
from torch.nn import functional as F

from .. import gpus
from . import autocast, cpu, cpu_pictures, cuda_attention, cuda_dropout, cuda_reduction, cuda_rnn, cuda_sort
from .base import Function, Rules, stating
from .engine import is_dense

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
"""Op -> a function of the same arguments that returns, on the meta device, what the CUDA kernel returns."""

FUNCTIONS: Final[dict[Any, Function]] = {}
"""Function of torch's Python face -> a function of the same arguments that takes the path it takes on CUDA."""

SCRATCH: Final[dict[Any, Function]] = {}
"""Op -> a function of the same arguments: the sizes in bytes of what its kernel allocates for itself."""

LEFT_OUT: Final[dict[Any, str]] = {}
"""Op or function -> what it allocates that no rule derives."""


# -- products ----------------------------------------------------------------------------------------------------------


@stating(SCRATCH, aten.mm.default, aten.bmm.default)
def product_scratch(first: Any, second: Any, *rest: Any) -> list[int]:
    """Copies of operands whose layout cuBLAS cannot read, expanded ones above all."""
    return [t.numel() * t.element_size() for t in (first, second) if not _read_by_cublas(t)]


@stating(SCRATCH, aten.addmm.default, aten.baddbmm.default)
def sum_and_product_scratch(summand: Any, first: Any, second: Any, *rest: Any, **options: Any) -> list[int]:
    """As for the product alone."""
    return product_scratch(first, second)


def _read_by_cublas(matrix: Any) -> bool:
    """Whether rows or columns follow one another without overlap, [m, n] or [batch, m, n].

    `ATen/native/cuda/cuBlasCommonArgs.h`, `prepare_matrix_for_cublas`, and `ATen/native/cuda/Blas.cpp`,
    `prepare_batch_matrix_for_cublas`.
    """
    (m, n), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if (across == 1 and down >= max(1, n)) or (down == 1 and across >= max(1, m)):
        return True
    return is_dense(matrix) if matrix.dim() == 2 else matrix.is_contiguous() and down != 0 and across != 0


# -- normalisation -----------------------------------------------------------------------------------------------------


@stating(KERNELS, aten.native_layer_norm.default)
def native_layer_norm(input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Contiguous, the two statistics in the type that sums are kept in, single precision for halves.

    `ATen/native/cuda/layer_norm_kernel.cu`, `layer_norm_cuda`.
    """
    rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
    statistics = (input.new_empty(rows, dtype=accumulate_type(input.dtype)) for _ in range(2))
    return input.new_empty(input.shape), *statistics


@stating(KERNELS, aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    gradient: Any, input: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, needed: Any
) -> Any:
    """All contiguous (`ATen/native/cuda/layer_norm_kernel.cu`, `layer_norm_backward_cuda`)."""
    made = (
        like.new_empty(like.shape) if asked else None for like, asked in zip((input, weight, bias), needed, strict=True)
    )
    return tuple(made)


@stating(SCRATCH, aten.native_layer_norm.default)
def native_layer_norm_scratch(input: Any, *rest: Any) -> list[int]:
    """The kernel reads contiguous memory (`layer_norm_cuda`, `expect_contiguous`)."""
    return copies(input)


@stating(SCRATCH, aten.native_layer_norm_backward.default)
def native_layer_norm_backward_scratch(
    gradient: Any, input: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, needed: Any
) -> list[int]:
    """As in the forward pass (`LayerNormBackwardKernelImpl`), and the sums of blocks of many short rows."""
    learning = [like for like, asked in zip((weight, bias), needed[1:], strict=True) if asked]
    return [*copies(input, gradient), *_sums_of_blocks(input, shape, learning)]


def _sums_of_blocks(input: Any, shape: Any, learning: list[Any]) -> list[int]:
    """A row for each block of rows [blocks, columns] for weight and bias, and each of the two summed up into a new one.

    `layer_norm_kernel.cu`, `LaunchGammaBetaBackwardCUDAKernel`, where there are too few columns to fill the GPU.
    """
    columns = math.prod(shape)
    rows = input.numel() // max(columns, 1)
    if rows <= 64 * 1024 or columns // 32 >= gpus.followed().processors // 2:
        return []
    blocks = min(32 * 1024 // -(-columns // 32), -(-rows // 32))
    parts = [like.new_empty(blocks, like.shape[-1]) for like in learning]
    made = [part.numel() * part.element_size() for part in parts]
    for part in parts:
        total = [part.shape[1] * part.element_size(), *cuda_reduction.sum_scratch(part, [0])]
        made += [*total, *(-nbytes for nbytes in reversed(total))]
    return made


class _RmsNorm(torch.autograd.Function):
    """Below autograd the op is one kernel; above it PyTorch composes it wherever there is no GPU."""

    @staticmethod
    def forward(context: Any, input: Any, shape: Any, weight: Any, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm.default(input, shape, weight, eps)
        context.shape = shape
        context.save_for_backward(input, weight, rstd)
        return out

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        input, weight, rstd = context.saved_tensors
        needed = [context.needs_input_grad[0], context.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            d_input, d_weight = aten._fused_rms_norm_backward.default(
                gradient, input, context.shape, rstd, weight, needed
            )
        return d_input, None, d_weight, None


@stating(FUNCTIONS, torch.rms_norm)
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """One kernel that keeps its input and a statistic, or composed (`ATen/native/layer_norm.cpp`, `rms_norm_symint`).

    It is composed where the weight has another dtype than the input, and for complex or channels-last inputs.
    """
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or input.is_complex() or torch._prims_common.suggest_memory_format(input) != torch.contiguous_format:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, normalized_shape, weight, eps)


@stating(KERNELS, aten._fused_rms_norm.default)
def fused_rms_norm(input: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    """As layer normalisation, with one statistic (`layer_norm_kernel.cu`, `_fused_rms_norm_cuda`)."""
    return native_layer_norm(input, shape, weight, None, 0.0)[:2]


@stating(KERNELS, aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(gradient: Any, input: Any, shape: Any, rstd: Any, weight: Any, needed: Any) -> Any:
    """Both contiguous (`layer_norm_kernel.cu`, `_fused_rms_norm_backward_cuda`)."""
    return native_layer_norm_backward(gradient, input, shape, None, rstd, weight, None, (*needed, False))[:2]


SCRATCH[aten._fused_rms_norm.default] = native_layer_norm_scratch


@stating(SCRATCH, aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward_scratch(
    gradient: Any, input: Any, shape: Any, rstd: Any, weight: Any, needed: Any
) -> list[int]:
    """As layer normalisation, without a bias."""
    return native_layer_norm_backward_scratch(gradient, input, shape, None, rstd, weight, None, (*needed, False))


@stating(KERNELS, aten.native_batch_norm.default)
def native_batch_norm(input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    """Statistics [c] in the type that sums are kept in, in evaluation too unless cuDNN runs.

    `ATen/native/cuda/Normalization.cu`, `batch_norm_cuda`; cuDNN's conditions in `ATen/native/Normalization.cpp`,
    `_select_batch_norm_backend`. cuDNN keeps them in the weight's type, which then is that type.
    """
    half_by_half = input.dtype == torch.float16 and weight is not None and weight.dtype != torch.float32
    affine, tracked = weight is not None and bias is not None, mean is not None and var is not None
    by_cudnn = (
        torch.backends.cudnn.enabled
        and input.dim() >= 3
        and input.dtype != torch.bfloat16
        and affine
        and weight.dtype != torch.bfloat16
        and not half_by_half
        and (tracked or (training and mean is None and var is None))
    )
    kept = 0 if by_cudnn and not training else input.shape[1]
    statistics = [input.new_empty(kept, dtype=accumulate_type(input.dtype)) for _ in range(2)]
    return torch.empty_like(input), *statistics


@stating(KERNELS, aten.native_group_norm.default)
def native_group_norm(input: Any, *rest: Any) -> Any:
    """As on the host, but contiguous (`ATen/native/group_norm.cpp`)."""
    _, *statistics = cpu.native_group_norm(input, *rest)
    return input.new_empty(input.shape), *statistics


@stating(KERNELS, aten.native_group_norm_backward.default)
def native_group_norm_backward(gradient: Any, input: Any, *rest: Any) -> Any:
    """As on the host, but contiguous (`ATen/native/group_norm.cpp`)."""
    d_input, *others = cpu.native_group_norm_backward(gradient, input, *rest)
    return None if d_input is None else input.new_empty(input.shape), *others


KERNELS[aten.native_batch_norm_backward.default] = cpu.native_batch_norm_backward  # `Normalization.cu` says the same
LEFT_OUT |= dict.fromkeys(
    (aten.native_batch_norm.default, aten.native_batch_norm_backward.default),
    "workspace and reserve of cuDNN's batch norm",
)
LEFT_OUT |= dict.fromkeys(
    (aten.native_group_norm.default, aten.native_group_norm_backward.default),
    "numbers for each sample and channel in group normalisation",
)


# -- convolution -------------------------------------------------------------------------------------------------------


@stating(KERNELS, aten.convolution.default)
def convolution(input: Any, weight: Any, *rest: Any) -> Any:
    """As on the host, but contiguous in double precision (`ConvUtils.h`, `cudnn_conv_suggest_memory_format`)."""
    if torch.float64 in (input.dtype, weight.dtype):
        return aten.convolution.default(input, weight, *rest)
    return cpu_pictures.convolution(input, weight, *rest)


# -- softmax and losses ------------------------------------------------------------------------------------------------


def _softmax(function: Function, op: Any) -> None:
    def run(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
        """Half to single precision in one kernel, without a copy; others are composed (`ATen/native/SoftMax.cpp`)."""
        if input.dtype == torch.float16 and dtype == torch.float32:
            return op(input, dim, True)
        return function(input, dim, dtype=dtype)

    FUNCTIONS[function] = run


for _function, _op in (
    (torch.softmax, aten._softmax.default),
    (torch.Tensor.softmax, aten._softmax.default),
    (torch.log_softmax, aten._log_softmax.default),
    (torch.Tensor.log_softmax, aten._log_softmax.default),
):
    _softmax(_function, _op)


@stating(KERNELS, aten._softmax.default, aten._log_softmax.default)
def softmax(input: Any, dim: int, half_to_float: bool) -> Any:
    """Contiguous (`ATen/native/SoftMax.cpp`, `TORCH_META_FUNC(_softmax)`)."""
    return input.new_empty(input.shape, dtype=torch.float32 if half_to_float else input.dtype)


@stating(SCRATCH, aten._softmax.default, aten._log_softmax.default)
def softmax_scratch(input: Any, *rest: Any) -> list[int]:
    """The kernel reads contiguous memory (`ATen/native/cuda/SoftMax.cu`, `host_softmax`)."""
    return copies(input)


@stating(SCRATCH, aten._softmax_backward_data.default)
def softmax_backward_scratch(gradient: Any, output: Any, *rest: Any) -> list[int]:
    """Incoming gradient times output, as a tensor (`ATen/native/cuda/SoftMax.cu`, `softmax_backward_cuda_out`)."""
    return [output.numel() * output.element_size(), *copies(output)]


@stating(SCRATCH, aten._log_softmax_backward_data.default)
def log_softmax_backward_scratch(gradient: Any, output: Any, *rest: Any) -> list[int]:
    """As in the forward pass (`ATen/native/cuda/SoftMax.cu`, `host_softmax_backward`)."""
    return copies(gradient, output)


_NOT_OF_A_DEVICE: Final = (
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.pow.Scalar),
    *(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default),
    *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default),
    *(aten.im2col.default, aten.col2im.default, aten._grouped_mm.default),
    *cpu.FUSED_STEPS,
    *cpu.RANGES_OUT,
    *cpu.SCATTERED,
)
"""Ops whose rule for the CPU follows code that all devices share (`SoftMax.cpp`, `Pow.cpp`, `Loss.cpp`,
`GroupedMMUtils.h`), and the binary cross-entropy and unfolding, of which `ATen/native/cuda/Loss.cu`, `Im2Col.cu` and
`Col2Im.cu` say the same."""

KERNELS |= {op: cpu.KERNELS[op] for op in _NOT_OF_A_DEVICE}
FUNCTIONS[torch._C._nn.mish] = cpu.mish  # one kernel on every device, `ATen/native/Activation.cpp`


@stating(FUNCTIONS, F.one_hot)
def one_hot(input: Any, num_classes: int = -1) -> Any:
    """Scattered into zeros, the range unchecked (`ATen/native/Onehot.cpp`); meta compares with a range of numbers."""
    if num_classes <= 0 or input.numel() == 0:
        return F.one_hot(input, num_classes)
    ones = torch.zeros(*input.shape, num_classes, dtype=torch.int64, device=input.device)
    return ones.scatter_(-1, input.unsqueeze(-1), 1)


@stating(SCRATCH, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def reduced_loss_scratch(input: Any, target: Any, reduction: int = 1, *rest: Any) -> list[int]:
    """The loss of each number, before it is reduced (`ATen/native/Loss.cpp`)."""
    return [(input - target).numel() * input.element_size()] if reduction else []


@stating(SCRATCH, aten.logsumexp.default)
def logsumexp_scratch(input: Any, over: Any, keepdim: bool = False) -> list[int]:
    """The maxima and, for a moment, whether they are infinite; the numbers less these (`ATen/native/ReduceOps.cpp`)."""
    maxima = torch.amax(input, over, True)
    n, nbytes = maxima.numel(), maxima.numel() * maxima.element_size()
    less = [input.numel() * input.element_size(), *cuda_reduction.sum_scratch(input, over)]
    return [nbytes, nbytes, n, -n, -nbytes, *less]


@stating(KERNELS, aten.log_sigmoid_forward.default)
def log_sigmoid(input: Any) -> Any:
    """Without the CPU's buffer (`ATen/native/cuda/Activation.cpp`, `log_sigmoid_forward_cuda`)."""
    return torch.empty_like(input), input.new_empty(0)


# -- indices -----------------------------------------------------------------------------------------------------------


@stating(SCRATCH, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put_scratch(self: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> list[int]:
    """Where values are summed up: the places as single numbers, sorted, beside their numbers before and after.

    `ATen/native/cuda/Indexing.cu`, `computeLinearIndex` and `index_put_with_sort_kernel`, which reads one value after
    another: of values with gaps or repeated ones there is a copy.
    """
    given = [index for index in indices if index is not None]
    if not accumulate or not self.numel() or any(index.dtype != torch.int64 for index in given):
        return []
    n = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    sort = cuda_sort.radix_sort_pairs(n, 8, cuda_sort.bits_of((self.numel() - 1) // _slice(self, indices))) if n else 0
    each = math.prod(size for size, index in zip_longest(self.shape, indices) if index is None)
    copied = [n * each * self.element_size()] if not values.is_contiguous() or values.numel() < n * each else []
    n *= 8
    wrapped_and_scaled = [n, n, -n]
    return [*wrapped_and_scaled, *(len(given) - 1) * [*wrapped_and_scaled, -n], *copied, n, n, n, sort, -sort]


def _slice(self: Any, indices: Any) -> int:
    """Elements behind each place: of what follows the indexed dimensions, once these lie side by side in front or not
    (`ATen/native/IndexingUtils.h`, `hasContiguousSubspace`)."""
    indexed = [i for i, index in enumerate(indices) if index is not None]
    if indexed[-1] - indexed[0] == len(indexed) - 1:
        return math.prod(self.shape[indexed[-1] + 1 :])
    return math.prod(size for i, size in enumerate(self.shape) if i not in indexed)


@stating(SCRATCH, aten.embedding_dense_backward.default)
def embedding_dense_backward_scratch(
    gradient: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> list[int]:
    """Up to 3,072 tokens are summed up as they come; more are sorted, beside their numbers before and after.

    `ATen/native/cuda/Embedding.cu`, `embedding_dense_backward_cuda`: it sorts by all bits. What follows on the sort, in
    `EmbeddingBackwardKernel.cu`, depends on the tokens' values.
    """
    made = copies(indices, gradient)
    if indices.numel() <= 3072 and not scale_grad_by_freq:
        return made
    itemsize = indices.element_size()
    n, sort = indices.numel() * itemsize, cuda_sort.radix_sort_pairs(indices.numel(), itemsize, 8 * itemsize)
    return [*made, n, n, n, sort, -sort, -n, *([n] if scale_grad_by_freq else [])]


LEFT_OUT[aten.embedding_dense_backward.default] = "partial sums of an embedding's gradient behind its sort"


# -- norms of many tensors ---------------------------------------------------------------------------------------------


@stating(SCRATCH, aten._foreach_norm.Scalar)
def foreach_norm_scratch(tensors: Any, order: float = 2, dtype: torch.dtype | None = None) -> list[int]:
    """A number for each 65,536 elements of the largest tensor, for every tensor: they are summed up in a second kernel.

    `ATen/native/cuda/ForeachReduceOp.cu`, `foreach_tensor_norm_cuda`. Tensors with gaps, and other norms, are taken one
    by one.
    """
    if order not in (1, 2, math.inf) or not all(is_dense(t) and t.is_floating_point() for t in tensors):
        return []
    chunks = max(-(-t.numel() // 65_536) for t in tensors)
    return [len(tensors) * chunks * accumulate_type(dtype or tensors[0].dtype).itemsize]


SCRATCH_FIRST: Final = frozenset(
    {
        *(aten._foreach_norm.Scalar, aten.native_layer_norm.default, aten._fused_rms_norm.default),
        *(aten.huber_loss.default, aten.median.default, aten.nanmedian.default, aten._pack_padded_sequence.default),
        aten.logsumexp.default,
    }
)
"""Their kernels take it before they make their results (the files named with each)."""


COMPOSED: Final = frozenset(
    {
        *(aten.binary_cross_entropy_with_logits.default, aten.dist.default, aten.isinf.default),
        aten.affine_grid_generator.default,
    }
)
"""Ops that one function of C++ composes for all devices, below autograd (`CompositeExplicitAutograd` in
`ATen/native/native_functions.yaml`), and which make tensors on the way that they give back."""


# -- what is known and not derived -------------------------------------------------------------------------------------

LEFT_OUT[aten._grouped_mm.default] = "workspace of products of groups"
LEFT_OUT |= dict.fromkeys(
    (aten.convolution.default, aten.convolution_backward.default), "workspace of cuDNN's convolution"
)
LEFT_OUT |= dict.fromkeys(
    (
        *(aten.argmax.default, aten.argmin.default, aten.var.correction, aten.std.correction, aten.var_mean.correction),
        *(aten.any.default, aten.any.dim, aten.all.default, aten.all.dim),
    ),
    "partial results of reductions that take several blocks",
)

LEFT_OUT[aten.soft_margin_loss_backward.default] = "what the gradient of the soft margin loss makes on its way"

FUNCTIONS[torch.ctc_loss] = cpu.ctc_loss
KERNELS |= {op: cpu.KERNELS[op] for op in (aten._ctc_loss.default, aten._ctc_loss_backward.default)}
LEFT_OUT |= dict.fromkeys(
    (aten._ctc_loss.default, aten._ctc_loss_backward.default), "lengths of the CTC loss, and its paths from the end"
)

_SOLVED: Final = (
    *("linalg_cholesky_ex", "linalg_eig", "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex"),
    *("linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp"),
    *("linalg_qr", "linalg_solve_triangular", "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet"),
    *("_linalg_solve_ex", "_linalg_svd", "cholesky", "cholesky_inverse", "_cholesky_solve_helper", "geqrf", "ormqr"),
    "triangular_solve",
)
"""Those that a version of PyTorch does not have (`cholesky` is gone from 2.14 on) cannot be called under it."""
NOT_COVERED: Final = {
    **{getattr(aten, name).default: f"{name} by cuSOLVER, MAGMA or cuBLAS" for name in _SOLVED if hasattr(aten, name)},
    **{getattr(aten, name).default: f"{name} by cuFFT" for name in ("_fft_c2c", "_fft_c2r", "_fft_r2c")},
    torch.lstm_cell: "the fused LSTM cell",
    torch.gru_cell: "the fused GRU cell",
    torch._native_multi_head_attention: "the fused attention of nn.MultiheadAttention in evaluation",
    torch._transformer_encoder_layer_fwd: "the fused encoder layer in evaluation",
}
"""Function or op -> its name, where CUDA has kernels and workspaces of its own that no rule states."""


# -- common to several -------------------------------------------------------------------------------------------------


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which CUDA kernels sum numbers of a type (`ATen/AccumulateType.h`)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def copies(*tensors: Any) -> list[int]:
    """Bytes of the contiguous copies that a kernel makes of those operands that are not."""
    return [t.numel() * t.element_size() for t in tensors if not t.is_contiguous()]


RULES: Final = Rules(
    name="cuda",
    device=torch.device("cuda:0"),
    kernels={**KERNELS, **cuda_dropout.KERNELS, **cuda_rnn.KERNELS, **cuda_attention.KERNELS},
    functions={**FUNCTIONS, **cuda_dropout.FUNCTIONS, **cuda_rnn.FUNCTIONS, **cuda_attention.FUNCTIONS},
    reads={torch.ctc_loss: (2, 3)},
    scratch={**SCRATCH, **cuda_reduction.SCRATCH, **cuda_sort.SCRATCH, **cuda_rnn.SCRATCH, **cuda_attention.SCRATCH},
    scratch_first=SCRATCH_FIRST,
    remarks={**cuda_rnn.REMARKS, **cuda_attention.REMARKS},
    left_out={**LEFT_OUT, **cuda_sort.LEFT_OUT, **cuda_rnn.LEFT_OUT, **cuda_attention.LEFT_OUT},
    composed=COMPOSED,
    not_covered={**NOT_COVERED, **cuda_rnn.NOT_COVERED},
    autocast=autocast.CUDA,
)
