"""A decoder in closed form: what each layer keeps for its backward pass, the ends of the network, parameters.

The rows are made of the single operations in `ops`. With two bytes an element and one a mask, those that the literature
counts add up to 34 s b h + 5 a s² b (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.1); `paper` keeps these, `extras` the others. Assumed beside what `ops` assumes:

    - a pre-norm layer, x + attention(norm(x)), then x + mlp(norm(x)), each ending in a dropout,
    - a tensor that two operations keep is one row, the row of the first,
    - one way of cutting into heads, [b, s, h] <-> [b, a, s, h/a]; its copies are the kept tensors, no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sympy as sp
from sympy import Expr, Symbol

from . import ops
from .terms import (
    HIDDEN,
    SCORES,
    L,
    Terms,
    V,
    a,
    a_kv,
    b,
    choose,
    d_ff,
    d_head,
    e,
    expression,
    g,
    h,
    m,
    most,
    p_max,
    present,
    r,
    s,
    total,
    whole,
)

BF16_ON_CUDA: Final = {e: 2, m: 1, r: 4, g: 24}
"""The widths that the published formula has folded in, for `expression.subs(...)`."""

EXTRAS: Final = (
    "LayerNorm means", "LayerNorm 1 / deviations", "causal mask", "K and V repeated for all heads", "log-sum-exp",
    "random state",
)  # fmt: skip
"""Rows that the published sums leave out."""


def sizes(
    batch: int, sequence: int, hidden: int, heads: int, layers: int = 1, vocabulary: int = 1, *,
    inner: int | None = None, kv_heads: int | None = None, positions: int | None = None, element: Any = 2,
    device: str = "cuda",
) -> dict[Symbol, int]:  # fmt: skip
    """Numbers for all symbols.

    Args:
        batch, sequence, hidden, heads, layers, vocabulary: b, s, h, a, L and V.
        inner: d_ff, the width of a SwiGLU; 4 h if None.
        kv_heads: a_kv, the heads of keys and values; a if None.
        positions: p_max, the rows of the position embedding; the sequence if None.
        element, device: As in `ops.sizes`.

    Raises:
        ValueError: If a size is no positive integer, or a does not divide h, or a_kv not a.
    """
    numbers = ops.sizes(batch, sequence, hidden, heads, element, device)
    if hidden % heads:
        raise ValueError(f"hidden={hidden}, heads={heads}: the heads must divide the hidden size")
    if heads % whole("kv_heads", heads if kv_heads is None else kv_heads):
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: heads of keys and values must divide the heads")
    more = {
        "layers": (L, layers),
        "vocabulary": (V, vocabulary),
        "inner": (d_ff, 4 * hidden if inner is None else inner),
        "kv_heads": (a_kv, heads if kv_heads is None else kv_heads),
        "positions": (p_max, sequence if positions is None else positions),
    }
    return numbers | {d_head: hidden // heads} | {x: whole(name, size) for name, (x, size) in more.items()}


def norms() -> Terms:
    """The two LayerNorms of a layer: 4 s b h, and each row's mean and 1 / deviation."""
    kept = ops.layer_norm()
    return {
        "LayerNorm inputs": 2 * kept["LayerNorm input"],
        "LayerNorm means": 2 * kept["mean"],
        "LayerNorm 1 / deviations": 2 * kept["1 / deviation"],
    }


def attention(
    kind: str = "eager", *, mask: str = "none", dropout: bool = True, kv_heads: Expr = a, repeated: bool = False
) -> Terms:
    """Attention with its projections, from the LayerNorm's output to the dropout before the sum: 11 s b h + 5 a s² b.

    Args:
        kind: "eager", each operation a kernel of its own; "flash", one kernel that keeps its output (which the output
            projection keeps anyway) and the log-sum-exp of each row of scores (Dao et al. 2022, algorithm 2;
            ATen/native/transformers/cuda/attention.cu, `_flash_attention_forward`); "recomputed", an eager core that
            the backward pass repeats from Q, K and V.
        mask: "boolean", an s x s causal mask that `masked_fill` keeps, one byte an element; or "none".
        dropout: Its two dropouts are on. The fused kernel draws its mask anew from the random state.
        kv_heads: a_kv for grouped queries.
        repeated: An eager core repeats K and V for all heads, and keeps the copies in their place; queries of one group
            can instead be rows of one product.

    Raises:
        ValueError: If `kind` or `mask` is unknown, or they do not go together.
    """
    choose("kind", kind, ("eager", "flash", "recomputed"))
    choose("mask", mask, ("none", "boolean"))
    if (kind, mask) == ("flash", "boolean"):
        raise ValueError("mask='boolean': the flash kernel takes no mask and is causal by itself; leave it out")
    narrow = HIDDEN * expression("kv_heads", kv_heads) / a
    kept = {
        "QKV input": ops.linear()["input"],
        "Q and K": total(ops.product(HIDDEN, narrow)),
        "V": ops.product(SCORES, narrow)["right factor"],
        "output projection input": ops.linear()["input"],
        "attention dropout mask": ops.dropout()["dropout mask"] if dropout else 0,
    }
    if kind == "eager":
        softmax, masked = ops.softmax()["softmax output"], total(ops.dropout(SCORES))
        dropped = ops.product(SCORES, narrow)["left factor"]  # without a dropout it is the softmax's output
        kept["softmax output, its mask, its dropout"] = softmax + (masked + dropped if dropout else 0)
        kept["causal mask"] = s**2 if mask == "boolean" else 0
        kept["K and V repeated for all heads"] = 2 * e * (HIDDEN - narrow) if repeated else 0  # beyond the rows above
    if kind == "flash":
        kept["log-sum-exp"] = 4 * b * a * s
        kept["random state"] = g
    return present(kept)


def mlp(kind: str = "gelu", *, dropout: bool = True, inner: Expr | None = None) -> Terms:
    """The MLP, from the LayerNorm's output to the dropout before the sum: 19 s b h with GELU.

    Args:
        kind: "gelu", "relu", "swiglu", or "swiglu fused". W2(silu(W1 x) * W3 x) keeps four tensors of the inner width:
            both factors' product for W2, silu's input, and the two factors. A fused kernel makes silu(W1 x) anew and
            keeps three (Shazeer 2020, "GLU Variants Improve Transformer", equation 6).
        dropout: The one after the second product is on.
        inner: The inner width; 4 h if None, d_ff for a SwiGLU.

    Raises:
        ValueError: If `kind` is unknown.
    """
    choose("kind", kind, ("gelu", "relu", "swiglu", "swiglu fused"))
    default = d_ff if kind.startswith("swiglu") else 4 * h
    between = b * s * (default if inner is None else expression("inner", inner))
    factors = ops.product(between, between)
    activation = {
        "gelu": {"GELU input": ops.gelu(between)["GELU input"]},
        "relu": {},  # its output is what it keeps, and that is the second product's input
        "swiglu": {
            "SiLU input": ops.silu(between)["SiLU input"],
            "SiLU output": factors["left factor"],
            "gated factor": factors["right factor"],
        },
        "swiglu fused": {"SiLU input": ops.silu(between)["SiLU input"], "gated factor": factors["right factor"]},
    }[kind]
    return present({
        "MLP input": ops.linear()["input"],
        **activation,
        "second MLP product's input": ops.linear(between)["input"],
        "MLP dropout mask": ops.dropout()["dropout mask"] if dropout else 0,
    })  # fmt: skip


def layer(
    *, attention: str = "eager", mask: str = "none", mlp: str = "gelu", dropout: bool = True, checkpoint: str = "none",
    kv_heads: Expr = a, repeated: bool = False, inner: Expr | None = None,
) -> Terms:  # fmt: skip
    """What one layer keeps, row by row, in the published order; what the published sum leaves out comes last.

    Args:
        attention: "eager" or "flash".
        mask, dropout, kv_heads, repeated: As in the function `attention`.
        mlp, inner: Kind and width, as in the function `mlp`.
        checkpoint: "none"; "selective", in which the backward pass repeats scores, softmax, dropout and the product
            with V (Korthikanti et al. 2022, section 5); or "full", in which it repeats the layer from its input.

    Raises:
        ValueError: If one of the words is unknown.
    """
    choose("attention", attention, ("eager", "flash"))
    choose("checkpoint", checkpoint, ("none", "selective", "full"))
    kind = "recomputed" if checkpoint == "selective" else attention
    kept = {
        **norms(),
        **_attention(kind, mask=mask, dropout=dropout, kv_heads=kv_heads, repeated=repeated),
        **_mlp(mlp, dropout=dropout, inner=inner),
    }
    return {"layer input": e * HIDDEN} if checkpoint == "full" else {**paper(kept), **extras(kept)}


_attention, _mlp = attention, mlp  # `layer` has switches of these names


def recomputed(checkpoint: str, **switches: Any) -> Terms:
    """What the backward pass of a checkpointed layer makes again and holds, beside what `layer` kept.

    Under "full" that is the layer but for its input, which the first LayerNorm keeps too and which never went. A fused
    kernel keeps its own output when it runs again, though the output projection has the first one.
    """
    every, kept = layer(**switches), layer(checkpoint=checkpoint, **switches)
    if checkpoint == "full":
        return {**every, "LayerNorm inputs": every["LayerNorm inputs"] - kept["layer input"]}
    again = {name: term - kept.get(name, 0) for name, term in every.items()}
    if checkpoint == "selective" and switches.get("attention") == "flash":
        again["attention output"] = e * HIDDEN
    return present(again)


def paper(terms: Mapping[str, Expr]) -> Terms:
    """Those of a layer's rows that the published sum counts, in its order."""
    return {name: term for name, term in terms.items() if name not in EXTRAS}


def extras(terms: Mapping[str, Expr]) -> Terms:
    """Those of a layer's rows that the published sum leaves out: statistics, the causal mask, what a kernel adds."""
    return {name: term for name, term in terms.items() if name in EXTRAS}


def by_degree(terms: Mapping[str, Expr] | Expr, of: Symbol = s) -> dict[int, Expr]:
    """The parts that grow alike with one size: {1: the part linear in s, 2: the quadratic part}."""
    polynomial = sp.Poly(total(terms), of)
    return {degree: sp.expand(factor * of**degree) for (degree,), factor in reversed(polynomial.terms())}


def crossover(linear: Mapping[str, Expr] | Expr, quadratic: Mapping[str, Expr] | Expr) -> Expr:
    """The sequence length at which two parts of a layer are equal, solved for s with h = a d_head.

    Raises:
        ValueError: If there is not exactly one.
    """
    solutions = sp.solve((total(linear) - total(quadratic)).subs(h, a * d_head), s)
    if len(solutions) != 1:
        raise ValueError(f"{total(linear)} = {total(quadratic)} holds for s in {solutions}: give two that cross once")
    return sp.simplify(solutions[0])


def per_token(terms: Mapping[str, Expr] | Expr) -> Expr:
    """Bytes for each of the b s tokens."""
    return sp.expand(total(terms) / (b * s))


LOSSES: Final = ("full", "no upcast", "chunked")


def ends(loss: str = "full", *, embedding_dropout: bool = False, position_indices: bool = False) -> Terms:
    """What embedding, final LayerNorm and loss head keep between forward and backward.

    The embedding's output is the first layer's LayerNorm input and counted there. The logits are made, and gone when
    the backward pass begins: log-softmax keeps its output alone, and the fp32 copy's backward needs no tensor.

    Args:
        loss: "full", fp32 copies of 16-bit logits; "no upcast", logits as they are (an fp32 model's too); "chunked",
            some rows at a time, as "full", each checkpointed, so that nothing as wide as V is kept.
        embedding_dropout: A dropout follows the embedding.
        position_indices: Positions are looked up by a tensor of s indices, not sliced from their table.
    """
    choose("loss", loss, LOSSES)
    norm, narrow = ops.layer_norm(), 4 if loss == "full" else e
    return present({
        "token indices": 8 * b * s,
        "position indices": 8 * s if position_indices else 0,
        "embedding dropout mask": ops.dropout()["dropout mask"] if embedding_dropout else 0,
        "final LayerNorm input": norm["LayerNorm input"],
        "final LayerNorm means": norm["mean"],
        "final LayerNorm 1 / deviations": norm["1 / deviation"],
        "loss head input": ops.linear()["input"],
        "log-softmax": 0 if loss == "chunked" else ops.softmax(b * s * V)["softmax output"] / e * narrow,
        "target indices": 8 * b * s,
        "number of targets": 8 if loss == "chunked" else narrow,
    })  # fmt: skip


_UPCAST: Final = {
    "logits copied": {"logits": e, "fp32 copy": 4},
    "log-softmax": {"fp32 copy": 4, "log-softmax": 4},
    "backward of log-softmax": {"log-softmax": 4, "log-softmax gradient": 4, "fp32 logits gradient": 4},
    "backward of the copy": {"fp32 logits gradient": 4, "logits gradient": e},
    "backward of the product": {"logits gradient": e},
}
_AS_THEY_ARE: Final = {
    "log-softmax": {"logits": e, "log-softmax": e},
    "backward of log-softmax": {"log-softmax": e, "log-softmax gradient": e, "logits gradient": e},
    "backward of the product": {"logits gradient": e},
}


def head_moments(loss: str = "full", *, chunks: int = 8) -> dict[str, Terms]:
    """What is live in the loss head, moment by moment: from the logits through log-softmax and back to the product.

    That is the head's input, tensors of the logits' shape, and the gradients of input and weight. Left out are scalars,
    the weight, which is a parameter, and what is live outside of the head. Nobody else holds the logits.

    Args:
        loss: As in `ends`. Of chunks the moments are those of the last one to run backward, beside the gradients of the
            others' inputs and the sum of their gradients of the weight; but the sum is made after the second.
        chunks: How many `torch.chunk` makes, each but perhaps the last of ceil(b s / chunks) rows.
    """
    choose("loss", loss, LOSSES)
    chunks = whole("chunks", chunks) if loss == "chunked" else 1
    rows = sp.ceiling(b * s / chunks)
    held = {"loss head input": e * HIDDEN}
    if chunks > 1:
        held |= {"other rows' input gradients": e * h * (b * s - rows), "other rows' weight gradient": e * V * h}
    moments = {
        moment: {**held, **{name: nbytes * rows * V for name, nbytes in tensors.items()}}
        for moment, tensors in (_AS_THEY_ARE if loss == "no upcast" else _UPCAST).items()
    }
    moments["backward of the product"] |= {"input gradient": e * rows * h, "weight gradient": e * V * h}
    if chunks > 1:
        # Autograd adds the first two out of place, and all others to their sum. The input goes with its last use.
        left = {"loss head input": e * HIDDEN} if chunks > 2 else {}
        left |= {"two chunks' input gradients": e * h * (b * s - (chunks - 2) * rows)}
        three = {name: e * V * h for name in ("other rows' weight gradient", "weight gradient", "their sum")}
        moments["sum of two weight gradients"] = {**left, **three}
    return moments


def head_peak(sizes: Mapping[Symbol, int], loss: str = "full", *, chunks: int = 8) -> Terms:
    """The most that is live at once in the loss head at these sizes, term by term; one of the `head_moments`.

    Mostly it is log-softmax's backward, with three tensors as wide as V; of few rows, the weight's gradient is larger.
    """
    return most(head_moments(loss, chunks=chunks), sizes)


def stack(
    *, loss: str = "full", embedding_dropout: bool = False, position_indices: bool = False, **switches: Any
) -> dict[str, Terms]:
    """What a whole network keeps between forward and backward: its L layers, and its ends.

    Args:
        loss, embedding_dropout, position_indices: As in `ends`.
        **switches: As in `layer`.

    Under a checkpoint the backward pass has, beside this, one layer's `recomputed` terms at a time.
    """
    return {
        "layers": {name: L * term for name, term in layer(**switches).items()},
        "ends": ends(loss, embedding_dropout=embedding_dropout, position_indices=position_indices),
    }


def parameters(
    *, tied: bool = True, positions: bool = True, biases: bool | str = True, mlp: str = "gelu", kv_heads: Expr = a,
    inner: Expr | None = None,
) -> Terms:  # fmt: skip
    """Numbers that a decoder learns, tensor by tensor; those of a layer are counted L times.

    Args:
        tied: The output head is the token embedding, and one tensor.
        positions: There is a learned embedding of p_max positions.
        biases: Products and LayerNorms have one; the head never has. "QKV": that product alone has.
        mlp, kv_heads, inner: As in `layer`.
    """
    choose("mlp", mlp, ("gelu", "relu", "swiglu", "swiglu fused"))
    gated, narrow = mlp.startswith("swiglu"), h * expression("kv_heads", kv_heads) / a
    inner = (d_ff if gated else 4 * h) if inner is None else expression("inner", inner)
    products = {
        "QKV": (h, h + 2 * narrow),
        "output projection": (h, h),
        **({"MLP gate": (h, inner)} if gated else {}),
        "first MLP product": (h, inner),
        "second MLP product": (inner, h),
    }
    weights = {name: rows * columns for name, (rows, columns) in products.items()}
    bias = {f"{name} bias": columns for name, (_, columns) in products.items() if biases in (True, name)}
    return present({
        "token embedding": V * h,
        "position embedding": p_max * h if positions else 0,
        **{name: sp.expand(L * count) for name, count in {**weights, **bias}.items()},
        "LayerNorm weights": (2 * L + 1) * h,
        "LayerNorm biases": (2 * L + 1) * h if biases is True else 0,
        "head": 0 if tied else V * h,
    })  # fmt: skip
