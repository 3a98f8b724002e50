"""A layer of LLaMA in plain operations, as the `transformers` library first had it, in spring 2023.

The model: Touvron et al. 2023, arXiv 2302.13971. RMSNorm: Zhang and Sennrich 2019, arXiv 1910.07467. Rotary positions:
Su et al. 2021, arXiv 2104.09864. SwiGLU: Shazeer 2020, arXiv 2002.05202. What makes it differ from its description is
where it computes in single precision, and that it clamps the masked scores: both leave tensors behind.

Shapes, in end-of-line comments: b batch, s sequence, h hidden, a heads, d = h / a, f width of the MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gpt import CHOICES


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of LLaMA-7B, and one switch.

    Raises:
        ValueError: a size that is no positive integer, heads whose width is odd or that do not divide the hidden size,
            or an unknown dtype.
    """

    hidden: int = 4096  # h
    heads: int = 32  # a
    d_ff: int = 11_008  # f: 8h/3, rounded up to a multiple of 256
    layers: int = 32  # how often the layer is there
    softmax_in_fp32: bool = True  # of the scores; its result goes back to the model's dtype
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "d_ff", "layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number from 1 up")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden={self.hidden}, heads={self.heads}: rotary positions need heads of an even width: the hidden "
                "size must be a multiple of twice the heads"
            )
        if self.dtype not in CHOICES["dtype"]:
            raise ValueError(f"dtype={self.dtype!r} is unknown: choose one of {', '.join(CHOICES['dtype'])}")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²)) * weight. The mean is taken in single precision, of a copy that its gradient needs."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)  # (b, s, 1), fp32
        return self.weight * (x * scale).to(x.dtype)


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); no biases, no dropout."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        h, f, dtype = config.hidden, config.d_ff, getattr(torch, config.dtype)
        self.attention_norm, self.mlp_norm = RMSNorm(h, dtype), RMSNorm(h, dtype)
        self.q, self.k, self.v, self.out = (nn.Linear(h, h, bias=False, dtype=dtype) for _ in range(4))
        self.gate, self.up = (nn.Linear(h, f, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(f, h, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h].

        Args:
            x: hidden states.
            cosine, sine: of the positions, [1, 1, s, d], from `rotary`.
            mask: added to the scores, [b or 1, 1, s, s], from `causal`.
        """
        x = x + self.attention(self.attention_norm(x), cosine, sine, mask)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (y * cosine + turned(y) * sine for y in (q, k))  # (b, a, s, d)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + mask  # (b, a, s, s)
        scores = torch.maximum(scores, mask.new_tensor(torch.finfo(mask.dtype).min))  # -inf would make nan
        if self.config.softmax_in_fp32:
            weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        else:
            weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    """Each pair (x, y) of coordinates turned to (-y, x), the halves of a head being the pairs' sides."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def rotary(config: LlamaConfig, sequence: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angle by which each position turns each pair: [1, 1, s, d], in the model's dtype."""
    width = config.hidden // config.heads
    speed = 10_000 ** (-torch.arange(0, width, 2) / width)  # (d/2)
    angle = torch.outer(torch.arange(sequence), speed).repeat(1, 2)[None, None]  # (1, 1, s, d)
    dtype = getattr(torch, config.dtype)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def causal(config: LlamaConfig, sequence: int) -> Tensor:
    """The least finite number wherever a query would see a later key: [1, 1, s, s], in the model's dtype."""
    dtype = getattr(torch, config.dtype)
    return torch.full((sequence, sequence), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
