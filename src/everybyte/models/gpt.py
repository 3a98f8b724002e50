"""A pre-norm decoder in one file, with a switch for each choice that changes what a training step or a request keeps.

Sources. The shape of the file and the model: nanoGPT, <https://github.com/karpathy/nanoGPT>, and GPT-2 (Radford et al.,
2019). Pre-norm: arXiv 2002.04745. GELU: arXiv 1606.08415. SwiGLU: arXiv 2002.05202, equation 6. Grouped-query
attention: arXiv 2305.13245. Scores by `baddbmm`, so that the mask is an addend and not kept: Megatron-LM,
<https://github.com/NVIDIA/Megatron-LM>. Recomputing the attention core alone: arXiv 2205.05198, section 5. Fused
attention: arXiv 2205.14135. Tied head: arXiv 1608.05859.

Shapes, in end-of-line comments: b batch, s sequence, h hidden, a heads, g groups (heads that keys and values have),
d = h / a, f width of the MLP, V vocabulary; t is the number of positions that are attended to, s without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHOICES: Mapping[str, tuple[str, ...]] = {
    "mlp": ("gelu", "relu", "swiglu", "swiglu fused"),
    "attention": ("eager", "fused"),
    "mask": ("added", "boolean"),
    "positions": ("learned", "none"),
    "checkpoint": ("none", "selective", "full"),
    "loss": ("full", "no upcast", "chunked"),
    "dtype": ("bfloat16", "float16", "float32"),
}
IGNORED = -100  # a target that counts for nothing, as in `F.cross_entropy`


@dataclass(frozen=True)
class GPTConfig:
    """Sizes, and a switch for each thing the book takes away or puts back. The default is small enough to run.

    Raises:
        ValueError: a size or a switch that no model can have; the message says how to mend it.
    """

    vocabulary: int = 256  # V; 256 reads bytes
    context: int = 64  # the longest sequence: rows of the table of positions, sides of a boolean mask
    layers: int = 2  # L
    hidden: int = 64  # h
    heads: int = 4  # a; each is h / a wide
    kv_heads: int | None = None  # heads of keys and values, each shared by a / kv_heads queries; None: a of them
    mlp: str = "gelu"  # "relu" keeps one tensor less, "swiglu" two more; "swiglu fused" computes two of them anew
    d_ff: int | None = None  # width of the MLP; None: 4h, for SwiGLU 8h/3 (whole part), which has as many parameters
    attention: str = "eager"  # every score in memory, as the classic formula counts them; "fused": none
    mask: str = "added"  # -inf is added to the scores and not kept; "boolean": a buffer, which the graph keeps
    dropout: float = 0.1  # of the attention weights and of both branches; the embedding has none
    biases: bool = True  # of the linear layers and the normalisations
    tied_head: bool = True  # the head's weight is the embedding's: V * h parameters fewer
    positions: str = "learned"  # a table, GPT-2's way; "none": a causal mask tells positions apart by itself
    checkpoint: str = "none"  # computed anew in backward: the attention core ("selective"), each whole block ("full")
    loss: str = "full"  # logits to fp32 before the loss; "no upcast": as they are; "chunked": a few tokens at a time
    chunks: int = 8  # of the chunked loss
    dtype: str = "bfloat16"  # of every parameter, and so of every activation

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if "int" in field.type and not (value is None and "None" in field.type):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(f"{name}={value!r} is not a whole number: give an int from 1 up")
                if value < 1:
                    raise ValueError(f"{name}={value} leaves nothing to compute: give at least 1")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not a switch: give True or False")
            if name in CHOICES and value not in CHOICES[name]:
                raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(CHOICES[name])}")
        rate = self.dropout
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"dropout={rate!r} is not a rate: give a number from 0 up to, not including, 1")
        if self.hidden % self.heads:
            near = self.heads * max(1, round(self.hidden / self.heads))
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}: {near} would be")
        if self.heads % self.groups:
            raise ValueError(
                f"heads={self.heads} cannot share kv_heads={self.groups} evenly: give a divisor of {self.heads}"
            )

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix."""
        return self.mlp.startswith("swiglu")

    @property
    def mlp_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 8 * self.hidden // 3 if self.gated else 4 * self.hidden

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @classmethod
    def seed(cls) -> GPTConfig:
        """The 1.3B model of *Activation Memory Math*: 1,278,332,928 parameters.

        It gives L, h, a, V, the sequence, bf16, GELU and dropout. That the head is tied, positions are learned and
        layers have biases is the reading, GPT-2's, with which its 1.28e9 parameters come out.
        """
        return cls(vocabulary=32_000, context=2048, layers=24, hidden=2048, heads=16)


class Attention(nn.Module):
    """Causal self-attention, eager or fused, over the sequence itself or over a cache as well."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        h, kv, dtype = config.hidden, config.groups * config.head_width, config.torch_dtype
        self.q = nn.Linear(h, h, config.biases, dtype=dtype)  # in one with k and v, a view would keep all three
        self.k = nn.Linear(h, kv, config.biases, dtype=dtype)
        self.v = nn.Linear(h, kv, config.biases, dtype=dtype)
        self.out = nn.Linear(h, h, config.biases, dtype=dtype)
        self.drop_weights = nn.Dropout(config.dropout)
        self.drop = nn.Dropout(config.dropout)
        if config.mask == "boolean" and config.attention == "eager":
            later = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)  # [s, s], True: hidden
            self.register_buffer("later", later, persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """[b, s, h] -> [b, s, h]; with a cache, whose ``layer`` is this one, its earlier positions are seen too."""
        config = self.config
        q, k, v = (
            project(x).unflatten(-1, (-1, config.head_width)).transpose(1, 2)  # (b, a, s, d), twice (b, g, s, d)
            for project in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = cache.update(layer, k, v)  # (b, g, t, d)
        core = self.eager if config.attention == "eager" else self.fused
        if config.checkpoint == "selective" and torch.is_grad_enabled():
            y = recomputed(core, q, k, v, random=config.dropout > 0)
        else:
            y = core(q, k, v)  # (b, s, h)
        return self.drop(self.out(y))

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every score in memory. Queries that share a key lie side by side, so that no key is repeated."""
        (b, a, s, d), (_, g, t, _) = q.shape, k.shape
        q = q.reshape(b * g, a // g * s, d)  # for a = g, (ba, s, d)
        k, v = k.reshape(b * g, t, d), v.reshape(b * g, t, d)
        scale = 1 / math.sqrt(d)
        if self.config.mask == "added":
            mask = torch.full((s, t), -math.inf, dtype=q.dtype, device=q.device).triu_(1 + t - s)
            mask = mask.expand(a // g, s, t).reshape(-1, t)  # (s, t) for each query of a key
            scores = torch.baddbmm(mask, q, k.mT, alpha=scale)  # (bg, s a/g, t)
        else:
            scores = (q @ k.mT * scale).view(b, a, s, t)
            scores = scores.masked_fill(self.later[t - s : t, :t], -math.inf).view(b * g, -1, t)
        weights = scores.softmax(-1)
        del scores  # no gradient formula needs them
        y = self.drop_weights(weights) @ v  # (bg, s a/g, d)
        return y.view(b, a, s, d).transpose(1, 2).reshape(b, s, -1)

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One kernel, which keeps the output and a log-sum-exp for each query."""
        (b, _, s, _), t = q.shape, k.shape[2]
        mask = None
        if 1 < s < t:  # behind a cache: the kernel's own causal mask starts at the first position
            mask = torch.ones(s, t, dtype=torch.bool, device=q.device).tril(t - s)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.drop_weights.p if self.training else 0.0, is_causal=s == t,
            enable_gqa=k.shape[1] < q.shape[1],
        )  # fmt: skip
        return y.transpose(1, 2).reshape(b, s, -1)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up that keeps its two inputs; what lies between is computed anew in backward."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = context.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)


class MLP(nn.Module):
    """[b, s, h] -> [b, s, f] -> [b, s, h]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        h, f, dtype = config.hidden, config.mlp_width, config.torch_dtype
        self.gate = nn.Linear(h, f, config.biases, dtype=dtype) if config.gated else None
        self.up = nn.Linear(h, f, config.biases, dtype=dtype)
        self.down = nn.Linear(f, h, config.biases, dtype=dtype)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "gelu":
                y = F.gelu(self.up(x))  # (b, s, f)
            case "relu":
                y = F.relu(self.up(x))
            case "swiglu":
                y = F.silu(self.gate(x)) * self.up(x)
            case "swiglu fused":
                y = SwiGLU.apply(self.gate(x), self.up(x))
        return self.drop(self.down(y))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = layer_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """[b, s, h] -> [b, s, h]. For ``cache`` and ``layer`` see `Attention`."""
        if self.config.checkpoint == "full" and torch.is_grad_enabled():
            return recomputed(self.run, x, cache, layer, random=self.config.dropout > 0)
        return self.run(x, cache, layer)

    def run(self, x: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, layer)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        V, h, dtype = config.vocabulary, config.hidden, config.torch_dtype
        self.tokens = nn.Embedding(V, h, dtype=dtype)
        self.positions = nn.Embedding(config.context, h, dtype=dtype) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = layer_norm(config)
        self.head = nn.Linear(h, V, bias=False, dtype=dtype)
        self.apply(self._start)
        for block in self.blocks:  # GPT-2: the residual stream is a sum of 2L branches
            for last in (block.attention.out, block.mlp.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * config.layers))
        if config.tied_head:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean cross-entropy.

        Args:
            tokens: [b, s], int64.
            targets: [b, s], int64, the token after each; -100 counts for nothing.

        Returns:
            Without targets the logits, [b, s, V] in the model's dtype; with them the loss, a number.

        Raises:
            ValueError: a sequence longer than the context.
        """
        x = self.states(tokens)
        return self.head(x) if targets is None else self.loss(x, targets)

    def states(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head reads, [b, s, h]. With a cache, ``tokens`` come after those in it, and are taken into it.

        Raises:
            ValueError: more positions than the context has; a cache while gradients are enabled.
        """
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("keys and values in a cache have no gradient: call it under torch.no_grad()")
        past, s = 0 if cache is None else cache.length, tokens.shape[1]
        if past + s > self.config.context:
            raise ValueError(
                f"{past + s} positions are more than context={self.config.context}: shorten the sequence, or give the "
                "config a longer context"
            )
        x = self.tokens(tokens)  # (b, s, h)
        if self.positions is not None:
            x = x + self.positions.weight[past : past + s]  # a view: no index is kept
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        if cache is not None:
            cache.length += s
        return self.norm(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """[b, s, h] and [b, s] -> mean cross-entropy. The logits are named nowhere, so that nothing holds them."""
        x, targets = x.flatten(0, 1), targets.flatten()  # (bs, h), (bs)
        match self.config.loss:
            case "full":
                return F.cross_entropy(self.head(x).float(), targets)
            case "no upcast":
                return F.cross_entropy(self.head(x), targets)
        count = (targets != IGNORED).sum()
        shares = [
            recomputed(self.share, rows, wanted, count, random=False)
            for rows, wanted in zip(x.chunk(self.config.chunks), targets.chunk(self.config.chunks), strict=True)
        ]
        return torch.stack(shares).sum()

    def share(self, x: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        """What a chunk of tokens adds to the mean over ``count``."""
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum") / count


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden, bias=config.biases, dtype=config.torch_dtype)


def recomputed(function: Any, *args: Any, random: bool) -> Any:
    """Keeps the arguments alone and calls the function again in backward, with the same random numbers if it draws."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random)


# -- inference ---------------------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of every layer, room for ``length`` positions allocated at once.

    2 * L * b * length * kv_heads * d elements of the model's dtype, and not a byte more.

    Attributes:
        length: positions taken so far.
    """

    def __init__(self, config: GPTConfig, batch: int, length: int, device: torch.device | None = None) -> None:
        """Args:
        config: of the model whose keys and values are kept.
        batch: b, sequences at once.
        length: positions there is room for, prompt and answer together.
        device: the model's; None: the default one.

        Raises:
            ValueError: a size below 1.
        """
        for name, value in (("batch", batch), ("length", length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} leaves nothing to keep: give a whole number from 1 up")
        self.batch, self.room, self.length = batch, length, 0
        self._allocate((2, config.layers, batch, config.groups, length, config.head_width), config.torch_dtype, device)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> None:
        self.kept = torch.empty(shape, dtype=dtype, device=device)  # (2, L, b, g, room, d)

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in one layer's new keys and values.

        `length` moves on once for all layers, in `GPT.states`.

        Args:
            layer: which.
            k, v: [b, g, s, d].

        Returns:
            Keys and values so far, [b, g, t, d] each.

        Raises:
            ValueError: no room for s more, or another batch size.
        """
        if len(k) != self.batch:
            raise ValueError(f"a batch of {len(k)} meets a cache of {self.batch} sequences: make one for {len(k)}")
        end = self.length + k.shape[2]
        if end > self.room:
            raise ValueError(f"{end} positions do not fit a cache with room for {self.room}: make a longer one")
        return self._keep(0, layer, end, k), self._keep(1, layer, end, v)

    def _keep(self, which: int, layer: int, end: int, new: Tensor) -> Tensor:
        kept = self.kept[which, layer, :, :, :end]
        kept[:, :, self.length :] = new
        return kept


class QuantizedKVCache(KVCache):
    """Keys and values as int8, one scale (float32) for each head and position of each: (d + 4) / 2d of a bf16 cache.

    Symmetric rounding to 127 steps of the largest magnitude: no value is off by more than half a step, 1/254 of it.
    A layer's keys and values so far are made whole in the model's dtype while that layer runs.
    """

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> None:
        self.dtype = dtype
        self.kept = torch.empty(shape, dtype=torch.int8, device=device)  # (2, L, b, g, room, d)
        self.scales = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)  # (2, L, b, g, room, 1)

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + self.scales.nbytes

    def _keep(self, which: int, layer: int, end: int, new: Tensor) -> Tensor:
        kept, scales = self.kept[which, layer, :, :, :end], self.scales[which, layer, :, :, :end]
        step = new.float().abs().amax(-1, keepdim=True) / 127  # (b, g, s, 1)
        scales[:, :, self.length :] = step
        kept[:, :, self.length :] = (new / step.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        return (kept * scales).to(self.dtype)


@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, new_tokens: int, chunk: int | None = None, cache: KVCache | None = None
) -> Tensor:
    """The likeliest next tokens, one at a time: prefill, then decode, over cached keys and values.

    Args:
        model: as it is; put it into evaluation mode first, or dropout acts.
        tokens: the prompts, [b, s], int64.
        new_tokens: how many to add.
        chunk: positions of the prompt that are taken in at once; None: all.
        cache: an empty one with room for all but the last token; None: one is made.

    Returns:
        Prompts and answers, [b, s + new_tokens].

    Raises:
        ValueError: sizes below 1, or more positions than the model's context or the cache have.
    """
    for name, value in (("new_tokens", new_tokens), ("chunk", chunk)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r} gets nowhere: give a whole number from 1 up")
    b, s = tokens.shape
    if cache is None:
        cache = KVCache(model.config, b, s + new_tokens - 1, tokens.device)  # the last token is never read
    for piece in tokens.split(chunk or s, dim=1):
        x = model.states(piece, cache)
    answer = [model.head(x[:, -1:]).argmax(-1)]  # (b, 1); only the last position's logits are made
    while len(answer) < new_tokens:
        x = model.states(answer[-1], cache)
        answer.append(model.head(x[:, -1:]).argmax(-1))
    return torch.cat((tokens, *answer), dim=1)
