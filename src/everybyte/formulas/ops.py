"""What single operations keep for their backward pass, in closed form.

Each function returns named terms in bytes, products of these sizes:

    b batch    s sequence    h hidden    a heads
    e bytes of one element    m bytes of one element of a dropout mask    r bytes of one LayerNorm statistic

The rule is the chain rule: an operation keeps what its gradient formula names (PyTorch declares these formulas in
tools/autograd/derivatives.yaml). Assumed throughout:

    - every input passes a gradient on, and every weight learns,
    - parameters are not counted: they are there anyway,
    - inputs are counted, whoever made them,
    - a tensor that two formulas name stays once; composed functions below count it once,
    - eager mode, and the operation as one kernel where PyTorch has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import sympy as sp
from sympy import Expr, Symbol

b, s, h, a, e, m, r = sp.symbols("b s h a e m r", positive=True, integer=True)

Terms = dict[str, Expr]

HIDDEN: Final[Expr] = b * s * h
"""Elements of a tensor of hidden states, [b, s, h]."""

INNER: Final[Expr] = 4 * b * s * h
"""Elements between the two products of an MLP, [b, s, 4h]."""

SCORES: Final[Expr] = b * a * s**2
"""Elements of all heads' attention scores, [b, a, s, s]."""


def sizes(
    batch: int, sequence: int, hidden: int, heads: int = 1, element: int = 4, device: str = "cpu"
) -> dict[Symbol, int]:
    """Numbers for all symbols, for `expression.subs(...)`.

    Args:
        batch, sequence, hidden, heads: b, s, h and a.
        element: Bytes of one element: 4 in fp32, 2 in bf16 and fp16.
        device: Decides two widths. On "cpu" a dropout mask and LayerNorm's statistics have the element's own
            (ATen/native/Dropout.cpp, `_dropout_impl`; ATen/native/layer_norm.cpp). On "cuda" a mask has one byte and
            the statistics are fp32 (ATen/native/cuda/Dropout.cu; ATen/native/cuda/layer_norm_kernel.cu).

    Raises:
        ValueError: If the device is neither.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the widths are known for 'cpu' and 'cuda'")
    mask, statistic = (element, element) if device == "cpu" else (1, 4)
    return {b: batch, s: sequence, h: hidden, a: heads, e: element, m: mask, r: statistic}


def total(terms: Mapping[str, Expr]) -> Expr:
    """Sum of the terms, in bytes."""
    return sp.expand(sum(terms.values(), sp.S.Zero))


def linear(elements: Expr = HIDDEN) -> Terms:
    """Y = X W + c with an input of so many elements: dW = X^T dY names X; dX = dY W^T names a parameter, dc nothing."""
    return {"input": e * elements}


def product(left: Expr = HIDDEN, right: Expr = HIDDEN) -> Terms:
    """Z = A B of two activations: dA = dZ B^T and dB = A^T dZ name both. By default Q K^T of all heads together."""
    return {"left factor": e * left, "right factor": e * right}


def gelu(elements: Expr = INNER) -> Terms:
    """y = x Phi(x): its derivative is Phi(x) + x phi(x). Two x can have the same y, so the output would not do."""
    return {"GELU input": e * elements}


def relu(elements: Expr = INNER) -> Terms:
    """y = max(x, 0): its derivative is 1 where y > 0 and 0 elsewhere, so the output is enough."""
    return {"ReLU output": e * elements}


def dropout(elements: Expr = HIDDEN) -> Terms:
    """y = x k with a random k of 0 or 1/(1-p), 0 < p < 1: dx = dy k names k, or where it is not 0."""
    return {"dropout mask": m * elements}


def softmax(elements: Expr = SCORES) -> Terms:
    """y = exp(x) / sum exp(x): dx = y (dy - sum(dy y)) along a row names the output alone."""
    return {"softmax output": e * elements}


def layer_norm(rows: Expr = b * s, width: Expr = h) -> Terms:
    """y = (x - mean) / deviation in each row: x, from which it is normalised anew, and each row's two statistics."""
    return {"LayerNorm input": e * rows * width, "mean": r * rows, "1 / deviation": r * rows}


def mlp(activation: str = "gelu") -> Terms:
    """Two products h -> 4h -> h with a nonlinearity between them, without dropout.

    The second product keeps the nonlinearity's output. ReLU keeps it too, and the two are one storage; GELU keeps its
    input beside it.

    Args:
        activation: "gelu" or "relu".

    Raises:
        ValueError: If it is neither.
    """
    between = {"gelu": gelu, "relu": relu}
    if activation not in between:
        raise ValueError(f"activation={activation!r}: choose one of {', '.join(map(repr, between))}")
    kept = {"first product's input": e * HIDDEN, "second product's input": e * INNER}
    return kept if activation == "relu" else {**kept, **gelu()}
