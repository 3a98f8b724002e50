"""What the calculator's page is given: the library's formulas as JavaScript, its GPUs, and models by name.

`press.stage` writes `script()` beside the page's own `calculator.js`, whenever pages are rendered.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from everybyte.formulas import budget, ops, tft
from everybyte.formulas.terms import WIDTHS, javascripts, total
from everybyte.gpus import DEFAULT, TABLE
from everybyte.models import TFTConfig
from everybyte.workspace import cublas_bytes

DTYPES = ("bfloat16", "float16", "float32")

_GPT2 = {"mlp": "gelu", "biases": "all", "head": "tied", "positions": "learned"}
_LLAMA = {"mlp": "swiglu", "biases": "none", "head": "own", "positions": "rotary"}


def _model(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, **words: Any) -> dict:
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner, vocabulary=vocabulary)
    return sizes | words


# The sizes are those of each model's own config.json; what they count is in tests/book/test_calculator.py.
DECODERS = {
    "Activation Memory Math, 1.3B": _model(24, 2048, 16, 16, 8192, 32_000, rows=2048, **_GPT2),
    "GPT-2": _model(12, 768, 12, 12, 3072, 50_257, rows=1024, **_GPT2),
    "GPT-2 XL": _model(48, 1600, 25, 25, 6400, 50_257, rows=1024, **_GPT2),
    "SmolLM2 135M": _model(30, 576, 9, 3, 1536, 49_152, **_LLAMA | {"head": "tied"}),
    "SmolLM2 1.7B": _model(24, 2048, 32, 32, 8192, 49_152, **_LLAMA | {"head": "tied"}),
    "TinyLlama 1.1B": _model(22, 2048, 32, 4, 5632, 32_000, **_LLAMA),
    "Llama 2 7B": _model(32, 4096, 32, 32, 11_008, 32_000, **_LLAMA),
    "Llama 2 13B": _model(40, 5120, 40, 40, 13_824, 32_000, **_LLAMA),
    "Llama 2 70B": _model(80, 8192, 64, 8, 28_672, 32_000, **_LLAMA),
    "Llama 3 8B": _model(32, 4096, 32, 8, 14_336, 128_256, **_LLAMA),
    "Llama 3 70B": _model(80, 8192, 64, 8, 28_672, 128_256, **_LLAMA),
    "Llama 3.2 1B": _model(16, 2048, 32, 8, 8192, 128_256, **_LLAMA | {"head": "tied"}),
    "Mistral 7B v0.1": _model(32, 4096, 32, 8, 14_336, 32_000, **_LLAMA),
    "Qwen2.5 0.5B": _model(24, 896, 14, 2, 4864, 151_936, **_LLAMA | {"head": "tied", "biases": "QKV"}),
    "Qwen2.5 7B": _model(28, 3584, 28, 4, 18_944, 152_064, **_LLAMA | {"biases": "QKV"}),
}  # fmt: skip

TFT = {
    "static": "n_s", "observed": "n_o", "known": "n_k", "history": "s", "horizon": "f", "tft_hidden": "h",
    "tft_heads": "a", "stack": "L", "quantiles": "q", "table": "p_max", "tft_batch": "b",
}  # fmt: skip


def tft_moments(config: TFTConfig) -> dict[str, list[tuple[str, dict]]]:
    """What is live at the two moments of a TFT's step that can be its peak, by category."""
    state = tft.model_state(config)
    start = {name: state[name] for name in ("parameters", "positional table", "quantiles", "mask") if state[name] != 0}
    categories = {
        "optimizer state": ("optimizer moments", "optimizer step counters"),
        "gradients": ("gradients so far", "gradients"),
        "activations": ("networks yet to come", "stacked outputs"),
        "loss and ends": ("batch and forecast", "loss, and 1, its gradient", "loss"),
    }
    named = {name: category for category, names in categories.items() for name in names}
    moments = {}
    for moment, terms in tft.peak(config).items():
        parts: dict[str, dict] = {"weights": start}
        for name, term in terms.items():
            parts.setdefault(named.get(name, "temporaries"), {})[name] = term
        moments[moment] = [*parts.items()]
    return moments


def dtype_sizes(dtype: str) -> dict[str, int]:
    """Widths of what a dtype decides on CUDA, by their symbols' names."""
    numbers = {str(symbol): size for symbol, size in ops.sizes(1, 1, 1, element=dtype, device="cuda").items()}
    return {name: numbers[name] for name in ("e", "m", "r", "g")}


def mismatches() -> dict[str, tuple[str, str]]:
    """Every setting of dtype, recipe, sharding and attention that does not go together: at which field, and why."""
    names = ("recipe", "sharding", "attention")
    found = {}
    for dtype, *words in product(DTYPES, *(budget.SWITCHES[name] for name in names)):
        if fault := budget.mismatch(dict(zip(names, words, strict=True)), dtype):
            found["|".join([dtype, *words])] = fault
    return found


def script() -> str:
    """The page's data: `FORMULAS`, and `BOOK` with all that is no formula."""
    formulas, seed = {}, TFTConfig.seed()
    for name, piece in {**{str(x): piece for x, piece in budget.COUNTS.items()}, **budget.PIECES}.items():
        every = {f"{name}|{setting}": terms for setting, terms in piece.every().items()}
        formulas |= {key: terms for key, terms in every.items() if terms is not None}
    formulas |= {f"parts|{setting}": terms for setting, terms in budget.PARTS.every().items()}
    moments = tft_moments(seed)
    formulas |= {f"tft|{x}|{category}": terms for x, parts in moments.items() for category, terms in parts}
    formulas["tft parameters"] = total(tft.parameters(seed))
    formulas["tft kept"] = {name: total(terms) for name, terms in tft.saved(seed).items() if total(terms) != 0}
    numbers = tft.sizes(seed, 8)
    data = {
        "switches": budget.SWITCHES,
        "counts": {str(x): piece.switches for x, piece in budget.COUNTS.items()},
        "pieces": {name: {"category": x.category, "switches": x.switches} for name, x in budget.PIECES.items()},
        "moments": budget.MOMENTS,
        "parts": budget.PARTS.switches,
        "tokens": budget.TOKENS,
        "dtypes": {dtype: dtype_sizes(dtype) for dtype in DTYPES},
        "mismatches": mismatches(),
        "decoders": DECODERS,
        "tft": {
            "symbols": TFT,
            "seed": {field: next(n for x, n in numbers.items() if str(x) == symbol) for field, symbol in TFT.items()},
            "widths": {"e": WIDTHS["float32"], "m": 1, "c": 0, "g": 0},
            "moments": {moment: [category for category, _ in parts] for moment, parts in moments.items()},
        },
        "gpu": DEFAULT,
        "gpus": {
            gpu.key: {
                "name": gpu.name,
                "usable": gpu.usable,
                "workspace": cublas_bytes(gpu),
                "flash": gpu.capability >= (8, 0),
            }
            for gpu in TABLE
        },
    }
    return f"{javascripts(formulas, 'FORMULAS')}\nconst BOOK = {json.dumps(data, separators=(',', ':'))};\n"
