"""Writes the page of formulas, `book/formulas.md`: `python book/formulas_page.py`, as `make refresh` does.

No formula is typed: each is an expression of `everybyte.formulas`, set by its `latex`. Printed, it is one sheet of A4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import sympy as sp

from everybyte.formulas import inference, model_state, terms, tft, transformer
from everybyte.formulas.terms import Terms, b, h, latex, s, total
from everybyte.models import TFTConfig

PAGE = Path(__file__).with_name("formulas.md")

HEAD = """\
<!-- Written by book/formulas_page.py from src/everybyte/formulas: change those, then `make refresh`. -->

# All formulas on one page

Everything is in **bytes**. Each formula is [computed]{{.evidence .evidence-computed}} by the library. Chapters hold
those of the decoder, of Adam, of inference and of the TFT against traces and measurements; those under *Quantized and
sharded*, and the cache of 4 bits, are held against tests alone. Printed, the page is one sheet of A4.

{symbols}

:::::{{container}} sheet
"""

MIXED = "bf16, master copy"
KEPT = sp.Symbol("A")
LOSS = 4  # bytes, in fp32

WIDE = ("kept for backward", "bytes in bf16 on CUDA", "bytes")
"""The head of a table with folded-in widths, e = 2, m = 1, r = 4, and with general ones."""


OTHERS = {inference.c: "queries that run at once", inference.t: "positions they attend to", model_state.N: "GPUs",
          tft.n_o: "observed variables", tft.f: "horizon", KEPT: "what all layers and ends keep"}  # fmt: skip
"""Symbols that only one part of the page has."""


def symbols() -> dict[sp.Symbol, str]:
    """What each letter stands for, as the module that defines them says it."""
    lines = re.findall(r"^    (\S.*)$", terms.__doc__, flags=re.MULTILINE)
    entries = [entry.split(" ", 1) for line in lines for entry in re.split(r"\s{2,}", line.strip())]
    return {getattr(terms, symbol): meaning.strip() for symbol, meaning in entries} | OTHERS


def decoder() -> Iterator[tuple[str, Terms]]:
    yield "two LayerNorms", transformer.norms()
    yield "attention, eager", transformer.attention()
    yield "attention, fused", transformer.attention("flash")
    yield "MLP, GELU", transformer.mlp()
    yield "MLP, SwiGLU", transformer.mlp("swiglu")
    yield "**a layer**, eager", transformer.layer()
    yield "without dropout", transformer.layer(dropout=False)
    yield "fused attention", transformer.layer(attention="flash")
    yield "selective recomputation", transformer.layer(checkpoint="selective")
    yield "full recomputation", transformer.layer(checkpoint="full")
    yield "**ends** of the network", transformer.ends()
    yield "**all layers and ends**", transformer.stack()
    yield "loss head at its peak", transformer.head_moments()["backward of log-softmax"]


def peak() -> sp.Expr:
    """Of a step, where backward has just made the gradient of the logits: no parameter has a gradient yet."""
    waiting = total(model_state.adam(MIXED)) - model_state.adam(MIXED)["gradients"]
    head = transformer.head_moments()["backward of log-softmax"]
    made = sum(term for name, term in head.items() if name not in transformer.ends())
    return waiting + KEPT + made + LOSS


def state() -> Iterator[tuple[str, Terms, Terms]]:
    for recipe in model_state.RECIPES:
        if "without" not in recipe:
            yield recipe, model_state.adam(recipe), model_state.step(recipe)


def beyond() -> Iterator[tuple[str, Terms]]:
    yield "8-bit Adam, blocks of 2,048", model_state.adam_8bit()
    yield "4-bit weights, QLoRA", model_state.nf4()
    for stage in (1, 2, 3):
        yield f"ZeRO-{stage}, one of $N$ GPUs", model_state.per_gpu(f"zero-{stage}")


def running() -> Iterator[tuple[str, Terms]]:
    yield "KV cache", inference.kv_cache()
    yield "KV cache, 8 bits", inference.kv_cache(8)
    yield "KV cache, 4 bits", inference.kv_cache(4)
    yield "growing it by `torch.cat`", inference.growth()
    yield "eager scores of $c$ queries", {"": inference.scores()}


def post_mortem() -> Iterator[tuple[str, Terms]]:
    config = TFTConfig()
    yield "a gated residual network", tft.grn_saved(config, b * s, h, h)
    for name in ("historical_selection.variables", "attention"):
        on_a_gpu = {part: term.subs(tft.c, 0) for part, term in tft.saved(config)[name].items()}
        yield name.replace("_", " ").replace(".", ", "), on_a_gpu


def page() -> str:
    """The whole page."""
    linear, quadratic = transformer.by_degree(transformer.paper(transformer.layer())).values()
    crossing = transformer.crossover(linear.subs(transformer.BF16_ON_CUDA), quadratic.subs(transformer.BF16_ON_CUDA))
    folded = ((name, total(f).subs(transformer.BF16_ON_CUDA), f) for name, f in decoder())
    parts = [
        HEAD.format(symbols=" · ".join(f"${latex(x)}$ {meaning}" for x, meaning in symbols().items()) + "."),
        *_table("A decoder", WIDE, folded),
        f"The linear and the quadratic term of a layer are equal at $s = {latex(crossing)}$. A step in bf16 with a "
        f"master copy peaks at ${latex(peak())}$, if that is where its backward pass begins.",
        *_table("Parameters and Adam", ("recipe", "state", "peak of the step, foreach"), state()),
        f"A decoder has $P = {latex(total(transformer.parameters()))}$ parameters, with biases and learned positions.",
        *_table("Quantized and sharded", ("state", "bytes"), beyond()),
        *_table("Inference", ("live", "bytes"), running()),
        *_table("The Temporal Fusion Transformer", ("kept for backward", "bytes"), post_mortem()),
        ":::::",
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(title: str, head: tuple[str, ...], rows: Iterator[tuple[str | Mapping, ...]]) -> Iterator[str]:
    yield f"## {title}"
    lines = [head, ("---",) * len(head)]
    lines += [(name, *(f"${latex(total(formula))}$" for formula in formulas)) for name, *formulas in rows]
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PAGE.name}")
