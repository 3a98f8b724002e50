# ruff: noqa: E501 - a table of lines to draw from
"""Random training programs, as text: what is drawn, how it is run twice, and how a difference shrinks.

A program is a function `train(run)` of about twenty lines: inputs, parameters and modules, optimizers, and a loop of two
steps, each a forward pass, a backward pass and an update. `programs()` writes it line by line and runs each line on the
host while it does, so it knows the shape and the dtype of everything that is alive, and what a line needs (a weight, a
layer) is added to the lines before the loop. So nearly every program runs.
"""

from __future__ import annotations

import gc
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import CodeType
from typing import Any, Final
from unittest import mock

import hypothesis.strategies as st
import torch
from torch import Tensor, nn

import everybyte as eb
from everybyte import rules
from everybyte.timeline import Timeline

LIBRARIES: Final = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""

FUNCTIONS: Final = {
    "Swish": """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))
""",
    "Doubled": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
""",
    "Product": """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, y, scale):
        return x * y * scale, (x > y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.scale = inputs
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        of_x = grad * y * ctx.scale if ctx.needs_input_grad[0] else None
        of_y = grad * x * ctx.scale if ctx.needs_input_grad[1] else None
        return of_x, of_y, None
""",
    "Straight": """
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad.clone()
""",
    "Clipped": """
class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.clamp(-1, 1)
        ctx.save_for_backward(out)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        made = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        made.add_(grad)
        return made.masked_fill_(out.abs() == 1, 0.0)
""",
    "halved": """
def halved(tensor):
    return tensor.to(torch.bfloat16), tensor.dtype
""",
    "restored": """
def restored(packed):
    return packed[0].to(packed[1])
""",
}
"""What a program may use of its own; it stands above the program if that names it."""

MOST: Final = 1_500  # numbers in a tensor

# -- the lines that can be drawn ---------------------------------------------------------------------------------------

_EXPRESSIONS: Final = {
    "pointwise": """
        {a}.relu() | F.gelu({a}) | F.gelu({a}, approximate="tanh") | F.silu({a}) | {a}.tanh() | {a}.sigmoid()
        F.elu({a}) | F.leaky_relu({a}, 0.1) | F.softplus({a}) | F.hardswish({a}) | F.hardtanh({a}) | F.logsigmoid({a})
        F.mish({a}) | F.selu({a}) | F.relu6({a}) | F.softsign({a}) | F.softshrink({a}) | F.threshold({a}, 0.1, 0.0)
        {a}.exp() | {a}.sin() | {a}.cos() | {a}.abs() | {a}.erf() | {a}.square() | {a}.neg() | {a}.sign()
        {a}.round() | {a}.floor() | {a}.expm1() | {a}.atan() | {a}.sinh() | {a}.reciprocal() | {a}.log1p().nan_to_num()
        {a}.abs().sqrt() | ({a} * {a} + 1).log() | ({a}.abs() + 1).rsqrt() | {a}.clamp(-1, 1) | {a}.clamp(max={c})
        {a}.clamp(min={b}) | {a}.frac() | {a}.trunc() | {a}.sigmoid().logit() | {a}.deg2rad() | {a}.exp2()
        torch.special.erfcx({a}) | torch.special.i0({a}) | {a}.lgamma() | {a}.sinc() | {a}.asinh() | {a}.digamma()
        {a}.positive() | F.rrelu({a}, training=True) | F.hardsigmoid({a}) | F.tanhshrink({a}) | F.celu({a}, 0.5)
    """,
    "numbers": """
        {a} * {c} | {a} + {c} | {c} - {a} | {a} - {c} | {c} / ({a} * {a} + 1) | {a} / {c1} | {a} ** 2 | {a} ** 3
        {a} ** 1.5 | 2 ** {a} | {a} % 2 | {a} // 2 | torch.add({a}, {c}, alpha=2) | {a} * torch.tensor({c}) | -{a}
        {a} + torch.arange({l}) | {a} * torch.ones(()) | torch.full_like({a}, {c}) + {a} | ({a} > {c}) * {a}
        {a}.fmod(2) | {a}.remainder(1.5) | torch.true_divide({a}, 3) | torch.rsub({a}, {c}) | {a}.pow(0.5)
        {a} * step | {a} / (step + 1) | {a} + step
    """,
    "two": """
        {a} + {b} | {a} - {b} | {a} * {b} | {b} * {a} | {a} / ({b}.abs() + 1) | torch.maximum({a}, {b}) | {a} + {s}
        torch.minimum({a}, {b}) | torch.where({a} > 0, {a}, {b}) | torch.where({a} > 0, {a}, {c}) | {a} * {s}
        torch.lerp({a}, {s}, 0.3) | torch.addcmul({a}, {b}, {b}, value=0.5) | torch.addcdiv({a}, {b}, {b}.abs() + 1)
        torch.atan2({a}, {b}) | torch.hypot({a}, {b}) | torch.logaddexp({a}, {b}) | torch.add({a}, {b}, alpha=2)
        torch.sub({a}, {b}, alpha=0.5) | ({a} > {b}) * {a} | {a}.masked_fill({b} > 0, {c}) | torch.copysign({a}, {b})
        {a}.clamp({b} - 1, {b} + 1) | {a}.pow({b}.abs()) | torch.fmax({a}, {b}) | torch.heaviside({a}, {b})
        {a} + {b}.detach() | torch.xlogy({a}, {b}.abs() + 1) | torch.float_power({a}, 2) | {a} + {x}
        {a} * {p:a[-1:]} | {a} + {p:a[-1:]} | {a} * {p:()} | {a} + {p:a} | {a} * {p:(*a[:-1],1)} | {a} * {x}
    """,
    "shape": """
        {a1}.transpose({d}, {e}) | {a1}.transpose({d}, {e}).contiguous() | {a1}.unsqueeze({d}) | {a}.reshape(-1)
        {a1}.flip({d}) | {a1}.roll(1, {d}) | {a}.unsqueeze(0) | {a1}.squeeze({d}) | {a}.flatten() | {a2}.flatten(0, 1)
        {a1}[{k}] | {a1}[{k}:] | {a1}[..., {k0}:] | {a1}[::2] | {a1}.select({d}, {k}) | {a1}.narrow({d}, 0, 1)
        {a2}[:, {k0}] | {a2}[:, :1] | {a2}[..., 0] | {a2}[None] | {a1}[..., None] | {a2}.mT | {a2}.permute({perm})
        {a1}.movedim(0, -1) | {a2}.diagonal() | {a1}.unfold({d}, 1, 1) | {a}.expand(2, *{S}) | {a1}[:1].expand({S})
        {a}.view({S}) | {a}.reshape({S}) | {a2}.tril() | {a2}.triu(1) | {a1}.diag_embed() | {a}.clone() | {a}.view_as({s})
        {a}.contiguous() | {a}.detach() | {a1}.unflatten(-1, (1, -1)) | {a}.ravel() | {a1}.swapaxes(0, -1)
        torch.atleast_2d({a}) | {a1}.repeat_interleave(2, {d}) | {a}.repeat(2, *{ones}) | {a1}.tile(2)
        F.pad({a1}, (1, 0)) | F.pad({a1}, (0, -1)) | {a2}.rot90() | {a1}.as_strided({S}, {strides}) | torch.atleast_1d({a})
        {a}.to(torch.float64).to({a}.dtype) | {a}.double() | {a}.bfloat16() | {a}.half().float() | {a}.type_as({x})
        {a}.requires_grad_(False) if not {a}.requires_grad else {a} | {a}.broadcast_to(3, *{S}) | {a}.new_zeros({S}) + {a}
        {a3}.permute(2, 0, 1).reshape({S}) | {a1}.split(1, {d})[0] | {a1}.chunk(2, {d})[-1] | {a1}.unbind({d})[0]
        {a1}.tensor_split(2, {d})[0] | {a}.movedim(-1, 0) | {a3}.transpose(1, 2).reshape({S}[0], -1)
    """,
    "joined": """
        torch.cat(({a1}, {s}), {d}) | torch.stack(({a}, {s})) | torch.stack(({a1}, {s}), -1) | torch.cat([{a1}, {a1}])
        torch.cat({a1}.chunk(2, {d})[::-1], {d}) | torch.stack({a1}.unbind({d}), {d}) | torch.hstack(({a1}, {s}))
        torch.vstack(({a}, {s})) | torch.cat([{a1}] * 3, {d}) | sum([{a}, {s}, {b}]) | torch.outer({a}.flatten(), {x}.flatten())
        torch.block_diag({a2}) | torch.stack([{a1}[{k}] for _ in range(3)]) | torch.cat((torch.zeros_like({a1}), {s}), {d})
        sum(part.sum() for part in {a1}.split(2, {d})) | torch.stack([row * 2 for row in {a1}])
        torch.cartesian_prod({a}.flatten(), {x}.flatten()) | torch.column_stack(({a1}, {s}))
    """,
    "reduced": """
        {a}.sum() | {a1}.sum({d}) | {a1}.sum({d}, keepdim=True) | {a}.mean() | {a1}.mean({d}) | {a1} - {a1}.mean({d}, keepdim=True)
        {a1}.std({d}) | {a1}.var({d}, unbiased=False) | {a}.var() | {a1}.amax({d}) | {a1}.amin({d}, keepdim=True) | {a}.max()
        {a1}.max({d})[0] | {a1}.min({d}).values | {a1}.logsumexp({d}) | {a1}.norm(dim={d}) | {a}.norm() | {a1}.cumsum({d})
        {a1}.softmax({d}) | {a1}.log_softmax({d}) | F.normalize({a1}, dim={d}) | {a1}.sort({d})[0] | {a1}.topk(1, {d})[0]
        {a1}.median({d})[0] | {a1}.cummax({d})[0] | {a1}.kthvalue(1, {d})[0] | {a}.abs().sum() | {a1}.nansum({d})
        {a1}.logcumsumexp({d}) | {a}.norm(1) | torch.linalg.vector_norm({a1}, ord=3, dim={d})
        {a1}.aminmax(dim={d})[0] | {a2}.sum((0, 1)) | {a2}.mean((-1, 0)) | {a1}.nanmean({d})
        F.cosine_similarity({a1}, {s}, dim={d}) | torch.dist({a}, {s}) | {a2}.trace() | {a1}.renorm(2, {d}, 1.0) | {a1}.diff(dim={d})
        torch.trapezoid({a1}, dim={d}) | {a1}.mode({d})[0] | F.softmin({a1}, dim={d}) | {a1}.count_nonzero({d}) * {a1}.sum({d})
        ({a1} > 0).sum({d}) * {a1}.sum({d}) | ({a} > 0).float().mean() + {a} | {a1}.argmax({d}) + {a1}.sum({d}) | {a}.std()
    """,
    "product": """
        {a2} @ {a2}.mT | {a2}.mT @ {a2} | {a1} @ {p:(a[-1], 3)} | {a2} @ {p:(a[-1],)} | F.linear({a1}, {p:(2, a[-1])}, {p:(2,)})
        F.linear({a1}, {p:(a[-1], a[-1])}) | torch.einsum("...i,...i->...", {a1}, {s}) | torch.matmul({p:(2, a[-2])}, {a2})
        torch.bmm({a3}, {a3}.mT) | torch.einsum("...ij,...kj->...ik", {a2}, {s}) | {a2}.mT.contiguous() @ {s}
        torch.addmm({p:(3,)}, {a2}, {p:(a[-1], 3)}) | torch.baddbmm({a3}, {a3} @ {a3}.mT, {s}, beta=0.5) | torch.kron({a2}, {p:(1, 2)})
        torch.tensordot({a2}, {s}, dims=2) | torch.dot({a}.flatten(), {s}.flatten()) | torch.mv({p:(2, a[-1])}, {a1})
        torch.cdist({a2}, {s}) | F.bilinear({a1}, {s}, {p:(2, a[-1], a[-1])}) | ({a2} @ {p:(a[-1], 3)}).mT | torch.inner({a1}, {s})
        torch.chain_matmul({a2}, {p:(a[-1], 2)}, {p:(2, 3)}) | torch.addmv({p:(2,)}, {p:(2, a[-1])}, {a1}) | torch.addr({p:(2, a[-1])}, {p:(2,)}, {a1})
        torch.linalg.multi_dot([{a2}, {p:(a[-1], 2)}, {p:(2, 3)}]) | torch.linalg.matrix_norm({a2}) | torch.cross({p:(3,)}, {p:(3,)}, 0)
    """,
    "indexed": """
        {a1}[{t}] | {a1}[{i}] | {a1}[..., {il}] | {a2}[:, {il}] | {a1}.index_select({d}, {t}) | {a1}.gather({d}, torch.zeros({S}, dtype=torch.long))
        {a1}.gather({d}, {a1}.argsort({d})) | {a1}.take_along_dim({s}.argsort({d}), {d}) | {a1}.scatter({d}, torch.zeros({S}, dtype=torch.long), {s})
        {a1}.scatter_add({d}, torch.zeros({S}, dtype=torch.long), {s}) | {a1}.scatter({d}, torch.zeros({S}, dtype=torch.long), {c})
        {a1}.index_add({d}, {t}, {a1}.index_select({d}, {t})) | {a1}.index_copy({d}, {tu}, {a1}.index_select({d}, {tu})) | {a1}.index_fill({d}, {t}, {c})
        torch.index_put({a1}, ({t},), {a1}[0]) | torch.index_put({a1}, ({t},), {a1}[0], accumulate=True) | {a1}[[0, 0]] | {a2}[{i}, 0]
        {a2}[[0], [0]] | {a2}[:, None, [0, 0]] | {a}.take(torch.tensor([0, 0])) | F.embedding({j:a[0]}, {a2}) | {a}.masked_fill(torch.ones({S}, dtype=torch.bool), {c})
        {a1}.scatter_reduce({d}, torch.zeros({S}, dtype=torch.long), {s}, "sum") | {a1}.scatter_reduce({d}, torch.zeros({S}, dtype=torch.long), {s}, "amax")
        {a1}.scatter_reduce({d}, torch.zeros({S}, dtype=torch.long), {s}, "mean", include_self=False) | {a1}.select_scatter({a1}.select({d}, {k}), {d}, {k})
        {a1}.slice_scatter({a1}[:1], 0, 0, 1) | {a2}.diagonal_scatter({a2}.diagonal()) | F.one_hot({a1}.argmax(-1), {l}) * {a1} | {a1}.index_reduce({d}, {tu}, {a1}.index_select({d}, {tu}), "amin")
        {a1}[torch.tensor([True] * len({a1}))] | {a1}[{k}, ..., None] | {a}[None, ...] | F.embedding_bag(torch.tensor([[0, 0], [0, 0]]), {a2}) | {a}.put(torch.tensor([0]), {a}.flatten()[:1])
    """,
    "layers": """
        {M:nn.Linear(a[-1], 3)}({a1}) | {M:nn.Linear(a[-1], a[-1])}({a1}) | {M:nn.Linear(a[-1], 2, bias=False)}({a1}) | {M:nn.LayerNorm(a[-1])}({a1})
        {M:nn.RMSNorm(a[-1])}({a1}) | {M:nn.Sequential(nn.Linear(a[-1], 4), nn.ReLU(inplace=True), nn.Linear(4, a[-1]))}({a1}) | {M:nn.PReLU()}({a})
        {M:nn.Embedding(5, 3)}({j:5}) | {M:nn.BatchNorm1d(a[1])}({a2}) | {M:nn.GroupNorm(1, a[1])}({a2}) | {M:nn.Conv1d(a[-2], 2, 1)}({a2})
        {M:nn.Conv1d(a[-2], 2, 3, padding=1)}({a3}) | {M:nn.ConvTranspose1d(a[-2], 2, 2)}({a3}) | {M:nn.Dropout(0.5)}({a}) | F.dropout({a}, 0.3)
        {M:nn.GRU(a[-1], 2)}({a2})[0] | {M:nn.LSTM(a[-1], 2)}({a2})[0] | {M:nn.RNN(a[-1], 2)}({a2})[0] | {M:nn.MultiheadAttention(a[-1], 1)}({a2}, {s}, {s})[0]
        {M:nn.LSTMCell(a[-1], 2)}({a2})[0] | {M:nn.GRUCell(a[-1], 2)}({a2}) | {M:nn.Bilinear(a[-1], a[-1], 2)}({a1}, {s}) | F.layer_norm({a1}, a[-1:], {p:a[-1:]})
        F.scaled_dot_product_attention({a2}, {s}, {s}) | F.scaled_dot_product_attention({a3}, {s}, {s}, is_causal=True) | F.max_pool1d({a2}, 2, 1) | F.avg_pool1d({a2}, 2, 1)
        {M:nn.Conv2d(a[-3], 2, 2, padding=1)}({a3}) | F.max_pool2d({a3}, 2, 1, 1) | F.interpolate({a3}, scale_factor=2) | F.adaptive_avg_pool1d({a2}, 1) | F.glu(torch.cat(({a1}, {s}), -1))
        {M:nn.InstanceNorm1d(a[1], affine=True)}({a3}) | {M:nn.TransformerEncoderLayer(a[-1], 1, 4, batch_first=True)}({a3}) | F.conv1d({a3}, {p:(2, a[-2], 1)}) | F.instance_norm({a3})
        {M:nn.utils.parametrizations.weight_norm(nn.Linear(a[-1], 2))}({a1}) | {M:nn.utils.parametrizations.spectral_norm(nn.Linear(a[-1], 2))}({a1}) | F.alpha_dropout({a}, 0.2, True) | F.local_response_norm({a3}, 2)
        F.unfold({a4}, 1) | {M:nn.Conv2d(a[1], 2, 1, bias=False)}({a4}) | {M:nn.BatchNorm2d(a[1])}({a4}) | F.pixel_unshuffle({a3}, 1) | F.dropout1d({a3}, 0.5) | {M:nn.Linear(a[-1], 3)}({a1}).relu_()
    """,
    "losses": """
        F.mse_loss({a}, {s}) | F.mse_loss({a}, {s}, reduction="sum") | F.l1_loss({a}, {s}) | F.smooth_l1_loss({a}, {s}) | F.huber_loss({a}, {s})
        F.cross_entropy({a2}.flatten(0, -2), {j1:a[-1]}.expand({a2}.flatten(0, -2).shape[0])) | F.kl_div({a1}.log_softmax(-1), {s}.softmax(-1), reduction="batchmean")
        F.binary_cross_entropy_with_logits({a}, {s}.sigmoid()) | F.binary_cross_entropy({a}.sigmoid(), {s}.sigmoid()) | F.soft_margin_loss({a}, {s}.sign())
        F.poisson_nll_loss({a}, {s}) | F.gaussian_nll_loss({a}, {s}, {s}.abs() + 1) | F.cosine_embedding_loss({a2}, {s}, torch.ones(a[0])) | F.mse_loss({a}, {s}, reduction="none")
        F.cross_entropy({a2}.flatten(0, -2), {a2}.flatten(0, -2).softmax(-1)) | F.margin_ranking_loss({a}, {s}, {s}.sign()) | F.triplet_margin_loss({a2}, {s}, {s}) | F.hinge_embedding_loss({a}, {s}.sign())
        F.multilabel_soft_margin_loss({a2}, {s}.sigmoid())
    """,
    "linear algebra": """
        torch.linalg.cholesky({a2} @ {a2}.mT + 3 * torch.eye(a[-2])) | torch.linalg.inv({a2} @ {a2}.mT + 3 * torch.eye(a[-2])) | torch.linalg.det({a2} @ {a2}.mT)
    """,
    "own": """
        Swish.apply({a}) | Doubled.apply({a} * 1) | Product.apply({a}, {s}, 2.0)[0] | Straight.apply({a}) | Clipped.apply({a})
    """,
    "checkpointed": """
        checkpoint(torch.tanh, {a}, use_reentrant=False) | checkpoint(lambda x: (x * 2).sin() * x, {a}, use_reentrant=False)
        checkpoint({M:nn.Sequential(nn.Linear(a[-1], 4), nn.Tanh(), nn.Linear(4, a[-1]))}, {a1}, use_reentrant=False)
        checkpoint({M:nn.Sequential(nn.Linear(a[-1], 4), nn.Dropout(0.2), nn.Linear(4, a[-1]))}, {a1}, use_reentrant=True)
        checkpoint(lambda x, y: (x * y).relu_() + x, {a}, {s}, use_reentrant=True) | checkpoint(lambda x: x.exp().sum(), {a}, use_reentrant=False, preserve_rng_state=False)
        torch.utils.checkpoint.checkpoint_sequential({M:nn.Sequential(nn.Linear(a[-1], 4), nn.ReLU(), nn.Linear(4, a[-1]), nn.Tanh())}, 2, {a1}, use_reentrant=False)
    """,
    "made": """
        torch.randn(2, 3) | torch.ones_like({a}) | torch.rand_like({a}) + {a} | torch.zeros({S}).add_({a}) | torch.randn({S}, requires_grad=True) | torch.eye({l}) | torch.linspace(0, 1, {l}) * {a1}
        torch.empty_like({a}).copy_({a}) | torch.zeros_like({a}).fill_({c}) | {a}.new_full((2,), {c}) | {a}.detach().clone().requires_grad_() | torch.tensor([1.0, 2.0]) | torch.bernoulli({a}.sigmoid()) * {a}
        torch.randint(0, 3, ({l},)) * {a1} | torch.randperm({l}) + {a1} | torch.normal({a}.detach(), 1.0) | torch.tril(torch.ones({l}, {l})) | {a}.detach().bernoulli_(0.5) | torch.full((2, 2), 3.0)
    """,
    "derived": """
        torch.autograd.grad({g}.sum(), {g}, allow_unused=True)[0] | torch.autograd.grad(({a} * {P}.sum()).sum(), {P})[0] | torch.autograd.grad(({a} * {P}.sum()).sin().sum(), {P}, create_graph=True)[0]
        torch.func.vmap(torch.sin)({a1}) | torch.func.vmap(lambda row: row.sum() * row)({a1})
        torch.autograd.functional.vjp(lambda x: x.sin(), {a}, {s})[1]
    """,
}

_STATEMENTS: Final = {
    "in place": """
        {w}.add_({b}) | {w}.mul_({c}) | {w}.sub_({b}) | {w}.mul_({b}) | {w}.relu_() | {w}.tanh_() | {w}.sigmoid_() | {w}.zero_() | {w}.clamp_(-1, 1) | {w}.div_({b}.abs() + 1) | {w}.exp_()
        {w}.add_({c}) | {w} += {b} | {w} *= {c} | {w}.addcmul_({b}, {b}) | {w}.lerp_({s}, 0.5) | {w}.copy_({b}) | {w}.masked_fill_({b} > 0, {c}) | {w}.neg_() | {w}.pow_(2) | {w}.abs_() | {w}.fill_({c})
        F.relu({w}, inplace=True) | F.silu({w}, inplace=True) | F.leaky_relu({w}, inplace=True) | F.dropout({w}, 0.2, inplace=True) | {w}.normal_() | {w}.uniform_() | {w}.detach().zero_() | {w} /= {c1} | {w} -= {b}
        {w}.sqrt_().nan_to_num_() | {w}.round_() | {w}.sin_() | {w}.erf_() | {w}.addcdiv_({b}, {b}.abs() + 1) | {w}.clamp_(min={c}) | {w}.sign_() | {w}.floor_() | {w}.square_() | {w}.atan2_({b}) | {w}.bernoulli_(0.5)
        {w1}.cumsum_({d}) | {w1}.index_add_({d}, {t}, {w1}.detach().index_select({d}, {t})) | {w1}.index_fill_({d}, {t}, {c}) | {w1}.index_copy_({d}, {tu}, {w1}.detach().index_select({d}, {tu}))
        {w1}.scatter_({d}, torch.zeros({S}, dtype=torch.long), {s}) | {w1}.scatter_add_({d}, torch.zeros({S}, dtype=torch.long), {s}) | {w1}.scatter_({d}, torch.zeros({S}, dtype=torch.long), {c})
        {w1}.index_put_(({t},), {w1}[0].detach(), accumulate=True) | {w1}.put_(torch.tensor([0]), {w1}.detach().flatten()[:1]) | {w2}.tril_() | {w2}.fill_diagonal_({c}) | {w2}.transpose_(0, 1) | {w}.unsqueeze_(0) | {w1}.squeeze_({d})
        {w1}.scatter_reduce_({d}, torch.zeros({S}, dtype=torch.long), {s}, "sum") | {w}.resize_({S}) | {w}.t_() | {w}.set_({s}.detach()) | {w}.data = {s}.detach() | {w}.data.mul_(2) | {w}.masked_scatter_(torch.ones({S}, dtype=torch.bool), {s})
        {w}.requires_grad_() | {w}.detach_()
    """,
    "assigned": """
        {w1}[{k}] = {c} | {w1}[{k}] = {w1}[0].detach() * 2 | {w1}[...] = {b} | {w1}[{t}] = {c} | {w1}[{i}] = {c} | {w1}[{i}] += {c} | {w1}[..., {k0}] = {c} | {w2}[:, {k0}] = {w2}[:, 0].sin() | {w1}[:1] = {s}[:1] | {w1}[{k}:] = {s}[{k}:]
        {w1}[{k}].add_({c}) | {w1}[{k}:].mul_(2) | {w1}.select({d}, {k}).zero_() | {w1}.narrow({d}, 0, 1).add_(1) | {w2}.transpose(0, 1).add_({c}) | {w}.view(-1).mul_({c}) | {w}.unsqueeze(0).relu_() | {w2}.diagonal().fill_({c}) | {w1}[{k}] *= {c}
        {w}[{w} > 0] = {c} | {w1}[torch.tensor([True] * len({w1}))] = {c} | {w2}.mT.copy_({s}.mT) | {w1}[::2] = {s}[::2] | {w1}[..., {il}] = {c} | {w2}[0][{k0}] = {c} | {w2}.view(-1)[0] = 1.0 | {w1}[None, {k}] = {c} | {w1}[{t}] = {w1}[{t}] * 2
        {w2}[{i}, 0] = {c} | {w1}[{k}] = torch.ones(()) | {w2}[:, None] = {c} | {w2}.unbind()[0].add_({s}[0]) | {w1}.split(1)[0].sin_() | {w1}.expand(1, *{S})[0].add_({c}) | {w2}[1:, 1:] = {w2}[:-1, :-1].clone()
    """,
    "out": """
        torch.add({o}, {os}, out={ow}) | torch.mul({o}, {c}, out={ow}) | torch.matmul({o2}, {o2}.mT, out={ow}) | torch.cat(({o1}, {os}), out={ow}) | torch.stack(({o}, {os}), out={ow}) | torch.sum({o1}, {d}, out={ow}) | torch.exp({o}, out={ow})
        torch.where({o} > 0, {o}, {os}, out={ow}) | torch.mean({o1}, {d}, out={ow}) | torch.index_select({o1}, {d}, {t}, out={ow}) | torch.gather({o1}, {d}, torch.zeros({S}, dtype=torch.long), out={ow}) | torch.clamp({o}, -1, 1, out={ow}) | torch.tanh({o}, out={ow})
        torch.sort({o1}, out=({ow}, torch.empty(0, dtype=torch.long))) | torch.cumsum({o1}, {d}, out={ow}) | torch.addmm({o2}, {o2}, {o2}.mT @ {o2}, out={ow}) | torch.maximum({o}, {os}, out={ow}) | torch.sub({o}, {os}, alpha=2, out={ow}) | torch.bmm({o3}, {o3}.mT, out={ow})
        torch.linspace(0, 1, 4, out={ow}) | torch.zeros(2, 3, out={ow}) | torch.softmax({o1}, {d}, out={ow}) | torch.norm({o1}, dim={d}, out={ow}) | torch.lerp({o}, {os}, 0.5, out={ow}) | torch.pow({o}, 2, out={ow}) | torch.var({o1}, {d}, out={ow}) | torch.amax({o1}, {d}, out={ow})
    """,
    "hooked": """
        {g}.register_hook(lambda grad: grad * 2) | {g}.register_hook(lambda grad: None) | {g}.retain_grad() | {g}.register_hook(lambda grad: grad.clone()) | {g}.register_hook(lambda grad: grad.clamp_(-1, 1)) | {g}.register_hook(lambda grad: grad.sin() + grad)
    """,
}

_BEFORE: Final = """
    {P}.register_hook(lambda grad: grad * 0.5) | {P}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)) | {P}.register_hook(lambda grad: grad.clamp(-1, 1))
    {m}.register_forward_hook(lambda m, args, out: None) | {m}.register_forward_pre_hook(lambda m, args: None) | {m}.register_full_backward_hook(lambda m, gi, go: None) | {m}.eval() | {m}.to(torch.float64).float() | {m}.requires_grad_(False)
    {m}.register_full_backward_pre_hook(lambda m, go: None)
"""
"""What is done to parameters and modules before the loop."""

_OPTIMIZERS: Final = """
    torch.optim.SGD({P_}, lr=0.1) | torch.optim.SGD({P_}, lr=0.1, momentum=0.9) | torch.optim.Adam({P_}) | torch.optim.AdamW({P_}, foreach=True) | torch.optim.Adam({P_}, amsgrad=True) | torch.optim.AdamW({P_}, fused=True)
    torch.optim.SGD({P_}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1) | torch.optim.RMSprop({P_}, centered=True, momentum=0.5) | torch.optim.Adagrad({P_}) | torch.optim.Adamax({P_}) | torch.optim.NAdam({P_}) | torch.optim.RAdam({P_})
    torch.optim.Adadelta({P_}) | torch.optim.SGD({P_}, lr=0.1, maximize=True) | torch.optim.Adam({P_}, foreach=True, weight_decay=0.1) | torch.optim.ASGD({P_}) | torch.optim.Rprop({P_}) | torch.optim.SGD({P_}, lr=0.1, foreach=True, momentum=0.9)
    torch.optim.RMSprop({P_}, foreach=True) | torch.optim.Adagrad({P_}, foreach=True) | torch.optim.Adafactor({P_}) | torch.optim.Adam({P_}, lr=torch.tensor(0.01)) | torch.optim.NAdam({P_}, foreach=True) | torch.optim.Adadelta({P_}, foreach=True) | torch.optim.SGD({P_}, lr=0.1, fused=True)
"""


def _listed(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


EXPRESSIONS: Final = {kind: _listed(text) for kind, text in _EXPRESSIONS.items()}
STATEMENTS: Final = {kind: _listed(text) for kind, text in _STATEMENTS.items()}
BEFORE: Final = _listed(_BEFORE)
OPTIMIZERS: Final = _listed(_OPTIMIZERS)

# -- writing a program -------------------------------------------------------------------------------------------------

_HOLE: Final = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_SIZE: Final = re.compile(r"\ba\[(-?\d+)(:?)\]")
_NUMBERS: Final = ("2", "0.5", "-1", "0", "1.0", "3", "True")
_FLOATING: Final = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_WHOLE: Final = frozenset({torch.int64, torch.bool})


class Unfit(Exception):
    """A line for which nothing that is alive fits."""


class Bare:
    """A run that nobody watches."""

    def to_device(self, data: Any) -> Tensor:
        return torch.from_numpy(data)

    def steps(self, count: int) -> Iterator[int]:
        yield from range(count)


@cache
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


class Writer:
    """Writes a program line by line, running each line on the host as it is written."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self._below = below
        self.scope: dict[str, Any] = {"run": Bare(), "step": 0}
        exec(LIBRARIES, self.scope)
        exec("import numpy as np", self.scope)
        for text in FUNCTIONS.values():
            exec(text, self.scope)
        self._own = set(self.scope)
        self.before: list[str] = []  # the loop
        self._count = 0
        self._made: dict[str, list[str]] = {}  # text -> names of parameters, modules and inputs made by it

    # -- drawing

    def upto(self, count: int) -> int:
        return self._below(count) if count > 1 else 0

    def pick(self, items: Any) -> Any:
        items = list(items)
        if not items:
            raise Unfit
        return items[self.upto(len(items))]

    def chance(self, percent: int) -> bool:
        return self.upto(100) >= 100 - percent

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    # -- what is alive

    def alive(self, kind: type) -> list[str]:
        """Names of this kind, the newest first."""
        return [n for n, v in reversed(self.scope.items()) if n not in self._own and isinstance(v, kind)]

    def tensors(self, fits: Callable[[Tensor], bool]) -> list[str]:
        found = []
        for name in self.alive(Tensor):
            value = self.scope[name]
            with suppress(RuntimeError):  # a view that was written where it must not be has no graph
                if type(value) in (Tensor, nn.Parameter) and fits(value):
                    found.append(name)
        return found

    def tensor(self, fits: Callable[[Tensor], bool]) -> str:
        names = self.tensors(fits)
        return self.pick(names if self.chance(20) else names[:4])

    # -- running

    def run(self, line: str) -> bool:
        """Runs a line; says whether it ran and left nothing that is too large."""
        before = {n: v for n, v in self.scope.items() if n not in self._own}
        try:
            exec(compile(line, "<line>", "exec"), self.scope)
        except Exception:
            self._restore(before)
            return False
        for name in self.alive(Tensor):
            value = self.scope[name]
            fits = value.dtype in _FLOATING or value.dtype in _WHOLE
            if not fits or value.numel() > MOST or value.dim() > 5 or value.untyped_storage().nbytes() > 8 * MOST:
                self._restore(before)
                return False
        return True

    def _restore(self, before: dict[str, Any]) -> None:
        for name in [n for n in self.scope if n not in self._own]:
            del self.scope[name]
        self.scope.update(before)

    def set_up(self, letter: str, text: str) -> str:
        """The name of something made before the loop by this text; made already, perhaps."""
        made = [name for name in self._made.get(text, []) if name in self.scope]
        if made and self.chance(60):
            return self.pick(made)
        name = self.name(letter)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            if not self.run(f"{name} = {text}"):
                raise Unfit
        self.before.append(f"{name} = {text}")
        self._made.setdefault(text, []).append(name)
        return name

    def parameter(self, shape: tuple[int, ...]) -> str:
        return self.set_up("p", f"nn.Parameter(torch.randn({_sized(shape)}))")

    # -- filling the holes of a line

    def filled(self, template: str) -> str:
        """The line with names of what fits.

        Raises:
            Unfit: If nothing does.
        """
        self._anchor: str | None = None
        self._same: dict[str, str] = {}
        text = _HOLE.sub(self._hole, template)
        return _SIZE.sub(self._size, text)

    @property
    def shape(self) -> tuple[int, ...]:
        if self._anchor is None:
            raise Unfit
        return tuple(self.scope[self._anchor].shape)

    def _size(self, found: re.Match[str]) -> str:
        try:
            at = int(found[1])
            return str(tuple(self.shape[at:])) if found[2] else str(self.shape[at])
        except IndexError:
            raise Unfit from None

    def _hole(self, found: re.Match[str]) -> str:
        what, detail = found[1], found[2]
        kind, dims = what.rstrip("0123456789"), int(re.sub(r"\D", "", what) or 0)
        if kind in ("a", "w", "g", "o"):
            if self._anchor is None:
                self._anchor = self.tensor(partial(_ANCHORS[kind], dims))
            return self._anchor
        if kind in ("d", "k", "S", "l", "perm", "P", "P_", "m") and what in self._same:
            return self._same[what]
        made = getattr(self, f"_hole_{kind}")(detail if detail is not None else dims)
        self._same[what] = made
        return made

    def _hole_s(self, _: Any) -> str:
        like = self.scope[self._anchor] if self._anchor else None
        return self.tensor(lambda t: like is not None and t.shape == like.shape and t.dtype == like.dtype)

    def _hole_os(self, _: Any) -> str:
        like = self.scope[self._anchor]
        return self.tensor(lambda t: t.shape == like.shape and t.dtype == like.dtype and _plain(t))

    def _hole_ow(self, _: Any) -> str:
        if self.chance(50):
            return self.set_up("o", "torch.empty(0)")
        return self.tensor(lambda t: t.dtype in _FLOATING and _plain(t) and not isinstance(t, nn.Parameter))

    def _hole_b(self, _: Any) -> str:
        shape = self.shape
        return self.tensor(lambda t: t.dtype in _FLOATING and _spreads(t.shape, shape))

    def _hole_x(self, _: Any) -> str:
        return self.tensor(lambda t: t.dtype in _FLOATING)

    def _hole_p(self, expression: str) -> str:
        try:
            return self.parameter(tuple(eval(expression, {"a": self.shape if self._anchor else ()})))
        except IndexError:
            raise Unfit from None

    def _hole_M(self, text: str) -> str:
        return self.set_up("m", _SIZE.sub(self._size, text))

    def _hole_j(self, detail: Any) -> str:
        n = int(_SIZE.sub(self._size, detail))
        indices = [self.upto(n) for _ in range(2)] if n else []
        return self.set_up("i", f"run.to_device(np.array({indices}))")

    def _hole_P(self, _: Any) -> str:
        return self.tensor(lambda t: isinstance(t, nn.Parameter) and t.requires_grad)

    def _hole_P_(self, _: Any) -> str:
        return self._parameters

    def _hole_m(self, _: Any) -> str:
        return self.pick(self.alive(nn.Module))

    def _hole_d(self, _: Any) -> str:
        n = len(self.shape)
        if not n:
            raise Unfit
        return str(self.upto(2 * n) - n if self.chance(30) else self.upto(n))

    def _hole_e(self, _: Any) -> str:
        return self._hole_d(None)

    def _along(self) -> int:
        dim = int(self._same.get("d", 0))
        return self.shape[dim]

    def _hole_k(self, dims: int | str) -> str:
        n = min(self.shape) if "d" not in self._same else self._along()
        if n == 0:
            raise Unfit
        return str(self.upto(n))

    def _hole_c(self, dims: int) -> str:
        return self.pick(_NUMBERS if not dims else ("2", "0.5", "3"))

    def _indices(self, n: int, unique: bool = False) -> list[int]:
        if not n:
            raise Unfit
        count = 1 + self.upto(3)
        return sorted({self.upto(n) for _ in range(count)}) if unique else [self.upto(n) for _ in range(count)]

    def _hole_i(self, _: Any) -> str:
        return str(self._indices(self._along()))

    def _hole_il(self, _: Any) -> str:
        return str(self._indices(min(self.shape)))

    def _hole_t(self, _: Any) -> str:
        return f"torch.tensor({self._indices(self._along())})"

    def _hole_tu(self, _: Any) -> str:
        return f"torch.tensor({self._indices(self._along(), unique=True)})"

    def _hole_S(self, _: Any) -> str:
        return str(self.shape)

    def _hole_l(self, _: Any) -> str:
        return str(self.shape[-1] if self.shape else 1)

    def _hole_ones(self, _: Any) -> str:
        return str((1,) * len(self.shape))

    def _hole_strides(self, _: Any) -> str:
        return str(self.scope[self._anchor].stride())

    def _hole_perm(self, _: Any) -> str:
        left, order = list(range(len(self.shape))), []
        while left:
            order.append(left.pop(self.upto(len(left))))
        return str(tuple(order))

    # -- lines

    def line(self) -> list[str] | None:
        """A line, or a few that belong together, that ran; None where the one drawn does not fit or run."""
        roll = self.upto(100)
        try:
            if roll < 62:
                return self.expression()
            if roll < 74:
                return self.plain("in place")
            if roll < 80:
                return self.plain("assigned")
            if roll < 83:
                return self.plain("out")
            if roll < 86:
                return self.plain("hooked")
            if roll < 89:
                return self.deleted()
            if roll < 91:
                return self.several()
            return self.block()
        except Unfit:
            return None

    def target(self) -> str:
        """A new name, or one whose tensor is let go."""
        own = self.tensors(lambda t: not isinstance(t, nn.Parameter))
        mine = [name for name in own if name.startswith("x")]
        return self.pick(mine) if mine and self.chance(25) else self.name("x")

    def expression(self) -> list[str] | None:
        text = self.filled(self.pick(EXPRESSIONS[self.pick(EXPRESSIONS)]))
        if self.chance(12):
            text = f"({text}){self.pick(['.detach()', ' * 2', '.sum()', '.relu()', '.contiguous()', '.float()'])}"
        line = f"{self.target()} = {text}"
        return [line] if self.run(line) else None

    def plain(self, kind: str) -> list[str] | None:
        line = self.filled(self.pick(STATEMENTS[kind]))
        return [line] if self.run(line) else None

    def deleted(self) -> list[str] | None:
        names = [name for name in self.alive(Tensor) if name.startswith("x")]
        if len(names) < 2:
            return None
        line = f"del {self.pick(names)}"
        return [line] if self.run(line) else None

    def several(self) -> list[str] | None:
        anchor = self.tensor(lambda t: t.dtype in _FLOATING and t.dim() > 0)
        one, two = self.name("x"), self.name("x")
        dim = self.upto(self.scope[anchor].dim())
        n = self.scope[anchor].shape[dim]
        forms = [
            f"{one}, {two} = {anchor}.max({dim})", f"{one}, {two} = {anchor}.sort({dim})",
            f"{one}, {two} = {anchor}.split([1, {n - 1}], {dim})",
            f"{one}, {two} = {anchor}, {anchor}.detach()", f"{one}, {two} = {anchor}.chunk(2, {dim})",
            f"{one}, {two} = {anchor}.topk(1, {dim})", f"{one}, {two} = {anchor}.aminmax(dim={dim})",
            f"{one}, {two} = torch.frexp({anchor})", f"{one}, {two} = torch.sort({anchor}, {dim}, descending=True)",
            f"{one}, {two} = [x.clone() for x in ({anchor}, {anchor})]",
        ]  # fmt: skip
        line = self.pick(forms)
        return [line] if self.run(line) else None

    def lines(self, count: int) -> list[str]:
        made: list[str] = []
        for _ in range(count):
            made += self.line() or self.line() or self.line() or []
        return made

    def block(self) -> list[str] | None:
        kind = self.upto(9)
        if len(self._depth) > 1:
            return None
        with self._deeper():
            if kind < 2:
                return self.within("torch.no_grad()")
            if kind == 2:
                return self.within('torch.autocast("cpu", dtype=torch.bfloat16)')
            if kind == 3:
                return self.within("torch.autograd.graph.saved_tensors_hooks(halved, restored)")
            if kind == 4:
                return self.within("torch.enable_grad()")
            if kind == 5:
                return self.repeated()
            if kind == 6:
                return self.chosen()
            return self.function()

    _depth: tuple[int, ...] = ()

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth = (*self._depth, 1)
        yield
        self._depth = self._depth[1:]

    def within(self, context: str) -> list[str] | None:
        with eval(context, self.scope):
            inner = self.lines(1 + self.upto(3))
        return [f"with {context}:", *_indented(inner)] if inner else None

    def repeated(self) -> list[str] | None:
        """A loop, its body run once as it is written, and then again."""
        before = dict(self.scope)
        inner = self.lines(1 + self.upto(3))
        if not inner or not self.run("\n".join(inner)):
            self.scope.update(before)
            return None
        return ["for _ in range(2):", *_indented(inner)]

    def chosen(self) -> list[str] | None:
        """A branch on a shape or on the step."""
        name = self.tensor(lambda t: t.dtype in _FLOATING and t.dim() > 0)
        test = self.pick([f"{name}.shape[0] > 1", f"{name}.requires_grad", f"{name}.is_contiguous()", "step == 0"])
        taken = eval(test, self.scope)
        if not taken:
            test = f"not {test}"
        before = dict(self.scope)
        inner = self.lines(1 + self.upto(2))
        if "step" in test:  # what it makes may be missing in another step
            for missing in [n for n in self.scope if n not in before]:
                del self.scope[missing]
        return [f"if {test}:", *_indented(inner)] if inner else None

    def function(self) -> list[str] | None:
        """A function of one or two tensors, called, or checkpointed."""
        given = [self.tensor(lambda t: t.dtype in _FLOATING) for _ in range(1 + self.upto(2))]
        name, arguments = self.name("f"), [self.name("x") for _ in given]
        before = dict(self.scope)
        self.scope.update({a: self.scope[g] * 1 for a, g in zip(arguments, given, strict=True)})
        inner = self.lines(1 + self.upto(4))
        made = [x for x in self.tensors(lambda t: t.dtype in _FLOATING) if x.startswith("x") and x not in before]
        result = self.pick(made)
        kept = {n: v for n, v in self.scope.items() if n in before or any(f"{n} = " in line for line in self.before)}
        for gone in [n for n in self.scope if n not in kept]:
            del self.scope[gone]
        self.scope.update({n: v for n, v in before.items() if n in kept})
        text = [f"def {name}({', '.join(arguments)}):", *_indented([*inner, f"return {result}"])]
        call = self.pick(
            [
                f"{name}({', '.join(given)})",
                f"checkpoint({name}, {', '.join(given)}, use_reentrant=False)",
                f"checkpoint({name}, {', '.join(given)}, use_reentrant=True)",
            ]
        )
        line = f"{self.name('x')} = {call}"
        return [*text, line] if self.run("\n".join([*text, line])) else None

    # -- the whole

    def program(self) -> str:
        self.run("torch.manual_seed(0)")
        for _ in range(1 + self.upto(2)):
            shape = self.pick([(2, 3), (3,), (2, 3, 4), (4, 4), (2, 2, 4, 3), (1, 3), (), (5, 2)])
            make = self.pick(['np.ones({S}, "float32")', 'np.ones({S}, "float32")', 'np.ones({S}, "float64")'])
            self.set_up("v", f"run.to_device({make.replace('{S}', str(shape))})")
        self.parameter(self.pick([(2, 3), (3,), (2, 3, 4), (4, 4)]))
        body = self.lines(4 + self.upto(10))
        learn = self.learning(body)
        head = ["torch.manual_seed(0)", *self.before]
        loop = [f"for step in run.steps({2 - self.upto(2)}):", *_indented([*body, *learn] or ["pass"])]
        text = "\n".join(["def train(run):", *_indented([*head, *loop])])
        return text

    def learning(self, forward: list[str]) -> list[str]:
        """A loss, a backward pass and an update."""
        learns = lambda t: t.requires_grad and t.dtype in _FLOATING  # noqa: E731
        results = self.tensors(lambda t: learns(t) and not t.is_leaf)
        made: list[str] = []

        def do(line: str) -> bool:
            if self.run(line):
                made.append(line)
                return True
            return False

        parameters = self.tensors(lambda t: isinstance(t, nn.Parameter) and t.requires_grad)
        modules = self.alive(nn.Module)
        while self.chance(25):
            try:
                line = self.filled(self.pick(BEFORE))
            except Unfit:
                break
            if self.run(line):
                self.before.append(line)
        if len(modules) > 1 and self.chance(30):
            one, two = self.pick(modules), self.pick(modules)
            line = f"{one}.weight = {two}.weight"
            if one != two and self.run(line):
                self.before.append(line)
        parameters = parameters or [self.parameter((3,))]
        loss = self.pick(results or parameters)
        form = self.pick(["{0}.sum()", "{0}.mean()", "({0} * {0}).sum()", "{0}.float().pow(2).mean()", "{0}.std()"])
        text = form.format(loss)
        if self.chance(40) and len(results) > 1:
            text += " + " + self.pick(["{0}.sum()", "0.1 * {0}.abs().mean()"]).format(self.pick(results))
        do(f"loss = {text}")
        every = [*parameters, *(f"*{m}.parameters()" for m in modules)]
        optimizers: list[str] = []
        for _ in range(self.upto(3)):
            chosen = every if self.chance(60) else [self.pick(every)]
            self._parameters = f"[{', '.join(chosen)}]"
            if self.chance(15) and len(every) > 1:
                self._parameters = f'[{{"params": [{every[0]}], "lr": 0.01}}, {{"params": [{", ".join(every[1:])}]}}]'
            name, text = self.name("optimizer"), self.filled(self.pick(OPTIMIZERS))
            if self.run(f"{name} = {text}"):
                self.before.append(f"{name} = {text}")
                optimizers.append(name)
                if self.chance(10):
                    scheduler = f"s{name} = torch.optim.lr_scheduler.StepLR({name}, 1)"
                    self.run(scheduler)
                    self.before.append(scheduler)
        some = self.pick(every)
        scalars = f"[{', '.join(every)}]"
        way = self.upto(12)
        if way < 5:
            do("loss.backward()")
        elif way == 5:
            do("loss.backward(retain_graph=True)")
            do(self.pick(["loss.backward()", "(loss * 2).backward()"]))
        elif way == 6:
            do(f"grads = torch.autograd.grad(loss, {scalars}, create_graph=True, allow_unused=True)")
            do("(loss + sum(g.pow(2).sum() for g in grads if g is not None)).backward()")
        elif way == 7:
            do(f"grads = torch.autograd.grad(loss, {scalars}, create_graph=True, allow_unused=True)")
            do("sum(g.sum() for g in grads if g is not None and g.requires_grad).backward()")
        elif way == 8:
            do("loss.backward(create_graph=True)")
            do(f"sum(p.grad.pow(2).sum() for p in {scalars} if p.grad is not None).backward()")
        elif way == 9:
            do(f"grads = torch.autograd.grad(loss, {scalars}, allow_unused=True)")
            do(f"for p, g in zip({scalars}, grads): p.grad = g")
        elif way == 10:
            do(f"loss.backward(inputs=[{some}])")
        else:
            do("torch.autograd.backward([loss, loss * 2], [torch.ones_like(loss), torch.ones_like(loss)])")
        accumulates = self.chance(15)
        if accumulates:
            made = ["for _ in range(2):", *_indented([*forward, *made])]
            if not self.run("\n".join(made)):
                made = made[1 + len(forward) :]
                made = [line[4:] for line in made]
                accumulates = False
        if accumulates:
            forward.clear()
        if self.chance(20):
            do(self.pick([
                f"torch.nn.utils.clip_grad_norm_({scalars}, 1.0)", f"torch.nn.utils.clip_grad_value_({scalars}, 0.5)",
                f"torch.nn.utils.clip_grad_norm_({scalars}, 1.0, foreach=False)",
            ]))  # fmt: skip
        for name in optimizers:
            do(f"{name}.step()" if self.chance(90) else f"{name}.step(lambda: loss)")
            if f"s{name}" in self.scope:
                do(f"s{name}.step()")
        if not optimizers and self.chance(50):
            do("with torch.no_grad():\n    for p in " + scalars + ":\n        if p.grad is not None: p -= 0.1 * p.grad")
        if parameters and self.chance(20):
            p = self.pick(parameters)
            average = self.set_up("e", f"{p}.detach().clone()")
            do(
                f"{average}.lerp_({p}.detach(), 0.1)"
                if self.chance(50)
                else f"{average}.mul_(0.9).add_({p}.detach(), alpha=0.1)"
            )
        ends = [
            *(f"{name}.zero_grad()" for name in optimizers), *(f"{name}.zero_grad(set_to_none=False)" for name in optimizers),
            f"for p in {scalars}: p.grad = None",
        ]  # fmt: skip
        for _ in range(1 + self.upto(2)):
            do(self.pick(ends))
        if self.chance(15) and modules:
            do(
                self.pick(
                    [
                        f"{modules[0]}.load_state_dict({modules[0]}.state_dict())",
                        f"kept = {{k: v.clone() for k, v in {modules[0]}.state_dict().items()}}",
                        f"{modules[0]}.zero_grad()",
                    ]
                )
            )
        return "\n".join(made).split("\n")


def _sized(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) or "()"


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _plain(tensor: Tensor) -> bool:
    return not (tensor.requires_grad and torch.is_grad_enabled())


def _spreads(shape: Any, over: Any) -> bool:
    return len(shape) <= len(over) and all(n in (1, m) for n, m in zip(shape[::-1], over[::-1], strict=False))


_ANCHORS: Final[dict[str, Callable[[int, Tensor], bool]]] = {
    "a": lambda dims, t: t.dtype in _FLOATING and t.dim() >= dims,
    "w": lambda dims, t: t.dtype in _FLOATING and t.dim() >= dims and (not t.is_leaf or _plain(t)),
    "g": lambda dims, t: t.requires_grad and t.dtype in _FLOATING,
    "o": lambda dims, t: t.dtype in _FLOATING and t.dim() >= dims and _plain(t),
}


def written(below: Callable[[int], int]) -> str:
    """A program, as text, its choices made by `below`: a number from 0 up to one less than what it is given."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        writer = Writer(below)
        text = writer.program()
        writer.scope.clear()
    used = [own for name, own in FUNCTIONS.items() if re.search(rf"\b{name}\b", text)]
    return "".join(f"{own}\n" for own in used).lstrip("\n") + text


@st.composite
def programs(draw: Callable[[Any], Any]) -> str:
    """A program, as text, its choices made by hypothesis."""
    return written(lambda count: draw(_below(count)))


def numbered(seed: int, number: int) -> str:
    """The program of this number: the same one wherever it is asked for."""
    return written(random.Random(f"{seed}:{number}").randrange)


# -- running it twice --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        ran: Whether it really runs.
        difference: Between what was traced and what really happened, in words; empty if there is none.
        explained: What the trace says of itself that it does not reproduce.
    """

    ran: bool
    difference: str = ""
    explained: str = ""


def warm() -> None:
    """Runs what PyTorch brings in when it is first used, which holds memory that no later run holds."""
    with uncollected():
        traced(compiled(_WARMING))
        measured(compiled(_WARMING))


_WARMING: Final = """
def train(run):
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    x = torch.func.vmap(torch.sin)(checkpoint(layer, torch.ones(2, 3), use_reentrant=False))
    x.sum().backward()
    optimizer.step()
"""


def compiled(text: str) -> CodeType:
    return compile(text, "<program>", "exec")


def body(code: CodeType, run: Any) -> None:
    scope: dict[str, Any] = {}
    exec(LIBRARIES, scope)
    exec("import numpy as np", scope)
    exec(code, scope)
    try:
        scope["train"](run)
    finally:
        scope.clear()


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector runs in no two runs at the same moment: here in neither."""
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(gc, "collect", lambda *_: 0))
            for name in ("trace", "measure"):  # no program has such a cache
                module = import_module(f"everybyte.{name}")
                stack.enter_context(mock.patch.object(module, "empty_caches_of_tensors", lambda: None))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()


def measured(code: CodeType) -> Timeline:
    with eb.measure(device="cpu") as run:
        body(code, run)
    return run.timeline


def traced(code: CodeType, whose: str = "cpu") -> eb.Trace:
    with mock.patch.object(rules.asked, "MOST_BYTES", -1), eb.trace(rules=whose) as run:
        body(code, run)
    return run


def outcome(text: str) -> Outcome:
    """Runs a program for real, and traced by both sets of rules."""
    code = compiled(text)
    with uncollected():
        try:
            real = measured(code)
        except Exception as error:
            return Outcome(False, explained=_said(error))
        try:
            run = traced(code)
        except Exception as error:
            return Outcome(True, f"traced: {_said(error)}")
        explained = ", ".join([*sorted(run.not_covered), *(["a value decides a branch"] if run.conditional else [])])
        difference = differing(events(run.timeline), events(real))
        if not difference:
            try:
                traced(code, "cuda")
            except Exception as error:
                difference = f"traced by CUDA's rules: {_said(error)}"
    return Outcome(True, difference, explained)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass(frozen=True)
class Event:
    """One event of a timeline, as two of them are compared."""

    allocates: bool
    nbytes: int
    storage: int
    what: str
    scratch: bool

    def __str__(self) -> str:
        return f"{'alloc' if self.allocates else 'free'} {self.nbytes} {self.what}"


def events(timeline: Timeline) -> list[Event]:
    columns = timeline.table.select(["action", "nbytes", "storage", "op", "phase", "step", "category"]).to_pydict()
    return [
        Event(action == "alloc", nbytes, storage, f"{op or 'a number'} in {phase}, step {step}", category == "scratch")
        for action, nbytes, storage, op, phase, step, category in zip(*columns.values(), strict=True)
    ]


def differing(ours: list[Event], real: list[Event]) -> str:
    """The first event in which a trace and a measurement differ, in words; empty if in none.

    What is released between two allocations has no order that anything could tell. Memory that was taken inside a
    kernel for the one may have been taken beside it for the other: a profiler takes a hook that runs inside an op, or a
    transform of it, for the op's kernel. So what was traced may be found among what a kernel took.
    """
    ours = [event for event in ours if not event.scratch]
    found = _found([e for e in ours if e.allocates], [e for e in real if e.allocates])
    real = [event for event in real if not event.scratch or event.storage in found]
    a, b = _settled(ours), _settled(real)
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if (one.allocates, one.nbytes) != (other.allocates, other.nbytes):
            return f"event {at} of {len(b)}: traced {one}; measured {other}"
    if len(a) != len(b):
        whose = "traced" if len(a) > len(b) else "measured"
        return f"event {min(len(a), len(b))}: only {whose} {max(a, b, key=len)[min(len(a), len(b))]}"
    return ""


def _found(ours: list[Event], real: list[Event]) -> set[int]:
    """The storages taken inside kernels that must be among what was traced, so that this is what was measured."""
    if [e.nbytes for e in ours] == [e.nbytes for e in real if not e.scratch]:
        return set()
    reached: dict[int, tuple[int, ...]] = {0: ()}  # number of traced allocations -> those found so far
    for event in real:
        following: dict[int, tuple[int, ...]] = dict(reached) if event.scratch else {}
        for at, found in reached.items():
            if at < len(ours) and ours[at].nbytes == event.nbytes:
                following[at + 1] = (*found, event.storage) if event.scratch else found  # the last of several alike
        reached = following
    return set(reached.get(len(ours), ()))


def _settled(stream: list[Event]) -> list[Event]:
    """Events, the releases between two allocations in the order of their sizes."""
    settled: list[Event] = []
    released: list[Event] = []
    for event in stream:
        if not event.allocates:
            released.append(event)
        else:
            settled += [*sorted(released, key=lambda e: e.nbytes), event]
            released = []
    return [*settled, *sorted(released, key=lambda e: e.nbytes)]


# -- shrinking ---------------------------------------------------------------------------------------------------------


def shrunk(text: str, still: Callable[[str], bool]) -> str:
    """The program with as few lines as are still of interest: lines and blocks left out, blocks opened, one by one."""
    lines = text.split("\n")
    changed = True
    while changed:
        changed = False
        for size in (8, 4, 2, 1):
            at = len(lines) - 1
            while at >= 0:
                for fewer in _without(lines, at, size):
                    if still("\n".join(fewer)):
                        lines, changed = fewer, True
                        break
                at -= 1
                at = min(at, len(lines) - 1)
    return "\n".join(lines)


def _without(lines: list[str], at: int, size: int) -> Iterator[list[str]]:
    if lines[at].startswith("def train") or not lines[at].strip():
        return
    if size > 1:
        if at + size <= len(lines):
            yield [*lines[:at], *lines[at + size :]]
        return
    depth = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    yield [*lines[:at], *lines[end:]]
    if end > at + 1:
        yield [*lines[:at], *(line[4:] for line in lines[at + 1 : end]), *lines[end:]]
