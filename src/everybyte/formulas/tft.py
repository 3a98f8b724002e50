"""TFT-225 in closed form: its parameters, its model state, and the bytes that a forward pass leaves for the backward.

Nothing here runs a network. Each number is a sum of named terms, each term a product of sizes:

    b batch        s history       f horizon      t = s + f
    n variables    h hidden        a heads        L networks in a stack      q quantiles
    e bytes of one element (4 in fp32)            m bytes of one element of a dropout mask (4 on CPU, 1 on CUDA)
    c bytes of a Python number kept as a factor (a double, 8; it stays with the CPU, so a GPU has 0)
    g bytes of a random generator's state (5,056 on CPU; a GPU's stays with the CPU, so it has 0)

What a forward pass must leave follows from the gradient formulas (and is what PyTorch's derivatives.yaml declares):

    y = x W       W learns, so x stays              sigmoid, softmax    their result stays
    y = u * v     both factors stay                 ELU                 its input stays
    y = u + v     nothing stays                     dropout             its mask stays
    A B           both stay                         LayerNorm           its input, each row's mean and 1/deviation

A tensor that two formulas need stays once. Parameters are not counted, inputs and buffers are. The functions take the
switches from any object that has the fields of ``TFTConfig``; sizes stay symbols until `sizes` puts numbers in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp
from sympy import Expr, Symbol

from .terms import L, Terms, a, b, e, g, h, m, p_max, s
from .terms import total as total

f, q = sp.symbols("f q", positive=True, integer=True)
n, n_s, n_o, n_k = sp.symbols("n n_s n_o n_k", positive=True, integer=True)
c = sp.Symbol("c", nonnegative=True, integer=True)
t = s + f

w_e, w_d = sp.symbols("w_e w_d", nonnegative=True, integer=True)
"""Bytes that the LSTM kernels of encoder and decoder keep for themselves: an implementation's choice, no arithmetic."""

ONE = sp.Integer(1)


@dataclass(frozen=True)
class Weight:
    """Parameter tensors of one kind: ``copies`` of them, each of the given shape.

    ``learns`` is False where no path leads to the loss: the tensor costs its own bytes and no others.
    """

    name: str
    shape: tuple[Expr, ...]
    copies: Expr = ONE
    learns: bool = True

    @property
    def count(self) -> Expr:
        """Learned numbers in all copies."""
        return self.copies * sp.prod(self.shape)


def sizes(
    config: Any, batch_size: int = 8, element: int = 4, mask: int = 4, number: int = 8, generator: int = 5_056
) -> dict[Symbol, int]:
    """Numbers for all symbols but the LSTM kernels' own; for ``expression.subs(...)``.

    Args:
        config: any object with the fields of ``TFTConfig``.
        batch_size: b.
        element: bytes of one element.
        mask: bytes of one element of a dropout mask: as the element on CPU and meta, 1 on CUDA.
        number: bytes of a Python number kept as a factor: a double on CPU, 0 on CUDA.
        generator: bytes of a random generator's state (`torch.get_rng_state`): 0 on CUDA, where the host has it.
    """
    return {
        b: batch_size, s: config.history, f: config.horizon, h: config.hidden, a: config.heads, L: config.stack_layers,
        q: len(config.quantiles), e: element, m: mask, c: number, g: generator, n_s: config.static_features,
        n_o: config.observed_features, n_k: config.known_features, p_max: config.max_positions,
    }  # fmt: skip


# Parameters, block by block.


def grn_weights(
    config: Any, width_in: Expr, inner: Expr, width: Expr, context: bool = False, fed: bool = True, copies: Expr = ONE
) -> list[Weight]:
    """Tensors of a gated residual network width_in -> inner -> width.

    Args:
        config: switches.
        width_in: width of the input.
        inner: width of its two layers.
        width: width of the output; another than width_in needs a skip projection.
        context: it has a projection for a context h wide,
        fed: which really gets one.
        copies: networks of this kind.
    """
    bias = "grn" in config.biases
    weights = _linear("linear1", width_in, inner, bias, copies)
    if context:
        weights += _linear("context", h, inner, "context" in config.biases, copies, fed)
    weights += _linear("linear2", inner, inner, bias, copies)
    if width_in != width and config.skip == "project":
        weights += _linear("skip", width_in, width, bias, copies)
    return weights + gate_weights(config, inner, width, copies)


def gate_weights(config: Any, width_in: Expr, width: Expr, copies: Expr = ONE) -> list[Weight]:
    """Tensors of a gated skip: two products and a LayerNorm."""
    bias = "grn" in config.biases
    return [
        *_linear("value", width_in, width, bias, copies),
        *_linear("opening", width_in, width, bias, copies),
        *_norm(width, copies),
    ]


def selection_weights(
    config: Any, n: Expr, context: bool = False, paper_context: bool = False, fed: bool = True
) -> dict[str, list[Weight]]:
    """Tensors of a variable selection over n variables: ``variables``, the networks, and ``weights``, what mixes them.

    Args:
        config: switches.
        n: variables.
        context: each variable's network has a context projection.
        paper_context: the network of the weights has one.
        fed: a context really comes.
    """
    width_in = h if config.embedding else ONE
    if config.selection == "grn":
        mixing = grn_weights(config, n * h, h, n, paper_context, fed)
    else:
        mixing = _linear("linear", h if config.selection == "pooled" else n * h, n, "selection" in config.biases)
    copies = n if config.selection_compute != "grouped" else ONE
    networks = grn_weights(config, width_in, h, h, context, fed, copies)
    if config.selection_compute == "grouped":  # the same numbers, in one tensor for all variables
        networks = [Weight(w.name, (n, *w.shape), learns=w.learns) for w in networks]
    return {"variables": networks, "weights": mixing}


def attention_weights(config: Any) -> list[Weight]:
    """Tensors of the attention: q and k for each head, v for each or for all, the output, and the join."""
    shared, bias = config.attention == "shared value", "qkv" in config.biases
    weights = []
    for name, copies in (("query", a), ("key", a), ("value", ONE if shared else a)):
        weights += _linear(name, h, h / a, bias, copies)
    weights += _linear("output", h / a if shared else h, h, "attention output" in config.biases)
    return weights + (gate_weights(config, h, h) if config.gates else _norm(h))


def weights(config: Any) -> dict[str, list[Weight]]:
    """All parameter tensors, by component; the components are those of ``parameters_by_component``."""
    every, in_paper = config.context == "every", config.context in ("every", "selection")
    uses = _uses(config)
    stack = {fed: grn_weights(config, h, h, h, every, fed, L) if config.stack_layers else [] for fed in (True, False)}
    n_p = past_variables(config)
    parts: dict[str, list[Weight]] = {}
    if config.embedding:
        for name, count in (("static", n_s), ("observed", n_o), ("known", n_k)):
            parts[f"{name}_variables"] = _linear("embedding", ONE, h, True, count)
    for name, count, fed in (("static", n_s, False), ("historical", n_p, True), ("future", n_k, True)):
        here = selection_weights(config, count, every, every or (in_paper and fed), fed)
        parts |= {f"{name}_selection.{part}": tensors for part, tensors in here.items()}
    parts["static_encoder"] = list(stack[False])
    if config.gates:
        for use, used in uses.items():
            parts["static_encoder"] += [
                Weight(f"{use} {w.name}", w.shape, w.copies, w.learns and used)
                for w in grn_weights(config, h, h, h, every, fed=False)
            ]
    parts["historical_stack"], parts["future_stack"] = stack[True], stack[True]
    if config.recurrence == "lstm":
        shapes = {"input": (4 * h, h), "state": (4 * h, h), "input bias": (4 * h,), "state bias": (4 * h,)}
        parts["recurrence"] = [Weight(name, shape, sp.Integer(2)) for name, shape in shapes.items()]
    else:
        parts["recurrence"] = _linear("linear", h, h, "recurrence" in config.biases, sp.Integer(2))
    if config.gates:
        parts["recurrence_join"] = gate_weights(config, h, h)
        parts["enrichment"] = grn_weights(config, h, h, h, in_paper)
    parts["attention"] = attention_weights(config)
    if config.gates:
        parts["feed_forward"] = grn_weights(config, h, h, h, every, fed=False)
        parts["feed_forward_join"] = gate_weights(config, h, h)
    parts["head"] = _linear("output", h, q if config.head == "step" else f * q, "head" in config.biases)
    return {name: tensors for name, tensors in parts.items() if tensors}


def parameters(config: Any) -> dict[str, Terms]:
    """Learned numbers of each component, term by term."""
    return {name: _by_name((w.name, w.count) for w in tensors) for name, tensors in weights(config).items()}


def tensors(config: Any) -> Expr:
    """How many tensors the parameters are."""
    return sp.Add(*(w.copies for each in weights(config).values() for w in each))


def model_state(config: Any) -> Terms:
    """Bytes that stay from step to step under Adam: parameters, gradients, two moments, step counters, buffers.

    A parameter that no gradient reaches has neither gradient nor moments. The step counters are one fp32 each.
    """
    tensors = [w for group in weights(config).values() for w in group]
    learned = sum((w.count for w in tensors if w.learns), sp.S.Zero)
    return {
        "parameters": sp.expand(e * sum(w.count for w in tensors)),
        "gradients": sp.expand(e * learned),
        "optimizer moments": sp.expand(2 * e * learned),
        "optimizer step counters": 4 * sum((w.copies for w in tensors if w.learns), sp.S.Zero),
        "positional table": e * p_max * h,
        "quantiles": e * q,
        "mask": t**2 if config.causal else sp.S.Zero,
    }


def int8(config: Any) -> Terms:
    """Bytes of the parameters once the weights of products are INT8: a byte a number, a scale and a zero point a row.

    A row is what belongs to one output. Weights that multiply a single number, biases and norms stay (see
    `everybyte.quantization`, whose names these are); so would an LSTM, which is no product of its own.

    Raises:
        ValueError: the recurrence is an LSTM, or the selection grouped, whose products no layer has for itself.
    """
    if config.recurrence == "lstm" or config.selection_compute == "grouped":
        raise ValueError("INT8 is written down for products that are layers: recurrence='linear', no grouped selection")
    tensors = [w for group in weights(config).values() for w in group]
    products = [w for w in tensors if len(w.shape) == 2 and w.shape[0] != ONE]
    numbers, rows = sum(w.count for w in products), sum(w.copies * w.shape[1] for w in products)
    return {
        "qdata": numbers,
        "scale": 4 * rows,
        "zero_point": rows,
        "fp32": sp.expand(4 * (sum(w.count for w in tensors) - numbers)),
    }


# What a forward pass leaves, block by block. ``rows`` is the number of vectors that pass: b, b s, b f or b t.


def gate_saved(config: Any, rows: Expr, width_in: Expr, width: Expr) -> Terms:
    """A gated skip over so many rows. Without dropout its input stays as it comes; with it, the mask and the rest."""
    kept: Terms = {"dropout mask": m * rows * width_in} if config.dropout else {}
    return kept | {
        "input of the gate": e * rows * width_in,
        "value": e * rows * width,
        "sigmoid": e * rows * width,
        "LayerNorm input": e * rows * width,
        "LayerNorm statistics": 2 * e * rows,
    }


def grn_saved(config: Any, rows: Expr, inner: Expr, width: Expr) -> Terms:
    """A gated residual network over so many rows; its input is counted by what made it."""
    return {"ELU input": e * rows * inner, "ELU output": e * rows * inner} | gate_saved(config, rows, inner, width)


def selection_saved(config: Any, rows: Expr, n: Expr) -> dict[str, Terms]:
    """A variable selection over so many rows of n variables. Streamed, it is independent of n but for the weights."""
    if config.selection_compute == "streamed":
        return {
            "variables": {"outputs that stay": e * rows * h * sp.Min(n, config.selection_keep)},
            "weights": {"selection weights": e * rows * n, "random state": g if config.dropout else sp.S.Zero},
        }
    variables = {name: n * kept for name, kept in grn_saved(config, rows, h, h).items()}
    if config.selection_compute == "grouped":
        variables["stacked input"] = e * rows * n * (h if config.embedding else ONE)
        variables["normalised"] = e * rows * n * h
    mixing: Terms = {"stacked outputs": e * rows * n * h, "selection weights": e * rows * n}
    if config.embedding:
        mixing["stacked embeddings"] = e * rows * n * h
    if config.selection == "pooled":
        mixing["pooled"] = e * rows * h
        mixing.pop("stacked embeddings", None)
    if config.selection == "grn":
        mixing |= grn_saved(config, rows, h, n)
    return {"variables": variables, "weights": mixing}


def stack_saved(config: Any, rows: Expr) -> Terms:
    """A stack of networks: each keeps its input too."""
    if not config.stack_layers:
        return {}
    return {name: L * kept for name, kept in {"input": e * rows * h, **grn_saved(config, rows, h, h)}.items()}


def attention_saved(config: Any) -> Terms:
    """Attention over history and horizon. The t x t terms are the quadratic ones; the fused kernel has none.

    It keeps its output and the logarithm of each row's sum (ATen/native/transformers/attention.cpp,
    `_scaled_dot_product_flash_attention_cpu`), a number a row on a CPU. On CUDA, in fp32, the memory-efficient kernel
    rounds the rows up to a multiple of 32 and adds a random state (cuda/attention.cu, `_efficient_attention_forward`).

    Raises:
        ValueError: fused with dropout, for which each device has another kernel.
    """
    if config.fused_attention and config.attention_dropout:
        raise ValueError(f"attention_dropout={config.attention_dropout}: fused attention is written down for 0 only")
    shared, rows = config.attention == "shared value", b * t
    kept: Terms = {
        "input": e * rows * h,
        "query": e * rows * h,
        "key": e * rows * h,
        "value": e * rows * h / (a if shared else 1),
    }
    if config.fused_attention:
        kept |= {"output of the kernel": e * rows * h, "log-sum-exp": 4 * a * rows}
    else:
        kept["softmax"] = e * a * b * t**2
        kept["scale"] = c * a  # the gradient of a product keeps the other factor, and 1 / sqrt(h / a) is one
    if config.causal and not config.fused_attention:
        kept["mask"] = t**2
    if config.attention_dropout:
        kept |= {"attention dropout mask": m * a * b * t**2, "attention dropped": e * a * b * t**2}
    kept["joined heads"] = e * rows * (h / a if shared else h)
    if config.gates:
        return kept | {f"join: {name}": term for name, term in gate_saved(config, rows, h, h).items()}
    return kept | {"LayerNorm input": e * rows * h, "LayerNorm statistics": 2 * e * rows}


def saved(config: Any) -> dict[str, Terms]:
    """Bytes kept between forward and backward, by component and term; inputs and the loss are components too.

    The sum over everything is `total`. Sizes are taken to be at least 2: with one sample, or one step of horizon, some
    slices need no copy, and with h = 1 a scalar is as wide as a state. LSTM kernels add what they keep for themselves,
    the symbols w_e and w_d.
    """
    uses = _uses(config)
    n_p = past_variables(config)
    kept: dict[str, Terms] = {"inputs": {"static": e * b * n_s, "past": e * b * s * n_p, "future": e * b * f * n_k}}
    if config.selection_compute == "grouped" and not config.embedding:
        kept["inputs"] = {}  # the stacked copy stays instead
    if config.embedding and config.selection_compute != "grouped":
        for name, values in (("static", b * n_s), ("observed", b * s * n_o), ("known", b * f * n_k)):
            kept[f"{name}_variables"] = {"embeddings": e * values * h}
        if config.known_in_history:
            kept["known_variables"]["embeddings of the history"] = e * b * s * n_k * h
    for name, rows, count in (("static", b, n_s), ("historical", b * s, n_p), ("future", b * f, n_k)):
        kept |= {f"{name}_selection.{part}": terms for part, terms in selection_saved(config, rows, count).items()}
    kept["static_encoder"] = stack_saved(config, b)
    if config.gates:
        used = sum(uses.values())
        kept["static_encoder"] |= {"input of the contexts": e * b * h} | {
            f"contexts' {name}": used * term for name, term in grn_saved(config, b, h, h).items()
        }
        kept["static_encoder"]["contexts"] = e * b * h * (used - (config.context == "none"))
    elif config.context != "none" or config.recurrence == "lstm":
        kept["static_encoder"]["contexts"] = e * b * h
    kept["historical_stack"], kept["future_stack"] = stack_saved(config, b * s), stack_saved(config, b * f)
    kept["recurrence"] = {"input": e * b * t * h}
    if config.recurrence == "lstm":
        kept["recurrence"] |= {
            "output": e * b * t * h,
            "last states": 4 * e * b * h,
            "start of the decoder": 2 * e * b * h,
            "kernels' own": w_e + w_d,
        }
    if config.gates:
        kept["recurrence_join"] = gate_saved(config, b * t, h, h)
        kept["enrichment"] = {"input": e * b * t * h, **grn_saved(config, b * t, h, h)}
    kept["attention"] = attention_saved(config)
    if config.gates:
        kept["feed_forward"] = {"input": e * b * t * h, **grn_saved(config, b * t, h, h)}
        kept["feed_forward_join"] = gate_saved(config, b * t, h, h)
    # One state of t is read, but a view keeps its whole storage; the steps of the horizon are copied out.
    kept["head"] = {"input": e * b * f * h if config.head == "step" else e * b * t * h}
    kept["loss"] = {"two sides of the maximum": 2 * e * b * f * q, "quantiles": e * q, "quantiles - 1": e * q}
    return kept


def peak(config: Any) -> dict[str, Terms]:
    """Bytes above the start at the two moments of a training step with Adam that can be its peak, by phase and term.

    ``"backward"``: the historical selection has the gradients of its stacked outputs from both their uses, and is about
    to add them; the networks that made the outputs have yet to begin. ``"optimizer"``: Adam divides the moments of the
    largest weight, the selection's. The peak is the larger, as long as this selection is the largest part of the model.

    The step is `everybyte.training.train_step`, any but the first, which finds no moments; the optimizer is
    ``torch.optim.Adam`` with ``foreach=False`` (torch/optim/adam.py, `_single_tensor_adam`).

    Raises:
        ValueError: the config is not the report's model in one of its readings with the linear selection.
    """
    wanted = {
        "selection": "linear", "selection_compute": "loop", "recurrence": "linear", "embedding": False, "gates": False,
    }  # fmt: skip
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}={getattr(config, name)!r}: the peak is written down for {name}={value!r} only")
    state, kept = model_state(config), saved(config)
    yet_to_come = ("static", "historical_selection.variables")
    done = [w for name, tensors in weights(config).items() if not name.startswith(yet_to_come) for w in tensors]
    outputs = kept["historical_selection.weights"]["stacked outputs"]
    batch = total(kept["inputs"]) + e * b * f  # with its target
    forecast = e * b * f * q
    adam = {name: state[name] for name in ("optimizer moments", "optimizer step counters")}
    backward = {
        "gradients so far": e * sum(w.count for w in done if w.learns),
        "networks yet to come": total({name: kept[name] for name in kept if name.startswith(yet_to_come)}),
        "stacked outputs": outputs,
        "two gradients of these": 2 * outputs,
        "gradient of the logits": e * b * s * n_o,
        "gradient of the static context": e * b * h,
        "batch and forecast": batch + forecast,
        "loss, and 1, its gradient": 2 * e,
    }
    optimizer = {
        "gradients": state["gradients"],
        "root and quotient of the largest weight": 2 * e * n_o * h * n_o,
        "divisor, a double": sp.Integer(8),
        "quotient of the weight before": e * h,
        "batch and forecast": batch + forecast,
        "loss": e,
    }
    return {"backward": adam | backward, "optimizer": adam | optimizer}


def past_variables(config: Any) -> Expr:
    """Variables of one bar of history."""
    return n_o + n_k if config.known_in_history else n_o


def _uses(config: Any) -> dict[str, bool]:
    """Which of the paper's four static contexts some network takes."""
    return {
        "selection": config.context != "selection" or config.selection == "grn",
        "enrichment": config.context != "none",
        "state": config.recurrence == "lstm",
        "cell": config.recurrence == "lstm",
    }


def _linear(
    name: str, width_in: Expr, width: Expr, bias: bool, copies: Expr = ONE, learns: bool = True
) -> list[Weight]:
    layer = [Weight(name, (width_in, width), copies, learns)]
    return [*layer, Weight(f"{name} bias", (width,), copies, learns)] if bias else layer


def _norm(width: Expr, copies: Expr = ONE) -> list[Weight]:
    return [Weight("LayerNorm weight", (width,), copies), Weight("LayerNorm bias", (width,), copies)]


def _by_name(pairs: Any) -> Terms:
    terms: Terms = {}
    for name, value in pairs:
        terms[name] = terms.get(name, sp.S.Zero) + value
    return terms
