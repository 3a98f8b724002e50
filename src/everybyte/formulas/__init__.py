"""What theory says, as sympy expressions: LaTeX for the page, integers for the code. Imports no torch."""

from . import ops, tft

__all__ = ["ops", "tft"]
