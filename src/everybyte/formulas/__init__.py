"""What theory says, as sympy expressions: LaTeX for the page, integers for the code. Imports no torch."""

from . import ops, terms, tft, transformer

__all__ = ["ops", "terms", "tft", "transformer"]
