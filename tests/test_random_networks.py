"""Random small networks, traced and really run: the two timelines agree to the byte.

A network is a description: a size, a list of steps and a way to train. Every step makes, from two earlier values, a
new value of the same shape `[b, s, h]`; so any list of steps is a network, with residuals, reused modules and values
that several steps need, and a failing one shrinks to the steps that matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from agreement import differences_between
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everybyte
from everybyte import direct, kernels, rules
from everybyte.timeline import PHASES, Timeline

# -- the description of a network --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One value of the network, from two earlier ones.

    Attributes:
        kind: A name in `STEPS`.
        variant: Which of the kind's forms.
        slot: Which of the modules of that kind and form; the same slot twice is a module used twice.
        a, b: Operands, counted back from the newest value.
    """

    kind: str
    variant: int = 0
    slot: int = 0
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class Training:
    """How a network is trained."""

    optimizer: str = "sgd"
    foreach: bool | None = None
    weight_decay: float = 0.0
    clip: str = ""  # "" | "norm" | "value"
    set_to_none: bool = True
    autocast: bool = False  # the forward pass and the loss
    accumulate: int = 1  # forward and backward passes a step
    retain_graph: bool = False  # run each backward pass twice
    evaluate: bool = False  # a forward pass without gradients after each step
    steps: int = 2


@dataclass(frozen=True)
class Network:
    """A network with its data and its training."""

    steps: tuple[Step, ...]
    batch: int = 2
    length: int = 3
    width: int = 4
    heads: int = 1
    dtype: str = "float32"
    layout: str = "contiguous"  # of the input: contiguous | transposed | strided | reversed | expanded
    loss: str = "mean"
    training: Training = Training()


# -- steps -------------------------------------------------------------------------------------------------------------

VOCABULARY = 11
OPERANDS = 3  # how many values stay alive for later steps


@dataclass(frozen=True)
class Size:
    b: int
    s: int
    h: int
    heads: int


class Model(nn.Module):
    """The network that a description describes."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.size = Size(network.batch, network.length, network.width, network.heads)
        self.steps = network.steps
        self.own = nn.ModuleDict()
        for step in network.steps:
            make, _ = STEPS[step.kind]
            name = _name(step)
            if make is not None and name not in self.own:
                self.own[name] = make(self.size, step.variant)
        self.embed = nn.Embedding(VOCABULARY, network.width)
        self.head = nn.Linear(network.width, VOCABULARY, bias=False)
        if network.loss.startswith("tied"):
            self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(network.width))
        self.register_buffer("scale", torch.ones(network.width), persistent=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        values = [x, self.embed(tokens) * self.scale]
        for step in self.steps:
            a, b = (values[-1 - back % len(values)] for back in (step.a, step.b))
            make, apply = STEPS[step.kind]
            own = None if make is None else self.own[_name(step)]
            values = [*values[1 - OPERANDS :], apply(Context(self, own, step.variant), a, b)]
        return values[-1] if values[-1].requires_grad else values[-1] * self.gain


@dataclass(frozen=True)
class Context:
    """What a step sees beside its operands."""

    model: Model
    own: Any  # the step's module, if it has one
    variant: int

    @property
    def size(self) -> Size:
        return self.model.size


def _name(step: Step) -> str:
    return f"{step.kind}_{step.variant}_{step.slot}"


Apply = Callable[[Context, Tensor, Tensor], Tensor]
Make = Callable[[Size, int], nn.Module]
STEPS: dict[str, tuple[Make | None, Apply]] = {}
VARIANTS: dict[str, int] = {}


def _step(kind: str, *forms: Any, make: Make | None = None) -> None:
    """A kind of step: `forms` are functions of (context, a, b), one a variant; a module's forms are made by `make`."""
    STEPS[kind] = (make, lambda net, a, b: forms[net.variant % len(forms)](net, a, b))
    VARIANTS[kind] = len(forms)


def _modules(kind: str, *makers: Callable[[Size], nn.Module], apply: Apply | None = None) -> None:
    """A kind of step that applies a module of its own, of which `makers` make the variants."""
    STEPS[kind] = (lambda size, variant: makers[variant % len(makers)](size), apply or (lambda net, a, b: net.own(a)))
    VARIANTS[kind] = len(makers)


def _channels_first(net: Context, a: Tensor, b: Tensor) -> Tensor:
    return net.own(a.transpose(1, 2)).transpose(1, 2)


def _as_image(net: Context, a: Tensor, b: Tensor) -> Tensor:
    return net.own(torch.stack((a, b), 1)).mean(1)


_modules(
    "linear",
    lambda n: nn.Linear(n.h, n.h),
    lambda n: nn.Linear(n.h, n.h, bias=False),
    lambda n: nn.Sequential(nn.Linear(n.h, 2 * n.h), nn.ReLU(), nn.Linear(2 * n.h, n.h)),
    lambda n: nn.Sequential(nn.Linear(n.h, 2 * n.h), nn.GLU()),
)
_modules("linear_transposed", lambda n: nn.Linear(n.s, n.s), apply=_channels_first)
_modules(
    "norm",
    lambda n: nn.LayerNorm(n.h),
    lambda n: nn.LayerNorm(n.h, elementwise_affine=False),
    lambda n: nn.LayerNorm((n.s, n.h), bias=False),
    lambda n: nn.RMSNorm(n.h),
)
_modules(
    "channel_norm",
    lambda n: nn.BatchNorm1d(n.h),
    lambda n: nn.BatchNorm1d(n.h, affine=False, track_running_stats=False),
    lambda n: nn.GroupNorm(n.heads, n.h),
    lambda n: nn.InstanceNorm1d(n.h, affine=True),
    apply=_channels_first,
)
_modules(
    "dropout",
    lambda n: nn.Dropout(0.5),
    lambda n: nn.Dropout1d(0.5),
    lambda n: nn.AlphaDropout(0.2),
    lambda n: nn.Sequential(nn.Linear(n.h, n.h), nn.Dropout(0.1, inplace=True)),
)
_modules(
    "conv1d",
    lambda n: nn.Conv1d(n.h, n.h, 3, padding=1),
    lambda n: nn.Conv1d(n.h, n.h, 3, padding="same", dilation=2, groups=n.heads, bias=False),
    lambda n: nn.Conv1d(n.h, n.h, 1),
    lambda n: nn.Conv1d(n.h, n.h, 3, padding=1, groups=n.h, padding_mode="circular"),
    lambda n: nn.ConvTranspose1d(n.h, n.h, 3, padding=1),
    apply=_channels_first,
)
_modules(
    "conv2d",
    lambda n: nn.Conv2d(2, 3, 3, padding=1),
    lambda n: nn.Sequential(nn.Conv2d(2, 4, 3, padding=2, dilation=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    lambda n: nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.GroupNorm(2, 4), nn.Dropout2d(0.2)),
    lambda n: nn.ConvTranspose2d(2, 1, 3, padding=1),
    apply=_as_image,
)
_modules("pool1d", lambda n: nn.MaxPool1d(3, 1, 1), lambda n: nn.AvgPool1d(3, 1, 1), lambda n: nn.LPPool1d(2, 1))
_modules(
    "pool2d",
    lambda n: nn.MaxPool2d(3, 1, 1),
    lambda n: nn.AvgPool2d(3, 1, 1),
    lambda n: nn.Sequential(nn.AdaptiveAvgPool2d((2, 2)), nn.Upsample((n.s, n.h))),
    lambda n: nn.Sequential(nn.AdaptiveMaxPool2d((1, 2)), nn.Upsample((n.s, n.h), mode="bilinear")),
    apply=_as_image,
)
_modules(
    "attention_module",
    lambda n: nn.MultiheadAttention(n.h, n.heads, batch_first=True),
    lambda n: nn.MultiheadAttention(n.h, n.heads, dropout=0.1, bias=False),
    lambda n: nn.MultiheadAttention(n.h, n.heads, kdim=n.h, vdim=n.h, batch_first=True, add_bias_kv=True),
    apply=lambda net, a, b: net.own(a, b, b, need_weights=net.variant % 2 == 0)[0],
)
_modules(
    "self_attention_module",
    lambda n: nn.MultiheadAttention(n.h, n.heads, batch_first=True),
    lambda n: nn.MultiheadAttention(n.h, n.heads),
    apply=lambda net, a, b: net.own(a, a, a, need_weights=net.variant % 2 == 0)[0],
)
_modules(
    "encoder",
    lambda n: nn.TransformerEncoderLayer(n.h, n.heads, 2 * n.h, batch_first=True),
    lambda n: nn.TransformerEncoderLayer(n.h, n.heads, 2 * n.h, dropout=0.0, norm_first=True, activation="gelu"),
)
_modules(
    "recurrent",
    lambda n: nn.GRU(n.h, n.h, batch_first=True),
    lambda n: nn.RNN(n.h, n.h, 2, nonlinearity="relu"),
    lambda n: nn.GRU(n.h, n.h, bias=False),
    apply=lambda net, a, b: net.own(a)[0],
)
_modules(
    "lstm",
    lambda n: nn.LSTM(n.h, n.h, batch_first=True),
    lambda n: nn.LSTM(n.h, n.h, 2, dropout=0.1, bias=False),
    apply=lambda net, a, b: net.own(a)[0],
)
_modules("bilinear", lambda n: nn.Bilinear(n.h, n.h, n.h), apply=lambda net, a, b: net.own(a, b))
_modules("prelu", lambda n: nn.PReLU(), lambda n: nn.Sequential(nn.PReLU(n.s)))
_modules(
    "parametrized",
    lambda n: nn.utils.parametrizations.weight_norm(nn.Linear(n.h, n.h)),
    lambda n: nn.utils.parametrizations.spectral_norm(nn.Linear(n.h, n.h)),
)


class Gain(nn.Module):
    """Learned numbers of several shapes, as layer scale and temperatures are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(shape))

    def forward(self, a: Tensor) -> Tensor:
        return a * self.gain + self.gain


_modules("gain", lambda n: Gain(()), lambda n: Gain((n.h,)), lambda n: Gain((n.s, 1)), lambda n: Gain((1, 1, n.h)))


class Checkpointed(nn.Module):
    """Two layers whose activations are made anew in backward."""

    def __init__(self, n: Size, reentrant: bool, last: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(n.h, 2 * n.h), nn.GELU(), nn.Linear(2 * n.h, n.h), last)
        self.reentrant = reentrant

    def forward(self, a: Tensor) -> Tensor:
        return checkpoint(self.inner, a, use_reentrant=self.reentrant)


_modules(
    "checkpoint",
    lambda n: Checkpointed(n, False, nn.Dropout(0.1)),
    lambda n: Checkpointed(n, True, nn.Dropout(0.1)),
    lambda n: Checkpointed(n, False, nn.LayerNorm(n.h)),
)


class Swish(torch.autograd.Function):
    """A gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        gate = torch.sigmoid(a)
        ctx.save_for_backward(a, gate)
        return a * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        a, gate = ctx.saved_tensors
        return grad * (gate + a * gate * (1 - gate))


_step(
    "activation",
    lambda net, a, b: a.relu(),
    lambda net, a, b: F.gelu(a),
    lambda net, a, b: F.gelu(a, approximate="tanh"),
    lambda net, a, b: F.silu(a),
    lambda net, a, b: a.tanh(),
    lambda net, a, b: a.sigmoid(),
    lambda net, a, b: F.elu(a),
    lambda net, a, b: F.leaky_relu(a, 0.1),
    lambda net, a, b: F.softplus(a),
    lambda net, a, b: F.hardswish(a),
    lambda net, a, b: F.hardsigmoid(a),
    lambda net, a, b: F.hardtanh(a),
    lambda net, a, b: F.selu(a),
    lambda net, a, b: F.celu(a, 0.5),
    lambda net, a, b: F.relu6(a),
    lambda net, a, b: F.softsign(a),
    lambda net, a, b: F.logsigmoid(a),
    lambda net, a, b: F.tanhshrink(a),
    lambda net, a, b: F.softshrink(a),
    lambda net, a, b: F.hardshrink(a),
    lambda net, a, b: F.threshold(a, 0.1, 0.0),
    lambda net, a, b: F.rrelu(a, training=net.model.training),
    lambda net, a, b: F.mish(a),
    lambda net, a, b: F.glu(torch.cat((a, b), -1)),
    lambda net, a, b: a.softmax(-1),
    lambda net, a, b: a.softmax(1),
    lambda net, a, b: a.log_softmax(-1),
    lambda net, a, b: F.normalize(a, dim=-1),
    lambda net, a, b: Swish.apply(a),
)
_step(
    "pointwise",
    lambda net, a, b: a.exp().clamp(max=3.0),
    lambda net, a, b: (a * a + 1).log(),
    lambda net, a, b: (a * a + 1).sqrt(),
    lambda net, a, b: (a.abs() + 1).rsqrt(),
    lambda net, a, b: a.sin() * b.cos(),
    lambda net, a, b: a.abs(),
    lambda net, a, b: a.erf(),
    lambda net, a, b: a.square(),
    lambda net, a, b: a.reciprocal().clamp(-1, 1),
    lambda net, a, b: torch.atan2(a, b),
    lambda net, a, b: torch.expm1(a),
    lambda net, a, b: a.log1p().nan_to_num(),
    lambda net, a, b: a.clamp(b - 1, b + 1),
    lambda net, a, b: a.round() + a.sign(),
)
_step(
    "scalar",
    lambda net, a, b: a * 2,
    lambda net, a, b: a / math.sqrt(net.size.h),
    lambda net, a, b: 1 - a,
    lambda net, a, b: a - 1,
    lambda net, a, b: 2 / (a * a + 1),
    lambda net, a, b: a**2,
    lambda net, a, b: a**3,
    lambda net, a, b: (a * a + 1) ** 0.5,
    lambda net, a, b: 2**a,
    lambda net, a, b: -a,
    lambda net, a, b: a * True,
    lambda net, a, b: a * 2 + b * 3.0 - 1,
    lambda net, a, b: a * torch.tensor(2.0),
    lambda net, a, b: a + torch.arange(net.size.h),
    lambda net, a, b: a % 2,
    lambda net, a, b: torch.add(a, b, alpha=2),
    lambda net, a, b: torch.rsub(a, b, alpha=2),
    lambda net, a, b: torch.sub(a, b, alpha=0.5),
)
_step(
    "combine",
    lambda net, a, b: a + b,
    lambda net, a, b: a * b,
    lambda net, a, b: a - b,
    lambda net, a, b: a / (b.abs() + 1),
    lambda net, a, b: torch.maximum(a, b),
    lambda net, a, b: torch.minimum(a, b),
    lambda net, a, b: torch.lerp(a, b, 0.3),
    lambda net, a, b: torch.lerp(a, b, a.sigmoid()),
    lambda net, a, b: torch.addcmul(a, a, b, value=0.5),
    lambda net, a, b: torch.addcdiv(a, b, b * b + 1),
    lambda net, a, b: torch.where(a > 0, a, b),
    lambda net, a, b: torch.where(a > 0, a, 0.0),
    lambda net, a, b: (a > b) * a,
    lambda net, a, b: a + b.detach(),
    lambda net, a, b: a + sum((a, b, a)),
    lambda net, a, b: a.hypot(b + 3),
    lambda net, a, b: a + b.mean(1, keepdim=True),
    lambda net, a, b: a * b[:, :1],
    lambda net, a, b: a.masked_fill(b > 0, -1e4),
    lambda net, a, b: torch.logaddexp(a, b),
    lambda net, a, b: a.pow(b * b),
    lambda net, a, b: torch.copysign(a, b),
    lambda net, a, b: a.fmod(b.abs() + 1),
)
_step(
    "view",
    lambda net, a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
    lambda net, a, b: a.transpose(1, 2).contiguous().transpose(1, 2),
    lambda net, a, b: torch.cat((a, b), -1)[..., : net.size.h],
    lambda net, a, b: torch.cat((a, b), 1)[:, ::2],
    lambda net, a, b: torch.stack((a, b), 1)[:, 1],
    lambda net, a, b: a[:, :1].expand_as(a),
    lambda net, a, b: a.mean().expand(a.shape),
    lambda net, a, b: a.mean(-1, keepdim=True).expand(-1, -1, net.size.h),
    lambda net, a, b: a.reshape(-1).view(a.shape),
    lambda net, a, b: a.permute(2, 0, 1).reshape(net.size.b, net.size.s, net.size.h),
    lambda net, a, b: a.flatten(1).unflatten(1, (net.size.s, net.size.h)),
    lambda net, a, b: a.unsqueeze(1).squeeze(1),
    lambda net, a, b: torch.cat(a.chunk(2, -1)[::-1], -1),
    lambda net, a, b: torch.cat(a.split(2, 1), 1),
    lambda net, a, b: torch.stack(a.unbind(1), 1),
    lambda net, a, b: torch.stack(a.unbind(2), 2),
    lambda net, a, b: a.flip(1),
    lambda net, a, b: a.roll(1, 1),
    lambda net, a, b: a.repeat(1, 2, 1)[:, : net.size.s],
    lambda net, a, b: a.repeat_interleave(2, -1)[..., ::2],
    lambda net, a, b: F.pad(a, (1, 1))[..., 1:-1],
    lambda net, a, b: F.pad(a, (0, 0, 1, 0))[:, :-1],
    lambda net, a, b: torch.cat((a[:, :1], b[:, 1:]), 1),
    lambda net, a, b: a.tril(),
    lambda net, a, b: a.unfold(1, 1, 1).squeeze(-1),
    lambda net, a, b: a.movedim(0, 2).contiguous().movedim(2, 0),
    lambda net, a, b: a.view(net.size.b, net.size.s, net.size.heads, -1).transpose(1, 2).flatten(2).view_as(a),
    lambda net, a, b: torch.diag_embed(a).diagonal(dim1=-2, dim2=-1),
    lambda net, a, b: a.narrow(1, 0, 1) + b.select(1, -1).unsqueeze(1) + a,
    lambda net, a, b: torch.vstack((a, b))[: net.size.b],
    lambda net, a, b: a.to(torch.float64).to(a.dtype),
    lambda net, a, b: a.clone(),
)
_step(
    "in_place",  # on a tensor that nothing else needs
    lambda net, a, b: (a + 1).relu_(),
    lambda net, a, b: (a + b).tanh_(),
    lambda net, a, b: (a + b).sigmoid_(),
    lambda net, a, b: (a + b).add_(1).mul_(2).sub_(a),
    lambda net, a, b: (a * 2).clamp_(-1, 1),
    lambda net, a, b: (a - 1).masked_fill_(b > 0, 0.0),
    lambda net, a, b: F.leaky_relu(a + b, inplace=True),
    lambda net, a, b: F.silu(a + b, inplace=True),
    lambda net, a, b: F.dropout(a + b, 0.2, net.model.training, inplace=True),
    lambda net, a, b: torch.zeros_like(a).copy_(a),
    lambda net, a, b: (a + 1).div_(b.abs() + 1),
    lambda net, a, b: (a + 1).addcmul_(a, b),
    lambda net, a, b: (a + 1).lerp_(b, 0.5),
    lambda net, a, b: (a + 1).transpose_(0, 1).transpose_(0, 1),
    lambda net, a, b: torch.empty_like(a).zero_().add_(b),
    lambda net, a, b: (a + 1).index_add_(1, torch.tensor([0, 1]), b[:, :2]),
    lambda net, a, b: (a + 1).fill_diagonal_(0.0) if net.size.b == net.size.s == net.size.h else a + 1,
)


def _assign(change: Callable[[Tensor, Tensor, Tensor], None]) -> Apply:
    def apply(net: Context, a: Tensor, b: Tensor) -> Tensor:
        fresh = a * 1.5
        change(fresh, a, b)
        return fresh

    return apply


def _set(index: Any, value: Callable[[Tensor, Tensor], Any]) -> Apply:
    def change(fresh: Tensor, a: Tensor, b: Tensor) -> None:
        fresh[index] = value(a, b)

    return _assign(change)


_step(
    "assign",  # in place through a view
    _set((slice(None), 0), lambda a, b: 0),
    _set((slice(None), 0), lambda a, b: 0.5),
    _set((slice(None), slice(0, 1)), lambda a, b: b[:, :1]),
    _set((..., 0), lambda a, b: b[..., 1]),
    _set(0, lambda a, b: b[0]),
    _assign(lambda fresh, a, b: fresh[:, :1].add_(b[:, :1])),
    _assign(lambda fresh, a, b: fresh.select(1, 0).mul_(2)),
    _assign(lambda fresh, a, b: fresh.transpose(0, 1).add_(1)),
    _assign(lambda fresh, a, b: fresh.unsqueeze(0).relu_()),
    _assign(lambda fresh, a, b: fresh.narrow(-1, 0, 2).zero_()),
)
_step(
    "reduce",
    lambda net, a, b: a - a.mean(-1, keepdim=True),
    lambda net, a, b: a - a.mean(),
    lambda net, a, b: a - a.sum((0, 1)),
    lambda net, a, b: a / (a.std(-1, keepdim=True) + 1),
    lambda net, a, b: a / (a.var(1, keepdim=True, unbiased=False) + 1).sqrt(),
    lambda net, a, b: a - a.max(-1, keepdim=True)[0],
    lambda net, a, b: a - a.amax(1, keepdim=True),
    lambda net, a, b: a + a.min(1, keepdim=True).values,
    lambda net, a, b: a - a.logsumexp(-1, keepdim=True),
    lambda net, a, b: a / (a.norm(dim=-1, keepdim=True) + 1),
    lambda net, a, b: a / (a.norm() + 1),
    lambda net, a, b: a / (a.abs().sum(-1, keepdim=True) + 1),
    lambda net, a, b: a + a.topk(2, -1)[0].sum(-1, keepdim=True),
    lambda net, a, b: a.sort(-1)[0],
    lambda net, a, b: a.cumsum(1),
    lambda net, a, b: a + a.median(-1, keepdim=True)[0],
    lambda net, a, b: a * a.argmax(-1, keepdim=True),
    lambda net, a, b: a.cummax(1)[0],
    lambda net, a, b: a + torch.linalg.vector_norm(b, ord=1, dim=(1, 2), keepdim=True),
    lambda net, a, b: a - sum(torch.var_mean(a, -1, keepdim=True)),
    lambda net, a, b: a + (a > 0).sum(-1, keepdim=True),
    lambda net, a, b: a + F.one_hot(b.argmax(-1), net.size.h),
    lambda net, a, b: a + torch.dist(a, b),
    lambda net, a, b: a + F.cosine_similarity(a, b, dim=-1).unsqueeze(-1),
    lambda net, a, b: a + a.nanmean(-1, keepdim=True),
)
_step(
    "product",
    lambda net, a, b: a @ (a.transpose(1, 2) @ b),
    lambda net, a, b: torch.bmm(torch.bmm(a, b.mT), a),
    lambda net, a, b: torch.einsum("bij,bkj->bik", a, b) @ a,
    lambda net, a, b: torch.einsum("bsh,bsh->bs", a, b).unsqueeze(-1) * a,
    lambda net, a, b: torch.einsum("bsh,bth->bst", a, b).softmax(-1) @ b,
    lambda net, a, b: torch.einsum("bsh,h->bs", a, a[0, 0]).unsqueeze(-1) + b,
    lambda net, a, b: a * (a @ b[0, 0]).unsqueeze(-1),
    lambda net, a, b: (a.flatten(0, 1) @ b[0].T).mean(-1).view(net.size.b, net.size.s, 1) + a,
    lambda net, a, b: torch.baddbmm(a, a @ b.mT, b, beta=0.5, alpha=2),
    lambda net, a, b: a + torch.tensordot(a, b, dims=([0, 1], [0, 1])).sum(0),
    lambda net, a, b: torch.cdist(a.float(), b.float()).sum(-1, keepdim=True).to(a.dtype) + a,
    lambda net, a, b: a.matmul(b[0].T) @ a,
    lambda net, a, b: F.linear(a.transpose(0, 1), b[0].T @ b[0], a[0, 0]).transpose(0, 1),
)


def _by_hand(net: Context, a: Tensor, b: Tensor) -> Tensor:
    """Attention as textbooks write it, in four ways of masking and dropping."""
    n = net.size
    q, k, v = (net.own(t).view(n.b, n.s, n.heads, -1).transpose(1, 2) for t in (a, b, b))
    scores = q @ k.transpose(-2, -1) / math.sqrt(n.h // n.heads)
    if net.variant % 2:
        scores = scores.masked_fill(torch.ones(n.s, n.s, dtype=torch.bool).triu(1), float("-inf"))
    weights = F.dropout(scores.softmax(-1), 0.1, net.model.training and net.variant > 1)
    return (weights @ v).transpose(1, 2).reshape(n.b, n.s, n.h)


def _fused(net: Context, a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's attention: causal, masked by booleans, by numbers, or not; with dropout, or one key for all queries."""
    n = net.size
    q, k, v = (net.own(t).view(n.b, n.s, n.heads, -1).transpose(1, 2) for t in (a, b, a))
    options: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(n.s, n.s, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(n.s, n.s, dtype=a.dtype)},
        {"dropout_p": 0.1 if net.model.training else 0.0, "is_causal": True},
        {"is_causal": True, "enable_gqa": True},
    ]
    if net.variant % len(options) == 5:
        k, v = k[:, :1], v[:, -1:]
    made = F.scaled_dot_product_attention(q, k, v, **options[net.variant % len(options)])
    return made.transpose(1, 2).reshape(n.b, n.s, n.h)


_modules("attention", *[lambda n: nn.Linear(n.h, n.h)] * 4, apply=_by_hand)
_modules("fused_attention", *[lambda n: nn.Linear(n.h, n.h)] * 6, apply=_fused)
_step(
    "index",
    lambda net, a, b: a[:, torch.arange(net.size.s)] + b,
    lambda net, a, b: a[torch.arange(net.size.b)],
    lambda net, a, b: a.index_select(1, torch.arange(net.size.s - 1, -1, -1)),
    lambda net, a, b: a.gather(1, torch.zeros(a.shape, dtype=torch.long)),
    lambda net, a, b: torch.zeros_like(a).scatter(1, torch.zeros(a.shape, dtype=torch.long), b),
    lambda net, a, b: a.scatter_add(1, torch.zeros(a.shape, dtype=torch.long), b),
    lambda net, a, b: a.index_add(1, torch.arange(net.size.s), b),
    lambda net, a, b: a.index_copy(1, torch.tensor([0]), b[:, :1]),
    lambda net, a, b: a.take_along_dim(b.argsort(-1), -1),
    lambda net, a, b: a[:, [0, 1], :1].mean(1, keepdim=True) + b,
    lambda net, a, b: a[..., [0, -1]].sum(-1, keepdim=True) * b,
    lambda net, a, b: torch.index_put(a, (torch.tensor([0]),), b[:1]),
    lambda net, a, b: F.embedding(torch.arange(net.size.s), a[0]) + b,
)


def _inner_no_grad(net: Context, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        target = (b * 2).softmax(-1) + a.tanh()
    return a * target


_step("no_grad", _inner_no_grad, lambda net, a, b: a.detach() + b, lambda net, a, b: a + (b.round() - b).detach())

# -- losses, optimizers, data ------------------------------------------------------------------------------------------

Loss = Callable[[Model, Tensor, Tensor, Tensor], Tensor]


def _classes(model: Model, y: Tensor) -> Tensor:
    return model.head(y).flatten(0, 1)


def _pinball(model: Model, y: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    error = target.unsqueeze(-1) - y.unsqueeze(-1)
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=y.dtype)
    return torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


LOSSES: dict[str, Loss] = {
    "mean": lambda model, y, target, tokens: y.float().mean(),
    "sum": lambda model, y, target, tokens: y.sum(),
    "square": lambda model, y, target, tokens: (y - target).pow(2).mean(),
    "mse": lambda model, y, target, tokens: F.mse_loss(y, target),
    "mse_sum": lambda model, y, target, tokens: F.mse_loss(y, target, reduction="sum"),
    "mse_none": lambda model, y, target, tokens: F.mse_loss(y, target, reduction="none").mean(),
    "l1": lambda model, y, target, tokens: F.l1_loss(y, target),
    "smooth_l1": lambda model, y, target, tokens: F.smooth_l1_loss(y, target, beta=0.5),
    "huber": lambda model, y, target, tokens: F.huber_loss(y, target),
    "pinball": _pinball,
    "bce_logits": lambda model, y, target, tokens: F.binary_cross_entropy_with_logits(y, target.sigmoid()),
    "bce": lambda model, y, target, tokens: F.binary_cross_entropy(y.sigmoid().nan_to_num(), target.sigmoid()),
    "kl": lambda model, y, target, tokens: F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
    "poisson": lambda model, y, target, tokens: F.poisson_nll_loss(y, target),
    "soft_margin": lambda model, y, target, tokens: F.soft_margin_loss(y, target.sign()),
    "cosine": lambda model, y, target, tokens: 1 - F.cosine_similarity(y, target, dim=-1).mean(),
    "ce": lambda model, y, target, tokens: F.cross_entropy(_classes(model, y), tokens.flatten()),
    "ce_smooth": lambda model, y, target, tokens: F.cross_entropy(
        _classes(model, y), tokens.flatten(), label_smoothing=0.1
    ),
    "ce_ignore": lambda model, y, target, tokens: F.cross_entropy(
        _classes(model, y), tokens.flatten(), ignore_index=1, reduction="sum"
    ),
    "ce_positions": lambda model, y, target, tokens: F.cross_entropy(model.head(y).transpose(1, 2), tokens),
    "nll": lambda model, y, target, tokens: F.nll_loss(_classes(model, y).log_softmax(-1), tokens.flatten()),
    "tied_ce": lambda model, y, target, tokens: F.cross_entropy(_classes(model, y), tokens.flatten()),
    "two": lambda model, y, target, tokens: F.mse_loss(y, target) + 0.1 * y.abs().mean(),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, 0.1, **o),
    "momentum": lambda p, **o: torch.optim.SGD(p, 0.1, momentum=0.9, **o),
    "nesterov": lambda p, **o: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, **o),
    "amsgrad": lambda p, **o: torch.optim.Adam(p, amsgrad=True, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, **o),
    "rmsprop_centered": lambda p, **o: torch.optim.RMSprop(p, momentum=0.9, centered=True, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, **o),
    "adamax": lambda p, **o: torch.optim.Adamax(p, **o),
    "nadam": lambda p, **o: torch.optim.NAdam(p, **o),
    "radam": lambda p, **o: torch.optim.RAdam(p, **o),
    "adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
}

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "strided": lambda x: x.repeat(2, -1)[..., ::2],
    "reversed": lambda x: x[:, ::-1],
    "expanded": lambda x: np.broadcast_to(x[:1], x.shape),
}


def train(run: Any, network: Network) -> None:
    """The training code: one body, traced and measured."""
    plan, dtype = network.training, getattr(torch, network.dtype)
    rng = np.random.default_rng(0)
    shape = (network.batch, network.length, network.width)
    x = LAYOUTS[network.layout](rng.standard_normal(shape, np.float32))
    data = {"x": x, "target": rng.standard_normal(shape, np.float32), "tokens": rng.integers(0, VOCABULARY, shape[:2])}
    if dtype != torch.float32:
        data |= {name: torch.tensor(data[name].copy(), dtype=dtype, device="cpu") for name in ("x", "target")}

    torch.manual_seed(0)
    model = Model(network).to(dtype)
    optimizer = OPTIMIZERS[plan.optimizer](model.parameters(), foreach=plan.foreach, weight_decay=plan.weight_decay)
    loss_of = LOSSES[network.loss]
    for _ in run.steps(plan.steps):
        batch = run.to_device(data)
        for _ in range(plan.accumulate):
            with torch.autocast("cpu", enabled=plan.autocast):
                loss = loss_of(model, model(batch["x"], batch["tokens"]), batch["target"], batch["tokens"])
            if plan.retain_graph:
                loss.backward(retain_graph=True)
            loss.backward()
        if plan.clip == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif plan.clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=plan.set_to_none)
        if plan.evaluate:
            model.eval()
            with torch.no_grad():
                model(batch["x"], batch["tokens"])
            model.train()


# -- strategies --------------------------------------------------------------------------------------------------------

steps = st.sampled_from(sorted(STEPS)).flatmap(
    lambda kind: st.builds(
        Step,
        kind=st.just(kind),
        variant=st.integers(0, VARIANTS[kind] - 1),
        slot=st.integers(0, 1),
        a=st.integers(0, OPERANDS - 1),
        b=st.integers(0, OPERANDS - 1),
    )
)
trainings = st.builds(
    Training,
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    foreach=st.sampled_from([None, False, True]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clip=st.sampled_from(["", "norm", "value"]),
    set_to_none=st.booleans(),
    autocast=st.sampled_from([False, False, True]),
    accumulate=st.integers(1, 2),
    retain_graph=st.booleans(),
    evaluate=st.booleans(),
    steps=st.integers(1, 2),
)
networks = st.builds(
    lambda head_width, heads, **rest: Network(width=head_width * heads, heads=heads, **rest),
    head_width=st.sampled_from([4, 5, 7, 8, 2]),
    heads=st.integers(1, 4),
    steps=st.lists(steps, min_size=1, max_size=8).map(tuple),
    batch=st.integers(1, 4),
    length=st.integers(2, 9),
    dtype=st.sampled_from(["float32", "float32", "float32", "bfloat16"]),
    layout=st.sampled_from(list(LAYOUTS)),
    loss=st.sampled_from(list(LOSSES)),
    training=trainings,
)

# -- the properties ----------------------------------------------------------------------------------------------------


def _traced(network: Network) -> Timeline:
    """Without what libraries take for themselves: oneDNN compiles a kernel for each shape that it is asked about."""
    with mock.patch.object(rules.asked, "MOST_BYTES", -1), everybyte.trace(rules="cpu") as run:
        train(run, network)
    return run.timeline


def _measured(network: Network) -> Timeline:
    with everybyte.measure(device="cpu") as run:
        train(run, network)
    return run.timeline


def _traced_if_it_runs(network: Network) -> Timeline:
    try:
        return _traced(network)
    except RuntimeError:
        if network.training.autocast:
            reject()
        raise


@pytest.mark.filterwarnings("ignore")
@given(networks)
@example(Network((Step("checkpoint", 2),)))  # recomputation stops inside the op that saves last
@example(Network((Step("fused_attention", 5),), width=16, heads=4))
def test_what_is_traced_is_what_a_real_run_allocates(network: Network) -> None:
    """The peak and every size allocated, scratch apart; and what fails for real fails when it is traced."""
    try:
        real = _measured(network)
    except RuntimeError:
        assert network.training.autocast  # has made dtypes meet that do not go together
        with pytest.raises(RuntimeError):
            _traced(network)
        return
    traced = _traced(network)
    not_covered = traced.info["not_covered"]
    event(f"not covered: {', '.join(not_covered) or 'nothing'}")
    assume(not not_covered)
    differences = differences_between(traced.without("scratch"), real.without("scratch"))
    assert not differences, f"\n{network}\n{differences}"


@pytest.mark.filterwarnings("ignore")
@given(networks)
def test_remembering_what_kernels_return_changes_no_event(network: Network) -> None:
    remembered = _traced_if_it_runs(network)
    with pytest.MonkeyPatch.context() as patch:
        look = kernels.Plan.look
        patch.setattr(kernels.Plan, "look", lambda plan, args, kwargs: (*look(plan, args, kwargs)[:2], None))
        patch.setattr(direct.Direct, "kind", lambda *call: None)
        asked = _traced(network)
    assert remembered.table.equals(asked.table), f"\n{network}"


@pytest.mark.filterwarnings("ignore")
@given(networks)
def test_every_byte_has_an_owner_and_every_release_a_beginning(network: Network) -> None:
    timeline = _traced_if_it_runs(network)
    for key in ("module", "op", "category"):
        assert timeline.by(key)["nbytes"].sum() == timeline.peak_bytes, key
    frame = timeline.frame()
    assert set(frame["phase"]) <= set(PHASES)
    born = frame[frame["action"] == "alloc"].reset_index().set_index("storage")
    died = frame[frame["action"] == "free"].reset_index().set_index("storage")
    assert born.index.is_unique
    assert died.index.is_unique
    assert died.index.isin(born.index).all()
    assert (born["index"].reindex(died.index) < died["index"]).all()
    assert (born["nbytes"].reindex(died.index) == died["nbytes"]).all()
