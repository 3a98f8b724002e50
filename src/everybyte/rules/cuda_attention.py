"""Attention on CUDA: which kernel `F.scaled_dot_product_attention` takes, and what each keeps.

Shapes: query [b, a, s, d], key and value [b, a_kv, t, d]. Three fused kernels keep their output and a log-sum-exp for
each query instead of the scores [b, a, s, t]; where none of them takes the call, the scores are made, in fp32.

The order is PyTorch's (`ATen/native/transformers/cuda/sdp_utils.cpp`, `select_sdp_backend`): flash, memory-efficient,
composed. On Hopper and on Blackwell's large chips cuDNN's kernel comes first (`check_prefer_cudnn_attention`), as with
the wheels for CUDA 13; on others it is taken where `torch.nn.attention.sdpa_kernel` asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from .. import gpus
from ..units import format_bytes, round_up
from .base import Function, stating
from .cuda_dropout import dropout
from .dtypes import check_attention

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {}
FUNCTIONS: Final[dict[Any, Function]] = {}
SCRATCH: Final[dict[Any, Function]] = {}
REMARKS: Final[dict[Any, Function]] = {}
LEFT_OUT: Final[dict[Any, str]] = {}

_HALVES: Final = (torch.float16, torch.bfloat16)
_BY_DEFAULT: Final = tuple(torch._C._get_sdp_priority_order())
_SHARED: Final = torch.__version__ >= (2, 14)
"""Whether a single head of keys and values serves all of the query's, and the memory-efficient kernel takes groups.

pytorch/pytorch#191085; the 2.14.1 package holds it, those of 2.11 and 2.13 do not.
"""


# -- the choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of `scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    mask: Any
    dropout: float
    causal: bool
    grouped: bool

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.query, self.key, self.value

    @property
    def learns(self) -> bool:
        return torch.is_grad_enabled() and any(operand.requires_grad for operand in self.operands)

    def backend(self) -> SDPBackend:
        """The first kernel in order of priority that takes the call.

        Raises:
            RuntimeError: If none does, as in a real run.
        """
        order = torch._C._get_sdp_priority_order()
        if gpus.followed().capability[0] in (9, 10) and tuple(order) == _BY_DEFAULT:
            order = [int(SDPBackend.CUDNN_ATTENTION), *order]
        for backend in map(SDPBackend, order):
            if backend in _REFUSES and _REFUSES[backend](self) is None:
                return backend
        raise RuntimeError(f"No available kernel. Aborting execution. {self.refusals()}")

    def refusals(self) -> str:
        """Why the fused kernels do not take the call."""
        reasons = {name: _REFUSES[backend](self) for name, backend in _FUSED.items()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def _refuses_any(call: _Call) -> str | None:
    """What every fused kernel refuses (`sdp_utils_cpp.h`, `check_tensor_shapes` and those after it)."""
    q, k, v = call.operands
    if {4} != {t.dim() for t in call.operands}:
        return "query, key and value need 4 dimensions"
    if len({t.dtype for t in call.operands}) > 1:
        return "query, key and value need one dtype"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "query, key and value need one batch size"
    if 0 in (q.shape[2], k.shape[2]):
        return "a sequence is empty"
    if call.mask is not None and call.mask.stride(-1) != 1:
        return "the mask's last dimension is not contiguous"
    return None


def _refuses_heads(call: _Call, *, grouped: bool) -> str | None:
    """Heads must be as many, or divide where grouping is asked for (`check_batch_size_and_num_heads_dense`)."""
    q, k, v = (t.shape[1] for t in call.operands)
    if _SHARED and k == v == 1 <= q:
        return None
    if grouped and call.grouped:
        return None if k == v and q % k == 0 else "key and value need as many heads, a divisor of the query's"
    if not q == k == v:
        return f"key and value need as many heads as the query{'' if grouped else ', grouped or not'}"
    return None


def _refuses_strides(call: _Call, *, single: bool) -> str | None:
    if all(t.stride(-1) == 1 for t in call.operands) or (single and call.query.shape[-1] == 1):
        return None
    return "the last dimension is not contiguous"


def _flash(call: _Call) -> str | None:
    """`sdp_utils.cpp`, `can_use_flash_attention`."""
    q, k, v = call.operands
    gpu = gpus.followed()
    if not torch._C._get_flash_sdp_enabled():
        return "switched off"
    if gpu.capability < (8, 0):
        return _too_old(gpu)
    if call.mask is not None:
        return "it takes no mask"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256:
        return "query, key and value need one head dimension of at most 256"
    if q.dtype not in _HALVES:
        return f"it takes fp16 and bf16, not {q.dtype}"
    small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
    if small and call.learns and q.shape[-1] > 192 and (q.shape[-1] <= 224 or call.dropout):
        return f"it does not train head dimensions above 192 on a GPU of compute capability {_written(gpu)}"
    if call.causal and q.shape[2:3] != k.shape[2:3]:
        return "is_causal needs a square of scores"
    return _refuses_any(call) or _refuses_heads(call, grouped=True) or _refuses_strides(call, single=True)


def _efficient(call: _Call) -> str | None:
    """`sdp_utils.cpp`, `can_use_mem_efficient_attention`."""
    q, k, v = call.operands
    gpu = gpus.followed()
    alignment = _alignment(q.dtype, gpu)
    if not torch._C._get_mem_efficient_sdp_enabled():
        return "switched off"
    if q.dtype == torch.bfloat16 and gpu.capability < (8, 0):
        return f"it takes bf16 from compute capability 8.0 on, and this GPU has {_written(gpu)}"
    if q.dtype not in (*_HALVES, torch.float32):
        return f"it takes fp16, bf16 and fp32, not {q.dtype}"
    if q.shape[-1] != k.shape[-1] or any(not d or d % alignment for d in (q.shape[-1], v.shape[-1])):
        return f"head dimensions need to be multiples of {alignment}"
    return _refuses_any(call) or _refuses_heads(call, grouped=_SHARED) or _refuses_strides(call, single=False)


def _cudnn(call: _Call) -> str | None:
    """`sdp_utils.cpp`, `can_use_cudnn_attention`."""
    q, k, v = call.operands
    gpu = gpus.followed()
    if not torch._C._get_cudnn_sdp_enabled():
        return "switched off"
    if gpu.capability < (8, 0):
        return _too_old(gpu)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "it is not deterministic"
    if q.dtype not in _HALVES:
        return f"it takes fp16 and bf16, not {q.dtype}"
    if call.dropout * 16 % 1:
        return "it takes dropout in sixteenths"
    if any(d > 128 or d % 8 for d in (q.shape[-1], v.shape[-1])):
        return "head dimensions need to be multiples of 8, at most 128"
    if k.shape[-2] == 1 or (call.dropout and q.shape[-2] == 1):
        return "it takes no sequence of length 1"
    if call.mask is not None and (call.mask.requires_grad or call.mask.dim() not in (2, 4)):
        return "it takes masks of 2 or 4 dimensions that do not learn"
    return _refuses_any(call) or _refuses_heads(call, grouped=True) or _refuses_strides(call, single=True)


def _alignment(dtype: torch.dtype, gpu: gpus.GPU) -> int:
    """What head dimensions must be multiples of for the memory-efficient kernel (`minimum_gemm_alignment`)."""
    if gpu.capability >= (8, 0) or (gpu.capability >= (7, 0) and dtype in _HALVES):
        return 8 if dtype in _HALVES else 4
    return 1


def _too_old(gpu: gpus.GPU) -> str:
    return f"it needs compute capability 8.0, and this GPU has {_written(gpu)}"


def _written(gpu: gpus.GPU) -> str:
    return "{}.{}".format(*gpu.capability)


def _composed(call: _Call) -> str | None:
    return None if torch._C._get_math_sdp_enabled() else "switched off"


_REFUSES: Final = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.MATH: _composed,
}
_FUSED: Final = {"flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}


def takes(backend: SDPBackend, params: Any) -> bool:
    """Whether a kernel takes a call, as `torch.backends.cuda.can_use_flash_attention` and the like are asked."""
    operands = (params.query, params.key, params.value, params.attn_mask, params.dropout)
    return _REFUSES[backend](_Call(*operands, params.is_causal, params.enable_gqa)) is None


# -- the call ----------------------------------------------------------------------------------------------------------


@stating(FUNCTIONS, F.scaled_dot_product_attention)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by the kernel that CUDA takes (`ATen/native/transformers/attention.cpp`, the function of this name)."""
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2 or (attn_mask is not None and is_causal):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)  # raises
    check_attention(query, key, value, attn_mask)
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    scale = scale or 1 / math.sqrt(query.shape[-1])
    match call.backend():
        case SDPBackend.FLASH_ATTENTION:
            padded = [_padded(operand, 8) for operand in call.operands]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., : query.shape[-1]] if out.shape[-1] != query.shape[-1] else out
        case SDPBackend.EFFICIENT_ATTENTION:
            mask = _aligned_mask(_additive(attn_mask, query.dtype), query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, call.learns, dropout_p, is_causal, scale=scale
            )[0]
        case SDPBackend.CUDNN_ATTENTION:
            mask = _additive(attn_mask, query.dtype)
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.learns, dropout_p, is_causal, False, scale=scale
            )[0]
    return _with_scores(call, _additive(attn_mask, query.dtype), scale)


@stating(REMARKS, F.scaled_dot_product_attention)
def scores_remark(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Says that a call makes its scores, how large they are, and why."""
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if call.backend() != SDPBackend.MATH:
        return None
    scores = (*torch.broadcast_shapes(query.shape[:-2], *(() if enable_gqa else (key.shape[:-2],))), query.shape[-2])
    itemsize = 4 if _upcast(query.dtype) else query.element_size()
    nbytes = math.prod(scores) * key.shape[-2] * itemsize
    return (
        f"scaled_dot_product_attention makes the scores, {[*scores, key.shape[-2]]}, {format_bytes(nbytes)} each time "
        f"they are held; {call.refusals()}"
    )


def _padded(tensor: Any, multiple: int) -> Any:
    """Zeros up to a multiple in the last dimension (`attention.cpp`, `pad_last_dim`)."""
    rest = -tensor.shape[-1] % multiple
    return aten.constant_pad_nd(tensor, [0, rest]) if rest else tensor


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as numbers to add (`attention.cpp`, `convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned_mask(mask: Any, query: Any, key: Any) -> Any:
    """Strides of multiples of 8, by a padded copy if need be, and expanded (`attention.cpp`, `preprocess_mask`)."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        size = mask.shape[-1]
        mask = aten.constant_pad_nd(mask, [0, 8 - size % 8])[..., :size]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _upcast(dtype: torch.dtype) -> bool:
    return dtype in _HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction()


def _with_scores(call: _Call, mask: Any, scale: float) -> Any:
    """Attention with its scores (`attention.cpp`, `_scaled_dot_product_attention_math`)."""
    # Names as in PyTorch's: what has a name lives until the function returns.
    query_acc, key_acc, value_acc = (t.to(torch.float32) if _upcast(t.dtype) else t for t in call.operands)
    root = math.sqrt(abs(scale))
    query = query_acc * math.copysign(root, scale)
    if call.causal:
        mask = torch.ones(query.shape[-2], key_acc.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, query.dtype)
    key_expanded, value_expanded = key_acc, value_acc
    if call.grouped and not query.shape[-3] == key_acc.shape[-3] == value_acc.shape[-3]:
        key_expanded = key_acc.repeat_interleave(query.shape[-3] // key_acc.shape[-3], -3)
        value_expanded = value_acc.repeat_interleave(query.shape[-3] // value_acc.shape[-3], -3)
    weights = torch.matmul(query, key_expanded.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if call.dropout > 0:
        weights = dropout(weights, call.dropout, True)
    converted = weights.to(call.query.dtype)  # a second result, which nobody asks for
    out = torch.matmul(weights, value_expanded).to(call.query.dtype)
    del converted
    return out


# -- flash -------------------------------------------------------------------------------------------------------------


@stating(KERNELS, aten._scaled_dot_product_flash_attention.default)
def flash_attention(query: Any, key: Any, value: Any, dropout: float = 0.0, *rest: Any, **options: Any) -> Any:
    """Output laid out as the query; log-sum-exp [b, a, s] in fp32; the generator's state, two numbers, and one unused.

    The last two are on the GPU, 16 B and 8 B, with dropout or without
    (`ATen/native/transformers/cuda/flash_attn/flash_api.cpp`, `mha_fwd`).
    """
    b, a, s, _ = query.shape
    state, unused = (torch.empty(size, dtype=torch.uint64, device="meta") for size in ((2,), ()))
    nothing = query.new_empty(0)
    lse = query.new_empty(b, a, s, dtype=torch.float32)
    return torch.empty_like(query), lse, None, None, s, key.shape[2], state, unused, nothing


@stating(SCRATCH, aten._scaled_dot_product_flash_attention.default)
def flash_attention_scratch(query: Any, key: Any, value: Any, dropout: float = 0.0, *rest: Any, **options: Any) -> Any:
    """Log-sum-exps and outputs of the parts of a split sequence, in fp32 (`flash_api.cpp`, `set_params_splitkv`)."""
    b, a, s, d = query.shape
    if s == 1 and a > key.shape[1] and not dropout:  # one query a group of heads (`mha_fwd`, `seqlenq_ngroups_swapped`)
        a, s = key.shape[1], a // key.shape[1]
    splits = (
        1
        if dropout
        else _splits(b * a * -(-s // 64), -(-key.shape[2] // (256 if d <= 64 else 128 if d <= 128 else 64)))
    )
    return [4 * splits * b * a * s, 4 * splits * b * a * s * _flash_width(d)] if splits > 1 else []


def _splits(rows: int, columns: int, most: int = 128) -> int:
    """Into how many parts a sequence of keys is split so that all processors work (`num_splits_heuristic`)."""
    at_once = 2 * gpus.followed().processors
    if rows >= 0.8 * at_once:
        return 1
    eligible = [
        n for n in range(1, min(most, at_once, columns) + 1) if n == 1 or -(-columns // n) != -(-columns // (n - 1))
    ]
    waves = {n: rows * n / at_once for n in eligible}
    efficiency = {n: wave / math.ceil(wave) for n, wave in waves.items()}
    best = max(efficiency.values())
    return next(n for n in eligible if efficiency[n] >= 0.85 * best)


def _flash_width(d: int) -> int:
    """The head dimension that the kernel works in."""
    d = round_up(d, 8)
    return round_up(d, 32 if d <= 128 else 64)


@stating(KERNELS, aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """Three gradients, each laid out as its operand (`flash_api.cpp`, `mha_bwd`)."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@stating(SCRATCH, aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward_scratch(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, *rest: Any, **options: Any
) -> list[int]:
    """Row sums and the query's gradient in fp32, s rounded up to 128 (`flash_api.cpp`, `mha_bwd`).

    Where heads are grouped, also the gradients of key and value for every head of the query. The kernel reads the
    incoming gradient and the output in the order [b, s, a, d] (`attention_backward.cu`, `_flash_attention_backward`).
    """
    b, a, s, d = query.shape
    rows = round_up(s, 128)
    made = [*_copies_bsad(gradient, out), 4 * b * a * rows, 4 * b * rows * a * _flash_width(d)]
    if key.shape[1] != a:
        made += 2 * [b * key.shape[2] * a * d * query.element_size()]
    return made


def _copies_bsad(*tensors: Any) -> list[int]:
    """Bytes of the copies in the order [b, s, a, d] of those operands [b, a, s, d] that are not in it."""
    return [t.numel() * t.element_size() for t in tensors if not t.transpose(1, 2).is_contiguous()]


# -- memory-efficient --------------------------------------------------------------------------------------------------


@stating(KERNELS, aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(query: Any, key: Any, value: Any, bias: Any, learns: bool, *rest: Any, **options: Any) -> Any:
    """Output in the order [b, s, a, d]; log-sum-exp in fp32, s rounded up to 32, if something learns.

    The generator's seed and offset stay on the host (`ATen/native/transformers/cuda/attention.cu`,
    `_efficient_attention_forward`, Note [Seed and Offset Device]).
    """
    b, a, s, _ = query.shape
    out = query.new_empty(b, s, a, value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(b, a, round_up(s, 32) if learns else 0, dtype=torch.float32)
    return out, lse, *(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))


@stating(SCRATCH, aten._scaled_dot_product_efficient_attention.default)
def efficient_attention_scratch(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> list[int]:
    """Halves whose head dimension exceeds 128 are summed up outside of registers, in fp32 (`kernel_forward.h`)."""
    b, a, s, d = query.shape
    if query.dtype in _HALVES and max(d, value.shape[-1]) > 128:
        return [4 * b * s * a * value.shape[-1]]
    return []


@stating(SCRATCH, aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward_scratch(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, *rest: Any, **options: Any
) -> list[int]:
    """Row sums [b, a, s] in fp32, by way of a product in fp32 where the kernel does not make them itself.

    `ATen/native/transformers/cuda/attention_backward.cu`, `_efficient_attention_backward`, and `kernel_backward.h`,
    `kKernelComputesDelta`: it does for halves, on compute capability 7.0 up to a head dimension of 128. Where heads are
    shared, the gradients of key and value first have as many as the query's; then each group's are summed.
    """
    b, a, s, d = query.shape
    sums = 4 * b * a * s
    computes = query.dtype in _HALVES and (gpus.followed().capability != (7, 0) or max(d, value.shape[-1]) <= 128)
    copies = [] if gradient.transpose(1, 2).is_contiguous() else [gradient.numel() * gradient.element_size()]
    if key.shape[1] != a:
        copies += [t.numel() // t.shape[1] * a * t.element_size() for t in (key, value)]
    if computes:
        return [*copies, sums]
    upcast = [4 * gradient.numel(), 4 * out.numel()] if query.dtype in _HALVES else []
    return [*copies, *upcast, 4 * out.numel(), sums, sums]


LEFT_OUT[aten._scaled_dot_product_efficient_attention_backward.default] = (
    "the workspace of memory-efficient attention's backward"
)


# -- cuDNN -------------------------------------------------------------------------------------------------------------


@stating(KERNELS, aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(query: Any, key: Any, value: Any, bias: Any, learns: bool, *rest: Any, **options: Any) -> Any:
    """Output laid out as the query; log-sum-exp [b, a, s, 1] in fp32 if something learns; seed and offset on the GPU.

    `ATen/native/cudnn/MHA.cpp`, `run_cudnn_SDP_fprop`, and `attention.cu`, `_cudnn_attention_forward`.
    """
    made = list(aten._scaled_dot_product_cudnn_attention.default(query, key, value, bias, learns, *rest, **options))
    if not learns:
        made[1] = query.new_empty(0, dtype=torch.float32)
    return tuple(made)


LEFT_OUT[aten._scaled_dot_product_cudnn_attention.default] = "the workspace of cuDNN's attention"
LEFT_OUT[aten._scaled_dot_product_cudnn_attention_backward.default] = "the workspace of cuDNN's attention"


# -- composed ----------------------------------------------------------------------------------------------------------


@stating(SCRATCH, aten._safe_softmax.default)
def safe_softmax_scratch(scores: Any, dim: int, dtype: Any = None) -> list[int]:
    """The plain softmax, where a score is -inf, which rows are so throughout, and two numbers.

    `ATen/native/transformers/attention.cpp`, `_safe_softmax`: a composite below autograd.
    """
    itemsize = scores.element_size() if dtype is None else dtype.itemsize
    rows = scores.numel() // max(scores.shape[dim], 1)
    return [scores.numel() * itemsize, itemsize, scores.numel(), rows, itemsize]
