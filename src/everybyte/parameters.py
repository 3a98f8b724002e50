"""The check that a notebook makes of its parameters before it does any work.

papermill lets a wrong name through (it is a line in a log) and enforces no type, so `-p batchsize 4` would quietly run
the default. A notebook therefore calls `check` in the cell right after its `parameters` cell:

    device = check(globals(), batch_size=whole(at_least=1), device=device_name).device
"""

from __future__ import annotations

import ast
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

Kind = Callable[[object], object]
"""Takes a value and returns it, ready for use; raises ValueError("must be ..., not ...") if it will not do."""

INJECTED = "# Parameters\n"
"""How papermill begins the cell it injects (papermill/translators.py, `Translator.codify`)."""


class ParameterError(ValueError):
    """A parameter's name or value is wrong; the message says what would do."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone: IPython asks for this, and the frames would name nothing of the reader's."""
        return [f"{type(self).__name__}: {self}"]


def check(namespace: Mapping[str, object], **kinds: Kind) -> SimpleNamespace:
    """Check a notebook's parameters: every injected name is known, every value will do.

    Args:
        namespace: the notebook's `globals()`. Its `In`, IPython's list of the cells run so far, tells which names
            papermill injected; a plain mapping without `In` has its values checked only.
        **kinds: for each parameter, what it must be.

    Returns:
        The values as the kinds return them: a device resolved, the others as they are.

    Raises:
        ParameterError: at the first wrong name or value.
    """
    for name in injected_names(namespace.get("In", ())):
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ParameterError(f"unknown parameter {name!r}{hint}: this notebook takes {', '.join(kinds)}")
    values = {}
    for name, kind in kinds.items():
        if name not in namespace:
            raise ParameterError(f"parameter {name!r} has no value: set its default in the parameters cell")
        try:
            values[name] = kind(namespace[name])
        except ValueError as error:
            raise ParameterError(f"{name} {error}") from None
    return SimpleNamespace(**values)


def injected_names(cells: Sequence[str]) -> list[str]:
    """The names that papermill's injected cells assign, in order."""
    assignments = (
        statement
        for cell in cells
        if cell.startswith(INJECTED)
        for statement in ast.parse(cell).body
        if isinstance(statement, ast.Assign)
    )
    return [target.id for statement in assignments for target in statement.targets if isinstance(target, ast.Name)]


def whole(*, at_least: int = 1, at_most: int | None = None) -> Kind:
    """A whole number within bounds, both included."""
    expected = f"a whole number of at least {at_least:,}"
    if at_most is not None:
        expected = f"a whole number from {at_least:,} to {at_most:,}"

    def kind(value: object) -> int:
        # True is an int to Python, and never meant as one here.
        if not isinstance(value, int) or isinstance(value, bool):
            raise unfit(value, expected)
        if value < at_least or (at_most is not None and value > at_most):
            raise unfit(value, expected)
        return value

    return kind


positive_int: Kind = whole(at_least=1)
"""A whole number of at least 1."""


def number(*, at_least: float = 0.0, below: float = math.inf) -> Kind:
    """A finite number from `at_least` up to, and without, `below`."""
    expected = f"a number of at least {at_least:g}" + (f" and below {below:g}" if below < math.inf else "")

    def kind(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not at_least <= value < below:
            raise unfit(value, expected)
        return float(value)

    return kind


def one_of(*choices: object) -> Kind:
    """One of the values listed, of the same type."""

    def kind(value: object) -> object:
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise unfit(value, f"one of {', '.join(map(repr, choices))}")
        return value

    return kind


def device_name(value: object) -> str:
    """A device to measure on: "cpu", or what the environment variable EVERYBYTE_DEVICE says for "auto", else "cpu".

    Raises:
        ValueError: it is neither, or it is "cuda", whose kernels allocate otherwise than those of the CPU.
    """
    chosen = value
    if chosen == "auto":
        chosen = os.environ.get("EVERYBYTE_DEVICE") or "auto"
    if chosen in ("cpu", "auto"):
        return "cpu"
    note = ": what is shown here is compared with the kernels of the CPU" if chosen == "cuda" else ""
    source = " (from the environment variable EVERYBYTE_DEVICE)" if chosen != value else ""
    raise ValueError(f"must be 'cpu' or 'auto', not {chosen!r}{source}{note}")


def best_device(value: object) -> str:
    """A device to run on, for a chapter that can use a GPU; "auto" is "cuda" where PyTorch finds one, else "cpu".

    As with `device_name`, the environment variable EVERYBYTE_DEVICE says what "auto" is.

    Raises:
        ValueError: it is neither "cpu" nor "cuda" nor "auto", or it is "cuda" and PyTorch finds no GPU.
    """
    import torch

    chosen, source = value, ""
    if value == "auto" and os.environ.get("EVERYBYTE_DEVICE"):
        chosen, source = os.environ["EVERYBYTE_DEVICE"], " (from the environment variable EVERYBYTE_DEVICE)"
    if chosen not in ("cpu", "cuda", "auto"):
        raise ValueError(f"must be 'cpu', 'cuda' or 'auto', not {chosen!r}{source}")
    found = torch.cuda.is_available()
    if chosen == "cuda" and not found:
        raise ValueError(f"must be 'cpu' or 'auto' here, not {chosen!r}{source}: PyTorch finds no GPU")
    return "cuda" if found and chosen != "cpu" else "cpu"


def unfit(value: object, expected: str) -> ValueError:
    """The error for a value that is not what was expected."""
    return ValueError(f"must be {expected}, not {value!r}")
