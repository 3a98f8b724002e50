"""What the rows of activation_memory_math.toml call: closed forms, and traces of small networks and of the example.

Sizes are the worked example's unless said otherwise: b = 4, s = h = 2048, a = 16, L = 24, V = 32000, bf16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

import everybyte as eb
from everybyte.formulas import inference, model_state, terms, transformer
from everybyte.formulas.terms import HIDDEN, SCORES, P, V, b, e, h, integer, m, r, s, total
from everybyte.models import GPT, Block, GPTConfig
from everybyte.models.master import MasterWeights
from everybyte.timeline import Recorder, Timeline
from everybyte.workspace import cublas_bytes

SIZE = transformer.sizes(4, 2048, 2048, 16, 24, 32_000)
LAYER = transformer.layer()


def _in(unit: terms.Expr, formula: terms.Terms | terms.Expr) -> Fraction:
    return Fraction(integer(formula, SIZE), integer(unit, SIZE))


# One layer.


def row(name: str) -> Fraction:
    """Bytes of one line of the list, in s b h, or of the scores in a s² b."""
    return _in(SCORES if name.startswith("softmax") else HIDDEN, LAYER[name])


def _parts(part: str, switches: dict) -> dict[int, terms.Expr]:
    whole = {
        "layer": lambda: transformer.layer(**switches),
        "norms": transformer.norms,
        "attention": lambda: transformer.attention(**switches),
        "MLP": lambda: transformer.mlp(**switches),
    }[part]()
    return transformer.by_degree(transformer.paper(whole))


def linear(part: str = "layer", **switches: str | bool) -> Fraction:
    """Bytes that grow as s, in s b h."""
    return _in(HIDDEN, _parts(part, switches)[1])


def quadratic(part: str = "layer", **switches: str | bool) -> Fraction:
    """Bytes that grow as s², in a s² b."""
    return _in(SCORES, _parts(part, switches).get(2, terms.sp.S.Zero))


def layer(**switches: str | bool) -> int:
    """Bytes of the lines that the published sum counts."""
    return integer(transformer.paper(transformer.layer(**switches)), SIZE)


def layer_at(sequence: int) -> int:
    """The same at another sequence length."""
    return integer(transformer.paper(LAYER), SIZE | {s: sequence})


def single_over_half() -> Fraction:
    """What a layer keeps in fp32, by what it keeps in bf16."""
    return Fraction(integer(LAYER, SIZE | {e: 4, m: 1, r: 4}), integer(LAYER, SIZE))


def cancels(symbol: str) -> bool:
    """Whether a size is not in the crossover of the two terms."""
    parts = _parts("layer", {})
    where = transformer.crossover(parts[1], parts[2])
    return symbol not in {str(one) for one in where.free_symbols}


def crossover(width: int, over: str = "scores against all else") -> Fraction:
    """The sequence at which the scores equal the rest of a layer; or attention as a whole the MLP."""
    parts = _parts("layer", {})
    if over == "attention against MLP":
        attention = _parts("attention", {})
        parts = {1: _parts("MLP", {})[1] - attention[1], 2: attention[2]}
    return Fraction(str(transformer.crossover(parts[1], parts[2]).subs({terms.d_head: width, e: 2, m: 1, r: 4})))


def arithmetic_crossover() -> int:
    """The sequence at which a forward pass has as many operations with scores as with weights: 24 s b h² = 4 s² b h."""
    return int(terms.sp.solve(24 * s * b * h**2 - 4 * s**2 * b * h, s)[0].subs(h, 2048))


# Single operations, as autograd keeps them. A trace by CUDA's rules computes nothing.


def _block(x: torch.Tensor) -> torch.Tensor:
    return Block(GPTConfig(context=32, hidden=64, heads=4))(x)


def _kept(function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> eb.Saved:
    return eb.saved(lambda: function(torch.randn(shape).bfloat16().requires_grad_()), rules="cuda")


def bytes_kept(op: str) -> Fraction:
    """Bytes that an operation over [4, 64, 64] in bf16 keeps, for each element of its result."""
    function = {
        "a linear layer": lambda x: nn.Linear(64, 64, dtype=x.dtype)(x),
        "GELU": F.gelu,
        "ReLU": F.relu,
        "dropout": lambda x: F.dropout(x, 0.1),
        "softmax": lambda x: x.softmax(-1),
    }[op]
    return Fraction(_kept(function, (4, 64, 64)).total_bytes, 4 * 64 * 64)


def keeps(op: str, role: str) -> bool:
    """Whether what an operation keeps is its input, or what it made: role "input" or "activation"."""
    function = {"GELU": F.gelu, "ReLU": F.relu, "softmax": lambda x: x.softmax(-1)}[op]
    return [*_kept(function, (4, 64, 64)).frame()["role"]] == [role]


def softmax_gradient(row_sum: bool) -> bool:
    """Whether (g - (g · y)) · y is autograd's gradient, the inner dot summed over a row or not. Really computed."""
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).view(3, 5).requires_grad_()
    y, g = x.softmax(-1), torch.linspace(1, 3, 15, dtype=torch.float64).view(3, 5) ** 2
    inner = (g * y).sum(-1, keepdim=True) if row_sum else g * y
    return torch.allclose((g - inner) * y, torch.autograd.grad(y, x, g)[0])


def formulas_say_all() -> bool:
    """Whether a layer keeps just what the gradient formulas of its operations name."""
    return _kept(_block, (2, 32, 64)).total_bytes == integer(LAYER, transformer.sizes(2, 32, 64, 4))


def layers_at_once() -> Fraction:
    """What two layers more add to the bytes alive where a forward pass ends, by what one layer keeps."""

    def alive(layers: int) -> int:
        with eb.trace(rules="cuda") as run:
            model = GPT(GPTConfig(layers=layers, context=32, hidden=64, heads=4))
            for _ in run.steps(1):
                loss = model(*run.to_device([*torch.zeros(2, 2, 32, dtype=torch.int64)]))
                held = run.timeline.live_bytes[-1] - sum(p.nbytes for p in model.parameters())
                del loss
        return int(held)

    return Fraction(alive(4) - alive(2), integer(LAYER, transformer.sizes(2, 32, 64, 4)))


# The ends of the network.


def ends() -> int:
    """Bytes that the ends of the network keep beside the layers."""
    return integer(transformer.ends(), SIZE)


def tensor_of_logits() -> int:
    """Bytes of log-softmax, which has the logits' shape."""
    return integer(transformer.ends()["log-softmax"], SIZE)


def tensors_of_logits() -> int:
    """Tensors as large as the fp32 logits that are alive at the loss head's peak."""
    peak = transformer.head_peak(SIZE)
    return sum(integer(term, SIZE) >= tensor_of_logits() for term in peak.values())


def chunked_keeps_rows_of_words() -> bool:
    """Whether a chunked loss keeps anything as wide as the vocabulary."""
    return V in total(transformer.ends("chunked")).free_symbols


def largest_is_as_wide_as_the_vocabulary() -> bool:
    """Whether the step's largest tensor is [b s, V]."""
    frame = step().frame().query("action == 'alloc'")
    return frame.loc[frame["nbytes"].idxmax(), "shape"] == "[8192, 32000]"


# The whole step.


def parameters() -> int:
    """Learned numbers, the head tied to the embedding."""
    return integer(transformer.parameters(), SIZE)


@cache
def step() -> Timeline:
    """Two steps of the example, traced."""
    with eb.trace(rules="cuda") as run:
        model = GPT(GPTConfig.seed())
        optimizer = MasterWeights(model.parameters())
        tokens, targets = run.to_device([*torch.zeros(2, 4, 2048, dtype=torch.int64)])
        for _ in run.steps(2):
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.timeline


def peak() -> int:
    """The peak of that step."""
    return step().peak_bytes


def peak_of(sequences: int, waiting: bool = False) -> int:
    """The peak of the same step with fewer sequences at once; with gradients that wait for those of others.

    It lies in the loss head's backward: 14 bytes a parameter are there, what forward kept, and two gradients.
    """
    size = SIZE | {b: sequences}
    kept = total(transformer.stack()) + 2 * 4 * b * s * V + 4
    return integer(kept, size) + (16 if waiting else 14) * parameters()


def peak_is_in(phase: str) -> bool:
    """Whether the step's peak is in its forward pass, its backward pass or its optimizer."""
    return step().frame()["phase"].iloc[step().peak] == phase


def early_in_backward() -> bool:
    """Whether the peak is among the first hundredth of backward's events."""
    frame = step().frame().query("step == 1")
    backward = frame.index[frame["phase"] == "backward"]
    return backward[0] <= step().peak <= backward[len(backward) // 100]


def gradients_at_the_peak() -> int:
    """Bytes of parameters' gradients there."""
    return int(step().by("category")["nbytes"].get("gradient", 0))


def bytes_a_parameter(moment: str) -> Fraction:
    """Of model state when backward begins, when it has ended, and at most in the optimizer."""
    recipe = model_state.adam("bf16, master copy")
    terms_then = {
        "forward": {name: term for name, term in recipe.items() if name != "gradients"},
        "backward ends": recipe,
        "optimizer": model_state.step("bf16, master copy"),
    }[moment]
    return Fraction(integer(terms_then, {P: 1}))


def sharded(sharding: str) -> int:
    """Bytes of model state on each of eight GPUs."""
    return integer(model_state.per_gpu(sharding), {P: parameters(), model_state.N: 8})


# Fused attention.


def kept_by_the_kernel() -> Fraction:
    """States, each of s b h elements, that the fused kernel's gradient needs."""
    kept = transformer.attention("flash")
    return _in(e * HIDDEN, {name: kept[name] for name in ("Q and K", "V", "output projection input")})


def grows_with_the_square(attention: str) -> bool:
    """Whether a layer's step makes any tensor that is four times as large at twice the length."""

    def largest(length: int) -> int:
        with eb.trace(rules="cuda") as run:
            block = Block(GPTConfig(context=length, hidden=64, heads=4, attention=attention))
            x = torch.randn(2, length, 64).bfloat16().requires_grad_()
            block(x).sum().backward()
        frame = run.timeline.frame()
        return int(frame["nbytes"].max())

    return largest(2048) == 4 * largest(1024)


# Inference.


def kept_without_grad() -> int:
    """Bytes that are alive after a layer under `no_grad`, beside its weights, its input and its output."""
    with eb.trace(rules="cuda") as run, torch.no_grad():
        block, x = Block(GPTConfig(context=32, hidden=64, heads=4)), torch.randn(2, 32, 64).bfloat16()
        y = block(x)
    return int(run.timeline.live_bytes[-1]) - sum(tensor.nbytes for tensor in (*block.parameters(), x, y))


def working_set(layers: int) -> int:
    """The peak above the weights of a forward pass that keeps nothing."""
    with eb.trace(rules="cuda") as run, torch.no_grad():
        model = GPT(GPTConfig(layers=layers, context=32, hidden=64, heads=4)).eval()
        tokens = run.to_device(torch.zeros(2, 32, dtype=torch.int64))
        for _ in run.steps(1):
            model(tokens)
    return run.timeline.peak_above_start


def _requests(positions: int, queries: int) -> dict:
    return inference.sizes(
        4, positions, layers=24, hidden=2048, heads=16, queries=queries, vocabulary=32_000, element="bfloat16"
    )


def live_grows(queries: str, attention: str) -> Fraction:
    """By what factor the fullest moment of a layer grows when there are twice the positions.

    Args:
        queries: "prefill", all of them at once, or "decode", one.
        attention: "eager" or "flash".
    """
    moments = inference.moments(attention)
    moments.pop("logits of the last position")
    most = []
    for length in (2**18, 2**19):
        size = _requests(length, length if queries == "prefill" else 1)
        most.append(max(integer(moment, size) for moment in moments.values()))
    return Fraction(most[1], most[0])


def cache_bytes(kv_heads: int = 16, bits: int | None = None) -> int:
    """Keys and values of 2,048 positions for four sequences."""
    size = inference.sizes(4, 2048, layers=24, hidden=2048, heads=16, kv_heads=kv_heads, element="bfloat16")
    return integer(inference.kv_cache(bits), size)


def transients() -> int:
    """The most that is live beside the cache when a token is decoded, with scores."""
    return max(integer(moment, _requests(2048, 1)) for moment in inference.moments().values())


def prefill_scores(queries: int, positions: int = 2048) -> int:
    """Bytes of one layer's scores, for so many queries at once."""
    return integer(inference.scores(), _requests(positions, queries))


# The allocator.


def _batches(lengths: str) -> Timeline:
    """Twenty batches whose tensors have one length or many, each let go before the next."""
    recorder = Recorder()
    for batch in range(20):
        length = 512 if lengths == "one" else 512 + 97 * (batch * 7 % 20)
        held = [recorder.alloc(4 * length * 2048 * width, device="cuda:0") for width in (1, 4, 1, 4)]
        for storage in held:
            recorder.free(storage)
    return recorder.finish({})


def reserved_over_allocated(lengths: str) -> Fraction:
    """Peak reserved by peak allocated in these batches."""
    replay = eb.Allocator().replay(_batches(lengths))
    return Fraction(replay.peak_reserved, replay.peak_allocated)


def smallest_card_over_reserved(lengths: str) -> Fraction:
    """The least memory in which these batches run, to 2 MiB, by what they reserve where there is plenty."""
    timeline = _batches(lengths)
    return Fraction(eb.Allocator().smallest_card(timeline), eb.Allocator().replay(timeline).peak_reserved)


def workspace() -> int:
    """Bytes that a thread's products take on an A100 beside their operands and results."""
    return cublas_bytes(eb.gpus.find("a100-80gb"), config="")


# Pitfalls.


def swiglu(kind: str = "swiglu") -> int:
    """Tensors as wide as d_ff that a SwiGLU keeps."""
    return sum(terms.d_ff in term.free_symbols for term in transformer.mlp(kind).values())


def swiglu_linear(kind: str) -> Fraction:
    """Bytes of such an MLP with d_ff = 8 h / 3, in s b h."""
    three = total(transformer.mlp(kind)).subs(terms.d_ff, 8 * h / 3) * 3  # so that it is a whole number
    return _in(HIDDEN, three) / 3


def head_over_layer(attention: str) -> Fraction:
    """The loss head's peak by what one layer keeps."""
    return Fraction(integer(transformer.head_peak(SIZE), SIZE), layer(attention=attention))


def extrapolated(short: int) -> Fraction:
    """A layer at 2,048 tokens, guessed in proportion from a short sequence, by what it is."""
    return Fraction(layer_at(short) * 2048, short * layer_at(2048))
