"""What CPU kernels return and keep where the meta device shows something else.

Two tables, one line of lookup each in the tracer: `KERNELS` for ops whose CPU kernel returns other storages than the
meta kernel, and `FUNCTIONS` for composite functions that choose their path by device before any op is seen.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from ..units import round_up
from . import asked, autocast, cpu_pictures, cpu_scratch
from .base import Function, Rules, stating
from .dtypes import check_attention
from .layout import iterated_strides

aten: Final = torch.ops.aten

KERNELS: Final[dict[Any, Function]] = {**cpu_pictures.KERNELS}
"""Op -> a function of the same arguments that returns, on the meta device, what the CPU kernel returns."""

FUNCTIONS: Final[dict[Any, Function]] = {**cpu_pictures.FUNCTIONS}
"""Function of torch's Python face -> a function of the same arguments that takes the path it takes on CPU."""


# -- attention ---------------------------------------------------------------------------------------------------------


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
    """Attention by the fused CPU kernel where it applies; meta always takes the path with explicit scores.

    The fused kernel keeps its output and a log-sum-exp for each query instead of the scores
    (`ATen/native/transformers/attention.cpp`, `scaled_dot_product_attention`).
    """
    check_attention(query, key, value, attn_mask)
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

    It depends on dtypes, on which sizes are equal, on layout, on who needs a gradient and on whether the keys' heads
    divide the queries', never on how large the other sizes are; so tensors with small sizes, equal where the real ones
    are equal, get the same answer.
    """
    tensors = (query, key, value, mask)
    sizes = sorted({n for t in tensors if t is not None for n in t.shape if n > 1})
    small = {n: i + 2 for i, n in enumerate(sizes)} | {0: 0, 1: 1}

    def stand_in(tensor: Any) -> Any:
        if tensor is None:
            return None
        heads = tensor.dim() - 3
        shape = [n if i == heads else small[n] for i, n in enumerate(tensor.shape)]
        made = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
        if tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
        return made.requires_grad_(tensor.requires_grad) if made.is_floating_point() else made

    with torch._C._DisableTorchDispatch():
        chosen = torch._fused_sdp_choice(*(stand_in(t) for t in tensors), dropout, causal, **options)
    return SDPBackend(chosen)


# -- recurrent layers --------------------------------------------------------------------------------------------------


@stating(FUNCTIONS, torch.lstm)
def lstm(input: Any, *rest: Any) -> Any:
    """An LSTM as oneDNN runs it, one call a layer and direction (`ATen/native/mkldnn/RNN.cpp`, `mkldnn_rnn`).

    oneDNN takes no projection and no double precision, and of packed sequences those of one length, from 2.13 on
    (`ATen/native/RNN.cpp`, `lstm`); the cells then run one by one.
    """
    is_packed = not isinstance(rest[0], (tuple, list))
    if is_packed:
        sizes, (hx, cx), weights, has_biases, num_layers, dropout, train, bidirectional = rest
        batch_first = False
    else:
        (hx, cx), weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    hidden, directions = hx.shape[-1], 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    by_cells = per_layer > (4 if has_biases else 2) or input.dtype not in _asked_dtypes() or input.numel() == 0
    if is_packed:
        steps, b = len(sizes), int(sizes[0])
        if by_cells or not _PACKED_AT_ONCE or input.shape[0] != steps * b:
            return torch.lstm(input, *rest)
        output, *states = lstm(input.view(steps, b, -1), *rest[1:], False)
        return output.view(steps * b, -1), *states
    if by_cells:
        return _layer_by_layer(_lstm_cell, input, list(zip(hx.unbind(0), cx.unbind(0), strict=True)), *rest[1:])
    layer_input = first_input = (input.transpose(0, 1) if batch_first else input).contiguous()  # held to the end
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
            del biases  # zeros made for the call end with it
            last_h.append(h)
            last_c.append(c)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    states = torch.stack(last_h, 0), torch.stack(last_c, 0)
    del first_input
    return output, *states


_LSTM: Final = 2  # `torch/csrc/api/include/torch/nn/options/rnn.h`


@cache
def _asked_dtypes() -> frozenset[torch.dtype]:
    """The dtypes in which oneDNN runs an LSTM on this processor (`ATen/native/RNN.cpp`, `use_mkldnn`)."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    halves = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset({torch.float32, *(dtype for dtype, is_supported in halves.items() if is_supported())})


@stating(KERNELS, aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(input: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, hx: Any, cx: Any, *rest: Any) -> Any:
    """One layer and direction: [s, b, w] -> output [s, b, h], last h and c [b, h], oneDNN's workspace for backward."""
    (s, b, width), h = input.shape, hx.shape[-1]
    workspace = None
    if torch.is_grad_enabled():
        workspace = torch.empty(lstm_workspace(s, b, width, h, input.dtype), dtype=torch.uint8, device="meta")
    return input.new_empty(s, b, h), torch.empty_like(hx), torch.empty_like(cx), workspace


@stating(KERNELS, aten.mkldnn_rnn_layer_backward.default)
def mkldnn_rnn_layer_backward(
    input: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, hx: Any, cx: Any, *rest: Any
) -> Any:
    """Gradients of the input, both weights, both biases (two copies of one) and both states, in single precision."""
    d_bias = (4 * hx.shape[-1],)
    shapes = (input.shape, w_ih.shape, w_hh.shape, d_bias, d_bias, hx.shape, cx.shape)
    return tuple(input.new_empty(shape, dtype=torch.float32) for shape in shapes)


@cache
def lstm_workspace(s: int, b: int, width: int, h: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of oneDNN's workspace for one LSTM layer and direction.

    How oneDNN lays it out is its own affair and depends on the processor; so the library of this machine is asked, by
    running the layer once on zeros.

    Args:
        s, b: Steps and samples.
        width, h: Sizes of the input and of the hidden state.
        dtype: Of all of them.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.enable_grad():

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device="cpu")

        *_, workspace = torch.mkldnn_rnn_layer(
            zeros(s, b, width), zeros(4 * h, width), zeros(4 * h, h), zeros(4 * h), zeros(4 * h),
            zeros(b, h), zeros(b, h), False, [], _LSTM, h, 1, True, False, False, True,
        )  # fmt: skip
        return workspace.numel()


def _layer_by_layer(
    cell: Function, input: Any, states: list[Any], weights: Any, has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """A recurrent network cell by cell, the input's product for all steps at once (`ATen/native/RNN.cpp`, `FullLayer`).

    Returns:
        The output and the stacked last states, one stack for each part of a state.
    """
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    layer_input, last = input.transpose(0, 1) if batch_first else input, []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * per_layer : (index + 1) * per_layer]
            of_input, of_state = (own[0:4:2], own[1:4:2]) if has_biases else (own[0:1], own[1:2])
            projection = own[4 if has_biases else 2 :]
            steps = F.linear(layer_input, *of_input).unbind(0)
            state, made = states[index], []
            for gates in steps[::-1] if direction else steps:
                state = cell(gates, state, of_state, *projection)
                made.append(state[0])
            last.append(state)
            outputs.append(torch.stack(made[::-1] if direction else made, 0))
            del steps, gates, made
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        del outputs
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, *(torch.stack(part, 0) for part in zip(*last, strict=True))


def _lstm_cell(gates: Any, state: Any, weights: Any, projection: Any = None) -> Any:
    h, c = state
    ingate, forget, new, outgate = F.linear(h, *weights).add_(gates).unsafe_chunk(4, 1)
    ingate, forget, new, outgate = ingate.sigmoid_(), forget.sigmoid_(), new.tanh_(), outgate.sigmoid_()
    c = (forget * c).add_(ingate * new)
    h = outgate * c.tanh()
    return (h if projection is None else h @ projection.t(), c)


def _gru_cell(gates: Any, state: Any, weights: Any) -> Any:
    (hidden,) = state
    i_reset, i_update, i_new = gates.unsafe_chunk(3, 1)
    h_reset, h_update, h_new = F.linear(hidden, *weights).unsafe_chunk(3, 1)
    reset = h_reset.add_(i_reset).sigmoid_()
    update = h_update.add_(i_update).sigmoid_()
    new = i_new.add(h_new.mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def _tanh_cell(gates: Any, state: Any, weights: Any) -> Any:
    return (torch.tanh(F.linear(state[0], *weights).add_(gates)),)


def _relu_cell(gates: Any, state: Any, weights: Any) -> Any:
    return (torch.relu(F.linear(state[0], *weights).add_(gates)),)


def _recurrent(function: Function, cell: Function) -> None:
    def run(input: Any, *rest: Any) -> Any:
        if not isinstance(rest[1], (tuple, list)):  # a packed sequence goes step by step on every device
            return function(input, *rest)
        return _layer_by_layer(cell, input, [(h,) for h in rest[0].unbind(0)], *rest[1:])

    FUNCTIONS[function] = run


for _function, _cell in ((torch.gru, _gru_cell), (torch.rnn_tanh, _tanh_cell), (torch.rnn_relu, _relu_cell)):
    _recurrent(_function, _cell)


REMARKS: Final[dict[Any, Function]] = {}
"""Function of torch's Python face -> a function of the same arguments: what the user should know of the call."""

_PACKED_AT_ONCE: Final = torch.__version__ >= (2, 13)
_PACKED: Final = (
    "packed sequences of several lengths: the products of the input are traced step by step, where a real run makes "
    "them at once"
)


@stating(REMARKS, torch.lstm)
def lstm_remark(input: Any, sizes: Any, *rest: Any) -> str | None:
    """Sequences of several lengths, packed, go by another form of the cells than on the host."""
    if not torch.is_tensor(sizes) or (_PACKED_AT_ONCE and input.shape[0] == len(sizes) * int(sizes[0])):
        return None
    return _PACKED if _PACKED_AT_ONCE else _PACKED.replace(" of several lengths", "")


@stating(REMARKS, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent_remark(input: Any, second: Any, third: Any, *rest: Any) -> str | None:
    """As for the LSTM; their sequences of one length, packed, go by it too."""
    return _PACKED.replace(" of several lengths", "") if torch.is_tensor(third) else None


# -- products of groups ------------------------------------------------------------------------------------------------


@stating(KERNELS, aten._grouped_mm.default)
def grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None) -> Any:
    """One product a group, of rows or of matrices; rows of the result begin at multiples of 16 bytes.

    `ATen/native/GroupedMMUtils.h`, `create_grouped_gemm_output_tensor`. Meta takes bf16 alone.
    """
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    pitch = round_up(columns * dtype.itemsize, 16) // dtype.itemsize
    if a.dim() != b.dim():
        return a.new_empty_strided((rows, columns), (pitch, 1), dtype=dtype)
    groups = offs.shape[0] if a.dim() == 2 else a.shape[0]
    return a.new_empty_strided((groups, rows, columns), (rows * pitch, pitch, 1), dtype=dtype)


# -- kernels whose outputs differ --------------------------------------------------------------------------------------


@stating(KERNELS, aten.native_layer_norm.default)
def native_layer_norm(input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Statistics in the input's dtype, in single precision where the weight's differs: `ATen/native/layer_norm.cpp`.

    The result has a contiguous tensor's strides even where sizes of one leave the choice.
    """
    out, mean, rstd = aten.native_layer_norm.default(input, shape, weight, bias, eps)
    dtype = torch.float32 if weight is not None and weight.dtype != input.dtype else input.dtype
    return out.new_empty(out.shape), mean.to(dtype), rstd.to(dtype)


@stating(KERNELS, aten.native_batch_norm.default)
def native_batch_norm(input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    """Statistics in training only, in single precision if the dtypes differ (`ATen/native/Normalization.cpp`)."""
    kept = input.shape[1] if training else 0
    mixed = any(t is not None and t.dtype != input.dtype for t in (weight, bias, mean, var))
    statistics = [input.new_empty(kept, dtype=torch.float32 if mixed else input.dtype) for _ in range(2)]
    return torch.empty_like(input, memory_format=_format_of_batch_norm(input)), *statistics


@stating(KERNELS, aten.native_group_norm.default)
def native_group_norm(input: Any, weight: Any, bias: Any, n: int, c: int, inner: int, groups: int, eps: float) -> Any:
    """Statistics in the input's dtype, in single precision where the weight's differs: `ATen/native/group_norm.cpp`."""
    like = weight if weight is not None else bias
    dtype = torch.float32 if like is not None and like.dtype != input.dtype else input.dtype
    statistics = [input.new_empty((n, groups), dtype=dtype) for _ in range(2)]
    return torch.empty_like(input, memory_format=suggest_memory_format(input)), *statistics


@stating(KERNELS, aten.native_group_norm_backward.default)
def native_group_norm_backward(gradient: Any, input: Any, mean: Any, rstd: Any, weight: Any, *rest: Any) -> Any:
    """Each in its own dtype, the weight's and the bias's in the weight's: `ATen/native/group_norm.cpp`."""
    _, channels, _, _, needed = rest
    like = weight if weight is not None else input
    d_input = torch.empty_like(input, memory_format=suggest_memory_format(input)) if needed[0] else None
    return d_input, *(like.new_empty(channels) if asked else None for asked in needed[1:])


@stating(
    KERNELS, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default
)
def loss_backward(gradient: Any, input: Any, target: Any, *rest: Any) -> Any:
    """Contiguous, whatever the prediction's layout (`ATen/native/Loss.cpp`)."""
    return torch.empty(torch.broadcast_shapes(input.shape, target.shape), dtype=input.dtype, device="meta")


@stating(KERNELS, aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(gradient: Any, input: Any, *rest: Any) -> Any:
    """Laid out as the prediction (`ATen/native/Loss.cpp`)."""
    return torch.empty_like(input)


@stating(KERNELS, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """Contiguous, whatever the incoming gradient's layout (`ATen/native/SoftMax.cpp`)."""
    return torch.empty(output.shape, dtype=dtype, device="meta")


@stating(KERNELS, aten.pow.Scalar)
def power_of_a_number(base: Any, exponent: Any) -> Any:
    """Contiguous, whatever the exponent's layout (`ATen/native/Pow.cpp`)."""
    return aten.pow.Scalar(base, exponent).contiguous()


@stating(KERNELS, aten.native_layer_norm_backward.default)
def native_layer_norm_backward(gradient: Any, input: Any, *rest: Any) -> Any:
    """The input's gradient is contiguous, whatever the incoming one's layout (`ATen/native/layer_norm.cpp`)."""
    return aten.native_layer_norm_backward.default(gradient.contiguous(), input.contiguous(), *rest)


@stating(KERNELS, aten.native_batch_norm_backward.default)
def native_batch_norm_backward(gradient: Any, input: Any, *rest: Any) -> Any:
    """The input's gradient has a standard layout, whatever the input's own (`ATen/native/Normalization.cpp`)."""
    d_input, d_weight, d_bias = aten.native_batch_norm_backward.default(gradient, input, *rest)
    d_input = None
    if rest[-1][0]:
        d_input = torch.empty_like(input, memory_format=_format_of_batch_norm(input))
    return d_input, d_weight, d_bias


def _format_of_batch_norm(input: Any) -> torch.memory_format:
    """As the input lies, if in a standard layout (`ATen/native/Normalization.cpp`, `suggest_memory_format_contig`)."""
    if not cpu_scratch.is_dense(input):
        return suggest_memory_format(input)
    last = torch.channels_last_3d if input.dim() == 5 else torch.channels_last
    return torch.contiguous_format if input.is_contiguous() else last


@stating(KERNELS, aten.binary_cross_entropy.default)
def binary_cross_entropy(input: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """As `reduced_loss`, with a weight."""
    return reduced_loss(input, target, reduction)


@stating(KERNELS, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default)
def reduced_loss(input: Any, target: Any, reduction: int = 1, *rest: Any) -> Any:
    """The reduced loss sits in the storage that was made for the unreduced one (`ATen/native/Loss.cpp`)."""
    unreduced = input - target
    return unreduced if reduction == 0 else torch.empty(unreduced.shape, dtype=input.dtype, device="meta").resize_(())


@stating(KERNELS, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Indices and their bags [n], one more at first, and not for plain sums; sizes of bags; for maxima their rows.

    `ATen/native/EmbeddingBag.cpp`, `make_offset2bag_out`, `make_bag_size_out` and `make_max_indices_out`.
    """
    (n,), bags, width = indices.shape, offsets.shape[0] - include_last_offset, weight.shape[1]
    plain = weight.dtype != torch.float64 and weight.stride(1) == 1 and (weights is None or weights.stride(0) == 1)
    if mode == 0 and plain and padding_idx < 0:
        offset2bag = offsets.new_empty(0)
    else:
        offset2bag = offsets.new_empty(n + 1).narrow(0, 0, n)
    rows = offsets.new_empty((bags, width) if mode == 2 else bags)
    return weight.new_empty(bags, width), offset2bag, offsets.new_empty(offsets.shape).narrow(0, 0, bags), rows


def _numbers_in(op: Any) -> None:
    def run(*args: Any, out: Any, **options: Any) -> Any:
        """A tensor of as many numbers keeps its shape (`ATen/native/RangeFactories.cpp`, `cuda/RangeFactories.cu`)."""
        made = op(*args, out=torch.empty(0, dtype=out.dtype, device="meta"), **options)
        return out if out.numel() == made.numel() else out.resize_(made.shape)

    KERNELS[op] = run


SCATTERED: Final = (
    *(aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default),
    aten.as_strided_scatter.default,
)


@stating(KERNELS, *SCATTERED)
def scattered(input: Any, *rest: Any, **options: Any) -> Any:
    """In a copy of the input's whole storage, not only of what it shows of it (`ATen/native/TensorShape.cpp`).

    See `clone_preserve_strides` there; where numbers are repeated, in a plain copy.
    """
    if any(stride == 0 and size > 1 for stride, size in zip(input.stride(), input.shape, strict=True)):
        return torch.empty_like(input)
    whole = input.new_empty(input.untyped_storage().nbytes() // input.element_size())
    return whole.as_strided(input.shape, input.stride(), input.storage_offset())


RANGES_OUT: Final = (aten.arange.start_out, aten.linspace.out, aten.logspace.out)
for _op in RANGES_OUT:
    _numbers_in(_op)


# -- composite on meta, a kernel on CPU --------------------------------------------------------------------------------


@stating(FUNCTIONS, F.one_hot)
def one_hot(input: Any, num_classes: int = -1) -> Any:
    """Checks the range, then scatters into zeros (`ATen/native/Onehot.cpp`); meta compares with a range of numbers."""
    if num_classes <= 0 or input.numel() == 0:
        return F.one_hot(input, num_classes)
    torch.aminmax(input)
    ones = torch.zeros(*input.shape, num_classes, dtype=torch.int64, device=input.device)
    return ones.scatter_(-1, input.unsqueeze(-1), 1)


class _Mish(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input: Any) -> Any:
        context.save_for_backward(input)
        return torch._C._nn.mish(input)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (input,) = context.saved_tensors
        return input.new_empty_strided(input.shape, iterated_strides(input.shape, (gradient, input)))


@stating(FUNCTIONS, torch._C._nn.mish)
def mish(input: Any) -> Any:
    """Mish with the one tensor that its gradient's kernel makes; meta composes it (`ATen/native/Activation.cpp`)."""
    return _Mish.apply(input)


@stating(FUNCTIONS, torch.ctc_loss)
def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """The loss with its lengths as plain numbers (`ATen/native/LossCTC.cpp`, `ctc_loss_impl`)."""
    steps, sizes = (
        lengths if isinstance(lengths, (list, tuple)) else [lengths] for lengths in (input_lengths, target_lengths)
    )
    batched = log_probs.dim() == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0) if targets.dim() == 1 else targets
    loss = torch._ctc_loss(log_probs, targets, steps, sizes, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros((), dtype=loss.dtype, device=loss.device), loss)
    if reduction == 1:
        lengths = torch.empty(len(sizes), dtype=loss.dtype, device=loss.device).clamp_min(1)
        return (loss / lengths).mean()
    if reduction == 2:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


@stating(KERNELS, aten._ctc_loss.default)
def ctc_loss_forward(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any) -> Any:
    """The loss of each sample, and the logarithms of its paths, [b, s, 2 x longest target + 1] (`LossCTC.cpp`)."""
    b = log_probs.shape[1]
    paths = (b, log_probs.shape[0], 2 * max(target_lengths, default=0) + 1)
    return log_probs.new_empty(b), log_probs.new_empty(paths)


@stating(KERNELS, aten._ctc_loss_backward.default)
def ctc_loss_backward(gradient: Any, log_probs: Any, *rest: Any) -> Any:
    """As the input lies (`ATen/native/LossCTC.cpp`)."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@stating(FUNCTIONS, torch.max_pool1d)
def max_pool1d(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Pooling without indices where no gradient needs them, of a contiguous copy (`ATen/native/MaxPooling.cpp`)."""
    if torch.is_grad_enabled() and input.requires_grad:
        return torch.max_pool1d(input, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():  # as one op, which it is there
        out = aten.max_pool1d.default(input, *args, **kwargs)
    input.contiguous()
    return out


# -- one kernel in evaluation ------------------------------------------------------------------------------------------


@stating(KERNELS, aten._native_multi_head_attention.default)
def native_multi_head_attention(query: Any, key: Any, value: Any, embed_dim: int, num_head: int, *rest: Any) -> Any:
    """[b, s, h] -> output and weights, if asked for; all else is scratch: `ATen/native/transformers/attention.cpp`."""
    need_weights, average = [*rest[5:7], True, True][:2]
    b, s, _ = query.shape
    shape = (b, s, key.shape[1]) if average else (b, num_head, s, key.shape[1])
    return query.new_empty(b, s, embed_dim), query.new_empty(shape) if need_weights else None


@stating(KERNELS, aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer(src: Any, *rest: Any) -> Any:
    """A whole layer in one kernel; all else is scratch (`ATen/native/transformers/transformer.cpp`)."""
    return torch.empty_like(src)


# -- optimizers --------------------------------------------------------------------------------------------------------


FUSED_STEPS: Final = (
    *(aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr, aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr),
    *(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr),
)


@stating(KERNELS, *FUSED_STEPS)
def fused_step(*args: Any, **kwargs: Any) -> None:
    """All in place, in one kernel (`ATen/native/FusedAdam.cpp`, `FusedSGD.cpp`, `FusedAdagrad.cpp`; on CUDA, too)."""


def _batch_norm_makes(gradient: Any, input: Any, *rest: Any) -> tuple[int, ...]:
    """The input's gradient last where it replaces another one (`ATen/native/Normalization.cpp`)."""
    return (1, 2, 0) if cpu_scratch.batch_norm_is_ordered(gradient, input) else (0, 1, 2)


MADE_IN: Final = {
    aten._ctc_loss.default: (1, 0),  # `ATen/native/LossCTC.cpp`
    aten.convolution_backward.default: asked.made_in(  # `ATen/native/mkldnn/Conv.cpp`, `ConvolutionMM2d.cpp`
        aten.convolution_backward.default, (0, 2, 1)
    ),
    aten.native_batch_norm_backward.default: _batch_norm_makes,
    aten.mkldnn_rnn_layer_backward.default: (0, 5, 6, 1, 2, 3, 4),  # `ATen/native/mkldnn/RNN.cpp`
}
"""Op -> the order in which its kernel makes its results."""

_ASKED: Final = {op: asked.scratch(op, cpu_scratch.SCRATCH.get(op)) for op in asked.FIRST}

RULES: Final = Rules(
    "cpu",
    torch.device("cpu"),
    KERNELS,
    FUNCTIONS,
    reads={torch.ctc_loss: (2, 3)},
    scratch={**cpu_scratch.SCRATCH, **_ASKED},
    iterated=cpu_scratch.iterated,
    scratch_first=asked.FIRST | cpu_scratch.FIRST,
    made_in=MADE_IN,
    remarks=REMARKS,
    left_out={op: asked.left_out(op) for op in asked.FIRST},
    autocast=autocast.CPU,
)
