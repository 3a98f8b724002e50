"""What theory says, as sympy expressions: LaTeX for the page, integers for the code. Imports no torch."""

from . import inference, model_state, ops, terms, tft, transformer

__all__ = ["inference", "model_state", "ops", "terms", "tft", "transformer"]
