"""TFT-225 with parts of it detached or inside checkpoints, in closed form; the symbols are those of `formulas.tft`.

A checkpoint drops what is kept inside it, and keeps its input and the random generator's state. One more term stays in
attention: 1 / sqrt(d), a Python number to autograd, which a checkpoint does not see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sympy import Expr

from .terms import L, Terms, b, g, s, total
from .tft import attention_saved, f, past_variables, saved, stack_saved


def dropped(config: Any) -> Terms:
    """Bytes that a checkpoint round each of five places drops, by the name of the place.

    The input of a stack is the first of its L networks'. A linear recurrence keeps nothing but its input.

    Raises:
        ValueError: the recurrence is another, or attention is fused.
    """
    for name, value in {"recurrence": "linear", "fused_attention": False}.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}={getattr(config, name)!r}: checkpoints are written down for {value!r} only")
    drops: Terms = {}
    for name, rows in {"static_encoder.stack": b, "historical_stack": b * s, "future_stack": b * f}.items():
        inside = stack_saved(config, rows)
        drops[name] = total(inside) - inside["input"] / L - g
    inside = attention_saved(config)
    return drops | {"recurrence": -g, "attention": total(inside) - inside["input"] - inside["scale"] - g}


def kept(config: Any) -> dict[str, Expr]:
    """What a forward pass keeps: as it stands, detached, with checkpoints at the five places, and three ways to select.

    These are a checkpoint round the network of each variable, one round the whole historical selection, and
    the streamed selection that keeps no output.
    """
    parts = saved(config)
    every, networks = total(parts), total(parts["historical_selection.variables"])
    return {
        "as it stands": every,
        "detached": total({part: parts[part] for part in ("attention", "head", "loss")}),
        "five places": every - total(dropped(config)),
        "each variable": every - networks + past_variables(config) * g,
        "whole selection": every - networks - total(parts["historical_selection.weights"]) + g,
        "streamed": total(saved(replace(config, selection_compute="streamed", selection_keep=0))),
    }
