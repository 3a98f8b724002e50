"""What single operations keep for their backward pass, in closed form.

Each function returns named terms in bytes, products of sizes that `terms` defines.

The rule is the chain rule: an operation keeps what its gradient formula names (PyTorch declares these formulas in
tools/autograd/derivatives.yaml). Assumed throughout:

    - every input passes a gradient on, and every weight learns,
    - parameters are not counted: they are there anyway,
    - inputs are counted, whoever made them,
    - a tensor that two formulas name stays once; composed functions below count it once,
    - eager mode, and the operation as one kernel where PyTorch has one.
"""

from __future__ import annotations

from typing import Any, Final

from sympy import Expr, Symbol

from .terms import HIDDEN, SCORES, Terms, a, b, e, g, h, m, r, s, whole, width
from .terms import total as total

INNER: Final[Expr] = 4 * b * s * h
"""Elements between the two products of an MLP, [b, s, 4h]."""


def sizes(
    batch: int, sequence: int, hidden: int, heads: int = 1, element: Any = 4, device: str = "cpu"
) -> dict[Symbol, int]:
    """Numbers for all symbols of one operation, for `terms.integer(...)` or `expression.subs(...)`.

    Args:
        batch, sequence, hidden, heads: b, s, h and a.
        element: Bytes of one element, 4 in fp32, 2 in bf16 and fp16; or a dtype, or its name.
        device: Decides three widths. On "cpu" a dropout mask and LayerNorm's statistics have the element's own
            (ATen/native/Dropout.cpp, `_dropout_impl`; ATen/native/layer_norm.cpp). On "cuda" a mask has one byte, the
            statistics are fp32, or fp64 with fp64 elements (ATen/native/cuda/Dropout.cu and layer_norm_kernel.cu), and
            the flash kernel keeps 24 bytes of random state, with dropout or without, where a CPU's keeps none
            (torch/_meta_registrations.py, `meta__scaled_dot_product_flash_attention`).

    Raises:
        ValueError: If the device is neither, or a size is no positive integer.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the widths are known for 'cpu' and 'cuda'")
    element = width(element)
    mask, statistic, state = (element, element, 0) if device == "cpu" else (1, max(4, element), 24)
    lengths = {"batch": (b, batch), "sequence": (s, sequence), "hidden": (h, hidden), "heads": (a, heads)}
    numbers = {symbol: whole(name, length) for name, (symbol, length) in lengths.items()}
    return numbers | {e: element, m: mask, r: statistic, g: state}


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


def silu(elements: Expr = INNER) -> Terms:
    """y = x sigmoid(x): its derivative is sigmoid(x) (1 + x (1 - sigmoid(x))). As with GELU, the input stays."""
    return {"SiLU input": e * elements}


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
