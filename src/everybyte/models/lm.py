"""A language model in plain arithmetic: normalisation, attention, loss and AdamW by hand, nothing fused, no biases.

It is the model of public recordings of GPU memory, written from their description (chapter "Against real GPUs"), so
that a trace of it can be held against them.

Sources. Rotary positions: arXiv 2104.09864. RMSNorm: arXiv 1910.07467. SwiGLU: arXiv 2002.05202, equation 6. AdamW:
arXiv 1711.05101, here without the correction of the moments' bias.

Shapes, in end-of-line comments: b batch, s sequence, h hidden, a heads, d = h / a, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LMConfig:
    """Sizes; the default is the recorded model of 423 million parameters."""

    context: int = 128  # tokens in a sequence: rows of the rotary tables
    vocabulary: int = 10_000  # V
    hidden: int = 1024  # h
    layers: int = 24
    heads: int = 16  # a
    d_ff: int = 4096  # width of the MLP


class Linear(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours turned by an angle for each position, the two halves side by side: [b, a, s, d] as given."""
    even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
    first = even * cos - odd * sin
    second = even * sin + odd * cos
    return torch.cat((first, second), -1)


def softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, -1, keepdim=True).values
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.heads, h = config.heads, config.hidden
        self.q, self.k, self.v, self.out = (Linear(h, h) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))  # [b, a, s, d]
        q = rotated(q, cos, sin)
        k = rotated(k, cos, sin)
        position = torch.arange(s)
        mask = position[:, None] >= position[None, :]
        attended = self.attend(q, k, v, mask).transpose(1, 2).reshape(b, s, -1)
        return self.out(attended)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])  # [b, a, s, s]
        scores = torch.where(mask, scores, -math.inf)
        weights = softmax(scores)
        return torch.einsum("...qk,...kd->...qd", weights, v).contiguous()


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(hidden, d_ff), Linear(d_ff, hidden), Linear(hidden, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class LMBlock(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config.hidden, config.d_ff)
        self.norm1, self.norm2 = RMSNorm(config.hidden), RMSNorm(config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x), cos, sin)
        x = x + attended
        return x + self.feed_forward(self.norm2(x))


class LM(nn.Module):
    """Token ids [b, s] to logits [b, s, V]. Its weights are not initialised: it is there to be counted."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.blocks = nn.ModuleList(LMBlock(config) for _ in range(config.layers))
        self.norm, self.head = RMSNorm(config.hidden), Linear(config.hidden, config.vocabulary)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.context, config.hidden // config.heads // 2))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding[tokens]  # held to the end, as in the recorded code
        x = embedded
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    highest = torch.max(x, -1, keepdim=True).values
    x = x - highest
    return x - torch.log(torch.exp(x).sum(-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean surprise of logits [b, s, V] at targets [b, s], a scalar."""
    surprise = -log_softmax(logits)
    return surprise.gather(-1, targets[..., None]).mean()


class AdamW(torch.optim.Optimizer):
    """One parameter at a time; the arithmetic makes new tensors, and new moments take the place of the old."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "decay": decay})

    def step(self) -> None:
        for group in self.param_groups:
            lr, (b1, b2), eps, decay = group["lr"], group["betas"], group["eps"], group["decay"]
            for p in group["params"]:
                state = self.state[p]
                p.data -= lr * decay * p.data
                m = state.get("m", torch.zeros_like(p.data))
                v = state.get("v", torch.zeros_like(p.data))
                state["m"] = b1 * m + (1 - b1) * p.grad.data
                state["v"] = b2 * v + (1 - b2) * p.grad.data**2
                p.data -= lr * state["m"] / (torch.sqrt(state["v"]) + eps)


def learn(model: LM, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, autocast: bool = False) -> None:
    """One training step on [b, s] tokens, as in the recorded code: logits and loss go only after the update."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = model(tokens)
        loss = cross_entropy(logits, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
