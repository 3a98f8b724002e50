"""What theory says, as sympy expressions: LaTeX for the page, integers for the code. Imports no torch."""

from . import accumulation, budget, inference, model_state, ops, terms, tft, tft_checkpoints, transformer

__all__ = [
    "accumulation", "budget", "inference", "model_state", "ops", "terms", "tft", "tft_checkpoints", "transformer",
]  # fmt: skip
