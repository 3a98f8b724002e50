"""Inference in closed form: the cache of keys and values, and what is live beside it in the layer that runs.

Without a backward pass nothing is kept for one. In the shared symbols, and

    c queries that run at once: the prompt, a chunk of it, or 1 in decoding      t positions they attend to

The width of a head is d_head, whatever h / a: models whose heads are wider or narrower exist.
"""

from __future__ import annotations

from typing import Any

import sympy as sp
from sympy import Expr, Symbol

from .terms import L, Terms, V, a, a_kv, b, choose, d_ff, d_head, e, expression, h, s, whole, width

c, t = sp.symbols("c t", positive=True, integer=True)


def sizes(
    batch: int, positions: int, *, layers: int, hidden: int, heads: int, kv_heads: int | None = None,
    head_width: int | None = None, queries: int = 1, inner: int | None = None, vocabulary: int = 1, element: Any = 2,
) -> dict[Symbol, int]:  # fmt: skip
    """Numbers for all symbols.

    Args:
        batch: b.
        positions: s of the cache, and t, the positions attended to.
        layers, hidden, heads: L, h and a.
        kv_heads: a_kv; a if None.
        head_width: d_head; h / a if None.
        queries: c, 1 in decoding, `positions` for a prompt in one go.
        inner: d_ff; 4 h if None.
        vocabulary: V.
        element: Bytes of one, or a dtype.

    Raises:
        ValueError: If a size is no positive integer, a_kv does not divide a, or d_head is not given and a not a divisor
            of h.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    lengths = {
        "batch": (b, batch), "positions": (s, positions), "layers": (L, layers), "hidden": (h, hidden),
        "heads": (a, heads), "kv_heads": (a_kv, kv_heads), "queries": (c, queries), "vocabulary": (V, vocabulary),
        "inner": (d_ff, 4 * hidden if inner is None else inner),
    }  # fmt: skip
    numbers = {symbol: whole(name, length) for name, (symbol, length) in lengths.items()}
    if heads % kv_heads:
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: heads of keys and values must divide the heads")
    if head_width is None and hidden % heads:
        raise ValueError(f"hidden={hidden}, heads={heads}: give head_width, which is not hidden / heads here")
    head_width = whole("head_width", hidden // heads if head_width is None else head_width)
    return numbers | {d_head: head_width, t: positions, e: width(element)}


def kv_cache(bits: int | None = None, *, group: Any = d_head, constants: int = 4) -> Terms:
    """Keys and values of s positions: 2 L b s a_kv d_head elements (Pope et al. 2022, "Efficiently Scaling Transformer
    Inference", section 3.3; Ainslie et al. 2023, "GQA").

        >>> from everybyte.formulas import inference, terms
        >>> sizes = inference.sizes(batch=4, positions=2048, layers=24, hidden=2048, heads=16, element=2)
        >>> terms.integer(inference.kv_cache(), sizes)  # 2 x 24 x 4 x 2048 x 2048 numbers of 2 bytes
        1610612736

    Args:
        bits: Of a quantized element, packed row by row; None: elements of e bytes.
        group: Elements of a head's row that share constants; all of them by default. A group ends where its row does.
        constants: Bytes that each group has: 4 for an fp32 scale, or an fp16 scale and an fp16 zero.

    Raises:
        ValueError: If bits are not from 1 to 8, the group no size, or the constants no bytes.
    """
    rows = L * b * s * a_kv
    if bits is None:
        return {"keys": e * rows * d_head, "values": e * rows * d_head}
    if whole("bits", bits) > 8:
        raise ValueError(f"bits={bits}: a quantized element has from 1 to 8; leave it out for elements of e bytes")
    packed = rows * sp.ceiling(bits * d_head / sp.Integer(8))
    scales = whole("constants", constants) * rows * sp.ceiling(d_head / expression("group", group))
    return {"keys": packed, "key constants": scales, "values": packed, "value constants": scales}


def growth(held: bool = True) -> Terms:
    """What is live when `torch.cat` makes a cache of s positions one longer.

    Args:
        held: Somebody has the old cache until the new one is whole, as a loop that passes it in and takes another out;
            then there are two. Otherwise each layer's old tensor goes when its new one is there.
    """
    tensor = e * b * a_kv * d_head
    old = {"old cache": 2 * L * s * tensor} if held else {"old keys or values of one layer": s * tensor}
    return {"new cache": 2 * L * (s + 1) * tensor, **old}


def scores() -> Expr:
    """Bytes of the scores that c queries have with t positions, where no fused kernel keeps them out of memory."""
    return e * b * a * c * t


def moments(attention: str = "eager", mlp: str = "gelu", *, inner: Expr | None = None) -> dict[str, Terms]:
    """What is live at the least in the layer that runs, and in the head, moment by moment; the cache is apart.

    The residual stream, and what the operation of that moment reads and writes. Code that holds its results longer, by
    names or as arguments, has more. With c = t = s that is prefill at once, with c < t a chunk of it, with c = 1
    decoding: O(b h) beside O(b a t) of scores, and the cache.

    Args:
        attention: "eager" or "flash", which writes its output and a log-sum-exp for each query.
        mlp: "gelu", "relu" or "swiglu".
        inner: Width of the MLP; 4 h if None, d_ff for a SwiGLU.
    """
    choose("attention", attention, ("eager", "flash"))
    choose("mlp", mlp, ("gelu", "relu", "swiglu"))
    default = d_ff if mlp == "swiglu" else 4 * h
    states, wide = e * b * c * h, e * b * c * (default if inner is None else expression("inner", inner))
    query, key = e * b * c * a * d_head, e * b * c * a_kv * d_head
    core = {
        "eager": {
            "scores": {"Q": query, "scores": scores()},
            "softmax": {"scores": scores(), "softmax output": scores()},
            "product with V": {"softmax output": scores(), "attention output": query},
        },
        "flash": {"fused attention": {"Q": query, "attention output": query, "log-sum-exp": 4 * b * a * c}},
    }[attention]
    gated = {"SiLU output": wide, "gated factor": wide, "their product": wide}
    layer = {
        "projections": {"LayerNorm output": states, "Q": query, "K": key, "V": key},
        **core,
        "activation": gated if mlp == "swiglu" else {"activation input": wide, "activation output": wide},
    }
    return {
        **{moment: {"residual stream": states, **terms} for moment, terms in layer.items()},
        "logits of the last position": {"loss head input": states, "logits": e * b * V},
    }
