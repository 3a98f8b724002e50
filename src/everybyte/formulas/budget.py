"""A decoder's whole training step in closed form: what is live at each of the moments that can be its peak.

A step is made of pieces, each a formula that depends on a few switches; a moment is a list of pieces. So what composes
the step is data, and a page's script can be given it as the library has it: nothing is written down twice.

    "loss head"      all layers' activations are there, and what the head makes in forward and in backward
    "last layer"     backward has left the head, and is at a layer's MLP or attention; a checkpointed one is there again
    "first layer"    backward is about to end: nearly all gradients are there, and one layer's activations
    "optimizer"      gradients, state, and what the update makes on its way; no activations

Counted are bytes asked for, in the second step or later. Not counted: all that backward makes inside a layer but at two
places, communication, the layers that zero-3 gathers, weights that QLoRA unpacks to compute with, workspaces of matrix
products, and what the caching allocator rounds up and reserves. `tests/test_formulas_budget.py` says how far from a
trace of the step this leaves the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import sympy as sp
from sympy import Expr, Symbol

from . import model_state, transformer
from .model_state import N
from .terms import HIDDEN, SCORES, L, P, Terms, V, a, a_kv, b, choose, d_ff, e, h, integer, m, s, total

rank = sp.Symbol("rank", positive=True, integer=True)
"""Of LoRA's paths."""

A, P_layers, P_behind = sp.symbols("A P_layers P_behind", positive=True, integer=True)
"""Numbers that LoRA learns; those of the layers' matrices; those whose gradients are there in the first layer."""

TOKENS: Final = 50
"""The fewest tokens that `torch.chunk` surely cuts into `CHUNKS` pieces."""

CHUNKS: Final = 8

SWITCHES: Final[dict[str, tuple[str, ...]]] = {
    "mlp": ("gelu", "relu", "swiglu", "swiglu fused"),
    "biases": ("all", "QKV", "none"),
    "head": ("tied", "own"),
    "positions": ("learned", "rotary"),
    "attention": ("eager", "flash"),
    "dropout": ("on", "off"),
    "checkpoint": ("none", "selective", "full"),
    "loss": transformer.LOSSES,
    "recipe": (*model_state.RECIPES, "8-bit Adam", "LoRA", "QLoRA"),
    "adapted": ("all products", "queries and values"),
    "sharding": ("one GPU", "ddp", "zero-1", "zero-2", "zero-3"),
    "implementation": ("foreach", "fused"),
    "gradients": ("cleared", "waiting"),
}
"""Each choice of a step. Gradients wait while microbatches are added up; else they go before the forward pass."""


@dataclass(frozen=True)
class Piece:
    """Part of a step: what kind of memory it is, which switches decide it, and its terms; None where there is none."""

    category: str
    switches: tuple[str, ...]
    terms: Callable[..., Terms | None]

    def every(self) -> dict[str, Terms | None]:
        """The terms for each setting of its switches, by their words."""
        settings: list[tuple[str, ...]] = [()]
        for switch in self.switches:
            settings = [(*setting, word) for setting in settings for word in SWITCHES[switch]]
        return {"|".join(setting): self.terms(*setting) for setting in settings}

    def at(self, switches: Mapping[str, str]) -> Terms | None:
        """The terms for these switches."""
        return self.terms(*(switches[switch] for switch in self.switches))


def mismatch(switches: Mapping[str, str], dtype: str) -> tuple[str, str] | None:
    """The switch that does not go with the others, and why; None if all do."""
    recipe = switches["recipe"]
    if dtype == "float32" and switches["attention"] == "flash":
        return "attention", "the flash kernel computes in 16 bits: choose eager, or a 16-bit dtype"
    if recipe.startswith("fp32") != (dtype == "float32"):
        fitting = "an fp32 recipe" if dtype == "float32" else "a recipe for 16-bit weights, or float32"
        return "recipe", f"weights in {dtype} need {fitting}"
    if recipe not in model_state.RECIPES and switches["sharding"] != "one GPU":
        return "sharding", f"is not written down for {recipe}: choose one GPU"
    return None


def parameters(mlp: str, biases: str, head: str, positions: str) -> Terms:
    """Learned numbers, tensor by tensor."""
    have = {"all": True, "QKV": "QKV", "none": False}[biases]
    return transformer.parameters(
        tied=head == "tied", positions=positions == "learned", biases=have, mlp=mlp, kv_heads=a_kv, inner=d_ff
    )


def in_layers(mlp: str) -> Terms:
    """Numbers of the matrices of all layers, which QLoRA keeps in 4 bits."""
    every = parameters(mlp, "none", "tied", "rotary")
    return {name: count for name, count in every.items() if "LayerNorm" not in name and "embedding" not in name}


def behind(mlp: str, biases: str) -> Terms:
    """Numbers whose gradients are there when backward comes to the first layer: of the head and of L - 1 layers."""
    every = parameters(mlp, biases, "tied", "rotary")
    per_layer = {name: sp.expand(count / L) for name, count in every.items() if L in sp.sympify(count).free_symbols}
    norms = ("LayerNorm weights", "LayerNorm biases")
    bodies = sum((count for name, count in per_layer.items() if name not in norms), sp.S.Zero)
    kinds = sum(name in every for name in norms)
    return {"head": V * h, "layers": (L - 1) * (bodies + 2 * kinds * h), "final LayerNorm": kinds * h}


def _matrices(adapted: str, mlp: str) -> list[tuple[Expr, Expr]]:
    narrow = h * a_kv / a
    if adapted == "queries and values":
        return [(h, h), (h, narrow)]
    factors = 2 if mlp.startswith("swiglu") else 1
    return [(h, h), (h, narrow), (h, narrow), (h, h), *[(h, d_ff)] * factors, (d_ff, h)]


def adapters(adapted: str, mlp: str) -> Terms:
    """Numbers of LoRA's paths beside the layers' matrices."""
    matrices = [(*matrix, L) for matrix in _matrices(adapted, mlp)]
    return {"adapters": model_state.lora_parameters(rank, matrices)}


COUNTS: Final[dict[Symbol, Piece]] = {
    P: Piece("count", ("mlp", "biases", "head", "positions"), parameters),
    P_layers: Piece("count", ("mlp",), in_layers),
    P_behind: Piece("count", ("mlp", "biases"), behind),
    A: Piece("count", ("adapted", "mlp"), adapters),
}
"""Counts of numbers that the other formulas have as symbols."""


def state(recipe: str, sharding: str) -> Terms | None:
    """What stays from step to step on one GPU, and gradients."""
    if recipe in model_state.RECIPES:
        words = ("ddp", False) if sharding == "one GPU" else (sharding, sharding == "ddp")
        return model_state.per_gpu(words[0], recipe, buckets=words[1])
    if sharding != "one GPU":
        return None
    if recipe == "8-bit Adam":
        return model_state.adam_8bit(256)
    base = {"frozen weights": e * P}
    if recipe == "QLoRA":
        base = {**model_state.nf4(count=P_layers), "frozen weights beside": e * (P - P_layers)}
    return model_state.lora(A, base=base)


def _is_gradient(name: str) -> bool:
    return "gradients" in name


def weights(recipe: str, sharding: str) -> Terms | None:
    """Of the state, what the forward pass reads."""
    every = state(recipe, sharding)
    stays = ("weights", "frozen weights", "frozen weights beside", "adapters' weights", "4-bit weights")
    return every and {x: y for x, y in every.items() if x in (*stays, "constants", "constants of the constants")}


def optimizer_state(recipe: str, sharding: str) -> Terms | None:
    """Of the state, what only the optimizer reads, and DDP's buckets."""
    every, read = state(recipe, sharding), weights(recipe, sharding)
    return every and {x: y for x, y in every.items() if x not in read and not _is_gradient(x)}


def gradients(recipe: str, sharding: str) -> Terms | None:
    """All gradients."""
    every = state(recipe, sharding)
    return every and {x: y for x, y in every.items() if _is_gradient(x)}


def waiting(recipe: str, sharding: str, cleared: str) -> Terms | None:
    """Gradients of earlier microbatches, all through forward and backward."""
    return gradients(recipe, sharding) if cleared == "waiting" else {}


def head_gradient(recipe: str, cleared: str, head: str) -> Terms:
    """The gradient of the head's weight, with which backward begins. A tied one waits for the embedding's."""
    added = cleared == "waiting" and head == "own"
    return {} if "LoRA" in recipe or added else {"gradient of the head": e * V * h}


def gradients_behind(recipe: str, sharding: str, cleared: str) -> Terms | None:
    """The gradients that are there when backward comes to the first layer."""
    every = gradients(recipe, sharding)
    if every is None or cleared == "waiting" or "LoRA" in recipe:
        return every
    return {name: term.subs(P, P_behind) for name, term in every.items()}


def update(recipe: str, sharding: str, implementation: str) -> Terms | None:
    """What the optimizer makes on its way. Adam in 8 bits is one kernel; a shard is updated where it lies."""
    if recipe not in model_state.RECIPES:
        makes = {} if recipe == "8-bit Adam" else _makes("bf16", implementation)
        return None if sharding != "one GPU" else {name: term.subs(P, A) for name, term in makes.items()}
    share = sp.ceiling(P / N) if sharding.startswith("zero") else P
    return {name: term.subs(P, share) for name, term in _makes(recipe, implementation).items()}


def _makes(recipe: str, implementation: str) -> Terms:
    every = model_state.step(recipe, implementation)
    return {name: every[name] for name in ("gradients of the master copy", "square roots") if name in every}


def layer(attention: str, checkpoint: str, mlp: str, dropout: str) -> Terms:
    """What one layer keeps."""
    return transformer.layer(
        attention=attention, mlp=mlp, dropout=dropout == "on", checkpoint=checkpoint, kv_heads=a_kv, inner=d_ff
    )


def layers(*switches: str) -> Terms:
    """What all layers keep."""
    return {name: sp.expand(L * term) for name, term in layer(*switches).items()}


def others(*switches: str) -> Terms:
    """What all layers but one keep."""
    return {name: sp.expand((L - 1) * term) for name, term in layer(*switches).items()}


def _growing(kept: Callable[..., Terms], squared: bool) -> Callable[..., Terms]:
    """Those of the terms that grow with s squared, or those that do not."""
    return lambda *switches: {name: term for name, term in kept(*switches).items() if term.has(s**2) == squared}


def at_mlp(attention: str, checkpoint: str, mlp: str, dropout: str) -> Terms:
    """One layer's tensors where backward is at its MLP: what it kept, and a checkpointed one has again."""
    kept = layer(attention, checkpoint, mlp, dropout)
    if checkpoint != "full":  # selective: the core comes later
        return kept
    again = transformer.recomputed(
        checkpoint, attention=attention, mlp=mlp, dropout=dropout == "on", kv_heads=a_kv, inner=d_ff
    )
    return kept | {f"{name}, again": term for name, term in again.items()}


def at_attention(attention: str, checkpoint: str, dropout: str) -> Terms:
    """One layer's tensors where backward is at its attention, the MLP and its norm being behind it."""
    norm = {name: term / 2 for name, term in transformer.norms().items()}
    again = {"attention output, again": e * HIDDEN} if (attention, checkpoint) == ("flash", "selective") else {}
    return {**norm, **transformer.attention(attention, dropout=dropout == "on", kv_heads=a_kv), **again}


def mlp_in_flight(mlp: str, dropout: str) -> Terms:
    """Gradients at the MLP's activation: of what it made, and of what it read; the output's dropout is behind."""
    gradients = (3 if mlp.startswith("swiglu") else 2) * e * b * s * d_ff
    return {"gradients in the MLP, less its dropout's mask": gradients - (m * HIDDEN if dropout == "on" else 0)}


def attention_in_flight(attention: str, dropout: str) -> Terms:
    """Gradients at the softmax: of its output and its input, or of the dropped output while that is there; or at the
    flash kernel: of its output and its three inputs."""
    if attention == "flash":
        return {"gradients in attention": e * HIDDEN * (2 + 2 * a_kv / a)}
    return {"gradients in attention": (1 if dropout == "on" else 2) * e * SCORES}


def second_product(recipe: str, cleared: str) -> Terms:
    """The gradient of a layer's that comes first; none where it was added to one that waits."""
    return {} if "LoRA" in recipe or cleared == "waiting" else {"gradient of the second MLP product": e * h * d_ff}


def behind_attention(recipe: str, cleared: str, mlp: str) -> Terms:
    """The gradients of a layer's that come before attention's; none where they were added to some that wait."""
    factors = 3 if mlp.startswith("swiglu") else 2
    if "LoRA" in recipe or cleared == "waiting":
        return {}
    return {"gradients of MLP and output projection": e * (factors * h * d_ff + h**2)}


def low_rank(recipe: str, adapted: str, mlp: str) -> Terms:
    """What LoRA's paths keep beside the inputs, which are kept anyway: a row as wide as the rank for each token."""
    if "LoRA" not in recipe:
        return {}
    return {"between the adapters": e * b * s * rank * L * len(_matrices(adapted, mlp))}


_BATCH: Final = ("token indices", "target indices")


def ends(loss: str) -> Terms:
    """What the ends of the network keep, but what is the loss head's own."""
    own = "loss head input", "log-softmax"
    return {name: term for name, term in transformer.ends(loss).items() if name not in own}


def batch(loss: str) -> Terms:
    """Tokens, targets and the loss, which outlive the backward pass."""
    kept = transformer.ends(loss)
    return {name: kept[name] for name in _BATCH} | the_loss(loss)


def the_loss(loss: str) -> Terms:
    """One number."""
    return {"loss": sp.Integer(4) if loss != "no upcast" else e}


def _head(moment: str) -> Callable[[str, str], Terms | None]:
    """A moment of the loss head. A frozen head's weight has no gradient, and none to be summed."""

    def terms(loss: str, recipe: str) -> Terms | None:
        every, frozen = transformer.head_moments(loss, chunks=CHUNKS).get(moment), "LoRA" in recipe
        if every is None or (frozen and "weight gradients" in moment):
            return None
        return {name: term for name, term in every.items() if not (frozen and "weight gradient" in name)}

    return terms


HEAD: Final = tuple(dict.fromkeys(name for loss in transformer.LOSSES for name in transformer.head_moments(loss)))

_STATE: Final = {
    "weights": Piece("weights", ("recipe", "sharding"), weights),
    "optimizer state": Piece("optimizer state", ("recipe", "sharding"), optimizer_state),
}
_LAYER: Final = ("attention", "checkpoint", "mlp", "dropout")
_AT_ATTENTION: Final = ("attention", "checkpoint", "dropout")

PIECES: Final[dict[str, Piece]] = {
    **_STATE,
    "gradients": Piece("gradients", ("recipe", "sharding"), gradients),
    "waiting gradients": Piece("gradients", ("recipe", "sharding", "gradients"), waiting),
    "head gradient": Piece("gradients", ("recipe", "gradients", "head"), head_gradient),
    "gradients behind": Piece("gradients", ("recipe", "sharding", "gradients"), gradients_behind),
    "update": Piece("temporaries", ("recipe", "sharding", "implementation"), update),
    "layers, s": Piece("activations ~ s", _LAYER, _growing(layers, False)),
    "layers, s²": Piece("activations ~ s²", _LAYER, _growing(layers, True)),
    "others, s": Piece("activations ~ s", _LAYER, _growing(others, False)),
    "others, s²": Piece("activations ~ s²", _LAYER, _growing(others, True)),
    "at the MLP, s": Piece("activations ~ s", _LAYER, _growing(at_mlp, False)),
    "at the MLP, s²": Piece("activations ~ s²", _LAYER, _growing(at_mlp, True)),
    "at attention, s": Piece("activations ~ s", _AT_ATTENTION, _growing(at_attention, False)),
    "at attention, s²": Piece("activations ~ s²", _AT_ATTENTION, _growing(at_attention, True)),
    "MLP in flight": Piece("temporaries", ("mlp", "dropout"), mlp_in_flight),
    "attention in flight": Piece("temporaries", ("attention", "dropout"), attention_in_flight),
    "second product": Piece("gradients", ("recipe", "gradients"), second_product),
    "behind attention": Piece("gradients", ("recipe", "gradients", "mlp"), behind_attention),
    "low rank": Piece("activations ~ s", ("recipe", "adapted", "mlp"), low_rank),
    "ends": Piece("loss and ends", ("loss",), ends),
    "batch": Piece("loss and ends", ("loss",), batch),
    "loss": Piece("loss and ends", ("loss",), the_loss),
    "between": Piece("temporaries", (), lambda: {"gradient between the layers": e * HIDDEN}),
    **{f"head: {moment}": Piece("loss and ends", ("loss", "recipe"), _head(moment)) for moment in HEAD},
}

_BEFORE: Final = (*_STATE, "waiting gradients")
_OTHERS: Final = ("others, s", "others, s²", "low rank", "head gradient")
_PLACES: Final = {
    "MLP": ("at the MLP, s", "at the MLP, s²", "second product", "MLP in flight", "between", "batch"),
    "attention": ("at attention, s", "at attention, s²", "behind attention", "attention in flight", "between", "batch"),
}

MOMENTS: Final[dict[str, tuple[str, ...]]] = {
    **{
        f"loss head: {moment}": (*_BEFORE, "layers, s", "layers, s²", "low rank", "ends", "loss", f"head: {moment}")
        for moment in HEAD
    },
    **{f"last layer: {place}": (*_BEFORE, *_OTHERS, *pieces) for place, pieces in _PLACES.items()},
    **{f"first layer: {place}": (*_STATE, "gradients behind", *pieces) for place, pieces in _PLACES.items()},
    "optimizer": (*_STATE, "gradients", "update", "batch"),
}
"""The pieces that are live at each moment."""


def counts(switches: Mapping[str, str], sizes: Mapping[Symbol, int]) -> dict[Symbol, int]:
    """The sizes, and the `COUNTS` that follow from them."""
    return {**sizes, **{symbol: integer(piece.at(switches), sizes) for symbol, piece in COUNTS.items()}}


def moments(switches: Mapping[str, str]) -> dict[str, dict[str, Terms]]:
    """What is live at each moment that this step has, piece by piece and term by term.

    Args:
        switches: A word for each of `SWITCHES`.

    Raises:
        ValueError: If one is missing, or its word unknown, or they do not go together.
    """
    for switch, words in SWITCHES.items():
        choose(switch, switches.get(switch, ""), words)
    live = {}
    for moment, names in MOMENTS.items():
        pieces = {name: PIECES[name].at(switches) for name in names}
        if all(terms is not None for terms in pieces.values()):
            live[moment] = pieces
    if not live:
        raise ValueError(f"sharding={switches['sharding']!r} is not written down for {switches['recipe']}: one GPU is")
    return live


def parts(attention: str, checkpoint: str, mlp: str, dropout: str) -> Terms:
    """A layer's bytes for its two kinds of growth: with s, and with s squared; equal at the crossover."""
    by = transformer.by_degree(layer(attention, checkpoint, mlp, dropout))
    return {"with s": sp.expand(total(by.get(1, 0)) / s), "with s squared": sp.expand(total(by.get(2, 0)) / s**2)}


PARTS: Final = Piece("a layer", _LAYER, parts)
"""`parts`, by switches."""
