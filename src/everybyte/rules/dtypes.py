"""Which arguments of a kernel must have one dtype: a real run ends where they do not, and the meta device goes on.

Each rule names the arguments by position; an argument that is left out does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

aten: Final = torch.ops.aten

_PUTS: Final = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)

ALIKE: Final[dict[Any, tuple[int, ...]]] = {
    # `ATen/native/LinearAlgebra.cpp`, `Blas.cpp`; `ATen/native/cuda/Blas.cpp`
    aten.mm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.bmm.default: (0, 1),  # the meta device's own check is not in 2.11
    aten.baddbmm.default: (0, 1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),  # `ATen/native/Convolution.cpp`, `check_input_same_type_as_parameters`
    **dict.fromkeys(_PUTS, (0, 2)),  # `ATen/native/TensorAdvancedIndexing.cpp`
    **dict.fromkeys((aten.put.default, aten.put_.default), (0, 2)),
    **dict.fromkeys((aten.index_add.default, aten.index_add_.default), (0, 3)),
    **dict.fromkeys((aten.index_copy.default, aten.index_copy_.default), (0, 3)),
    **dict.fromkeys((aten.index_reduce.default, aten.index_reduce_.default), (0, 3)),
    aten._embedding_bag.default: (0, 6),  # `ATen/native/EmbeddingBag.cpp`
    aten._embedding_bag_forward_only.default: (0, 6),
    aten.binary_cross_entropy.default: (0, 1),  # `ATen/native/Loss.cpp`
    aten.nll_loss_forward.default: (0, 2),  # `ATen/native/LossNLL.cpp`
    aten.nll_loss2d_forward.default: (0, 2),  # `ATen/native/LossNLL2d.cpp`
    aten.grid_sampler_2d.default: (0, 1),  # `ATen/native/GridSampler.cpp`
    aten.grid_sampler_3d.default: (0, 1),
    aten.linalg_cross.default: (0, 1),  # `ATen/native/Cross.cpp`
    aten._cdist_forward.default: (0, 1),  # `ATen/native/Distance.cpp`
}
"""Ops whose tensors at these positions have one dtype, on every device."""

_NORMS: Final = {aten.native_layer_norm.default: (0, 2, 3), aten.native_group_norm.default: (0, 1, 2)}
_BATCH_NORM: Final = {aten.native_batch_norm.default: (0, 1, 2, 3, 4)}


def checked(op: Any, kernel: Callable[..., Any], on_host: bool) -> Callable[..., Any]:
    """The kernel, behind the check that a device's own makes, if it makes one.

    Normalisations take half-precision input with parameters in single precision on the CPU
    (`ATen/native/cpu/mixed_data_type.h`), on CUDA the batch's alone (`ATen/native/cuda/Normalization.cu`).
    """
    if op.name().startswith("aten::quantize_per_"):
        return _unsaid
    mixes = {**_BATCH_NORM, **(_NORMS if on_host else {})}
    positions = mixes.get(op) or ALIKE.get(op) or _NORMS.get(op)
    if positions is None:
        return kernel

    def behind(*args: Any, **kwargs: Any) -> Any:
        if op in _PUTS and _fills_mask(*args[1:3]):
            return kernel(*args, **kwargs)
        tensors = [args[i] for i in positions if i < len(args) and isinstance(args[i], torch.Tensor)]
        first, *others = (tensor.dtype for tensor in tensors)
        parameters = {torch.float32} if op in mixes and first in (torch.float16, torch.bfloat16) else set()
        if any(dtype != first for dtype in others) and set(others) != parameters:
            raise RuntimeError(mismatch(op.name().split("::")[1].split(".")[0], *(tensor.dtype for tensor in tensors)))
        return kernel(*args, **kwargs)

    return behind


def _unsaid(*args: Any, **kwargs: Any) -> Any:
    """The meta device returns rounded numbers for a quantized tensor, which is one of integers."""
    raise NotImplementedError


def _fills_mask(indices: Any, value: torch.Tensor) -> bool:
    """Whether a put is a `masked_fill_` with a number (`TensorAdvancedIndexing.cpp`, `canDispatchToMaskedFill`)."""
    return value.numel() == 1 and all(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices)


def mismatch(name: str, *dtypes: torch.dtype) -> str:
    """What is said of tensors that should have one dtype."""
    named = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    return f"{name}: its tensors should have one dtype, but have {named}"


def check_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    """What `scaled_dot_product_attention` says before it chooses a kernel (`attention.cpp`, `validate_sdpa_input`).

    Raises:
        RuntimeError: If query, key and value, or query and an added mask, differ in dtype.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(mismatch("scaled_dot_product_attention", query.dtype, key.dtype, value.dtype))
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(mismatch("scaled_dot_product_attention: query and mask", query.dtype, mask.dtype))
