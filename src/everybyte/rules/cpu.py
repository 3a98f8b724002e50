"""What CPU kernels return and keep where the meta device shows something else.

Two tables, one line of lookup each in the tracer: `KERNELS` for ops whose CPU kernel returns other storages than the
meta kernel, and `FUNCTIONS` for composite functions that choose their path by device before any op is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

aten: Final = torch.ops.aten
Function = Callable[..., Any]

KERNELS: Final[dict[Any, Function]] = {}
"""Op -> a function of the same arguments that returns, on the meta device, what the CPU kernel returns."""

FUNCTIONS: Final[dict[Any, Function]] = {}
"""Function of torch's Python face -> a function of the same arguments that takes the path it takes on CPU."""

NOT_REPRODUCED: Final = frozenset({torch.gru, torch.rnn_tanh, torch.rnn_relu})
"""Functions whose CPU path differs from the one traced, and is not reproduced yet."""


def _rule(table: dict[Any, Function], *names: Any) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        table.update(dict.fromkeys(names, function))
        return function

    return register


# -- attention ---------------------------------------------------------------------------------------------------------


@_rule(FUNCTIONS, F.scaled_dot_product_attention)
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
    """Attention by the fused CPU kernel where it applies; meta always takes the path with explicit scores.

    The fused kernel keeps its output and a log-sum-exp for each query instead of the scores
    (`ATen/native/transformers/attention.cpp`, `scaled_dot_product_attention`).
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if _attention_choice(query, key, value, attn_mask, dropout_p, is_causal, options) != SDPBackend.FLASH_ATTENTION:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(
            attn_mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        )
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def _attention_choice(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, options: Any) -> Any:
    """The CPU's own choice, asked on small stand-ins (`ATen/native/transformers/sdp_utils_cpp.cpp`).

    It depends on dtypes, on which sizes are equal, on layout and on who needs a gradient, never on how large the sizes
    are; so tensors with small sizes, equal where the real ones are equal, get the same answer.
    """
    tensors = (query, key, value, mask)
    sizes = sorted({n for t in tensors if t is not None for n in t.shape if n > 1})
    small = {n: i + 2 for i, n in enumerate(sizes)} | {0: 0, 1: 1}

    def stand_in(tensor: Any) -> Any:
        if tensor is None:
            return None
        made = torch.zeros([small[n] for n in tensor.shape], dtype=tensor.dtype, device="cpu")
        if tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
        return made.requires_grad_(tensor.requires_grad) if made.is_floating_point() else made

    with torch._C._DisableTorchDispatch():
        chosen = torch._fused_sdp_choice(*(stand_in(t) for t in tensors), dropout, causal, **options)
    return SDPBackend(chosen)


# -- recurrent layers --------------------------------------------------------------------------------------------------


@_rule(FUNCTIONS, torch.lstm)
def lstm(input: Any, *rest: Any) -> Any:
    """An LSTM as oneDNN runs it, one call a layer and direction (`ATen/native/mkldnn/RNN.cpp`, `mkldnn_rnn`).

    It needs oneDNN, single precision and no projection; else the cells run one by one, as they do on meta.
    """
    packed = not isinstance(rest[0], (tuple, list))
    if packed or not torch.backends.mkldnn.is_available() or input.dtype != torch.float32 or input.numel() == 0:
        return torch.lstm(input, *rest)
    (hx, cx), weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    hidden = hx.shape[-1]
    if per_layer not in (2, 4) or weights[1].shape[-1] != weights[0].shape[0] // 4:
        return torch.lstm(input, *rest)
    layer_input = (input.transpose(0, 1) if batch_first else input).contiguous()
    hx, cx = hx.contiguous(), cx.contiguous()
    outputs, last_h, last_c = [None] * directions, [], []
    for layer in range(num_layers):
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * per_layer : (index + 1) * per_layer]
            biases = own[2:] if has_biases else [torch.zeros_like(own[0]), torch.zeros_like(own[1])]
            outputs[direction], h, c, _ = torch.mkldnn_rnn_layer(
                layer_input, *own[:2], *biases, hx[index], cx[index], direction > 0, [], _LSTM, hidden, num_layers,
                has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            last_h.append(h)
            last_c.append(c)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, torch.stack(last_h, 0), torch.stack(last_c, 0)


_LSTM: Final = 2  # `torch/csrc/api/include/torch/nn/options/rnn.h`


@_rule(KERNELS, aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(input: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, hx: Any, cx: Any, *rest: Any) -> Any:
    """One layer and direction: [s, b, w] -> output [s, b, h], last h and c [b, h], oneDNN's workspace for backward."""
    (s, b, width), h = input.shape, hx.shape[-1]
    keeps = torch.is_grad_enabled()
    workspace = torch.empty(lstm_workspace(s, b, width, h), dtype=torch.uint8, device="meta") if keeps else None
    return input.new_empty(s, b, h), torch.empty_like(hx), torch.empty_like(cx), workspace


@cache
def lstm_workspace(s: int, b: int, width: int, h: int) -> int:
    """Bytes of oneDNN's workspace for one LSTM layer and direction, single precision.

    How oneDNN lays it out is its own affair and depends on the processor; so the library of this machine is asked, by
    running the layer once on zeros.

    Args:
        s, b: Steps and samples.
        width, h: Sizes of the input and of the hidden state.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.enable_grad():

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, device="cpu")

        *_, workspace = torch.mkldnn_rnn_layer(
            zeros(s, b, width), zeros(4 * h, width), zeros(4 * h, h), zeros(4 * h), zeros(4 * h),
            zeros(b, h), zeros(b, h), False, [], _LSTM, h, 1, True, False, False, True,
        )  # fmt: skip
        return workspace.numel()


# -- kernels whose outputs differ --------------------------------------------------------------------------------------


@_rule(KERNELS, aten.native_layer_norm.default)
def native_layer_norm(input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Statistics in the input's dtype, in single precision where the weight's differs: `ATen/native/layer_norm.cpp`."""
    out, mean, rstd = aten.native_layer_norm.default(input, shape, weight, bias, eps)
    dtype = torch.float32 if weight is not None and weight.dtype != input.dtype else input.dtype
    return out, mean.to(dtype), rstd.to(dtype)


@_rule(KERNELS, aten.mse_loss.default, aten.smooth_l1_loss.default)
def reduced_loss(input: Any, target: Any, reduction: int = 1, *rest: Any) -> Any:
    """The reduced loss sits in the storage that was made for the unreduced one (`ATen/native/Loss.cpp`)."""
    out = torch.empty(torch.broadcast_shapes(input.shape, target.shape), dtype=input.dtype, device="meta")
    return out if reduction == 0 else out.resize_(())


@_rule(KERNELS, aten._embedding_bag.default)
def embedding_bag(weight: Any, indices: Any, offsets: Any, *rest: Any, **options: Any) -> Any:
    """The CPU kernel keeps one index more, and a copy of the bag sizes (`ATen/native/EmbeddingBag.cpp`)."""
    out, offset2bag, bag_size, max_indices = aten._embedding_bag.default(weight, indices, offsets, *rest, **options)
    mode = rest[1] if len(rest) > 1 else options.get("mode", 0)
    if mode == 2:
        return out, offset2bag, bag_size, max_indices
    return (
        out,
        indices.new_empty(indices.shape[0] + 1).narrow(0, 0, indices.shape[0]),
        bag_size,
        torch.empty_like(bag_size),
    )


# -- paths that need a real device -------------------------------------------------------------------------------------


@contextmanager
def in_force() -> Iterator[None]:
    """Switches off, while the block lasts, the transformer layers' kernel for inference, which meta does not have."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
