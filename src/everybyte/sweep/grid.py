"""What a sweep runs: values for a notebook's parameters, checked against its `parameters` cell, and crossed."""

from __future__ import annotations

import ast
import csv
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Final

Value = int | float | str | bool
Values = str | Sequence[Value]

MOST: Final = 100_000  # combinations; more is a slip of the keyboard
_TYPES: Final[Mapping[str, type]] = {kind.__name__: kind for kind in (int, float, str, bool)}
_NUMBER: Final = {int: re.compile(r"[+-]?\d+"), float: re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.I)}
_DIGITS: Final = 400  # more than any number of 64 bits needs, and fewer than Python reads
_NEVER_TEXT: Final = re.compile(r"[\0\ud800-\udfff]")  # what neither UTF-8 nor a cell of Python can hold
_RANGE: Final = re.compile(r"([^:]+):([^:]+)(?::([^:]+))?")


class SweepError(ValueError):
    """A sweep cannot be run as asked; the message, one line, says how to mend it."""


@dataclass(frozen=True)
class Parameter:
    """One name of a notebook's `parameters` cell; its type is None where no sweep can set it."""

    name: str
    type: type | None
    default: Value | None

    def values(self, given: Values) -> list[Value]:
        """The values to run, each of this parameter's type.

        Args:
            given: A sequence of values, or text as on the command line: values between commas; of numbers also
                ranges, `start:stop:step`, that hold both their ends (`50:250:50` ends with 250; the step is 1 unless
                given). Double quotes keep a comma in a string.

        Raises:
            SweepError: If one is of another type, or is there twice, or there is none.
        """
        if self.type is None:
            raise SweepError(f"{self.name} cannot be swept: it is none of {', '.join(_TYPES)}; annotate it there")
        try:
            found = list(self._read(given) if isinstance(given, str) else map(self._checked, given))
        except (OverflowError, csv.Error) as error:
            raise SweepError(f"{self.name}={_short(given)} cannot be read: {error}") from None
        if not found:
            raise SweepError(f"{self.name} gets no value: name at least one, as in {self.name}={self.default}")
        if len(set(found)) < len(found):
            twice = next(value for value in found if found.count(value) > 1)
            raise SweepError(f"{self.name} gets {twice!r} twice: name each value once")
        return found

    def _checked(self, value: object) -> Value:
        if self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type or not storable(value):
            raise SweepError(f"{self.name} takes {_an(self.type)}, not {_short(value)}")
        return value

    def _read(self, text: str) -> Iterator[Value]:
        for entry in next(csv.reader([text], strict=True), []):
            span = _RANGE.fullmatch(entry) if self.type in _NUMBER else None
            if span is None:
                yield self._one(entry)
                continue
            # A float's shortest decimal is what was meant, and bounds the exponent.
            start, stop, step = (Fraction(str(self._one(part))) for part in span.groups(default="1"))
            count = (stop - start) // step + 1 if step else 0
            if count < 1:
                raise SweepError(f"{self.name}={entry} holds no value: a range is start:stop:step, both ends included")
            if count > MOST:
                raise SweepError(f"{self.name}={entry} holds more values than the {MOST:,} that a sweep may")
            yield from (self.type(start + step * place) for place in range(count))

    def _one(self, text: str) -> Value:
        if self.type is str:
            return self._checked(text)
        text = text.strip()
        if self.type is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.type in _NUMBER and _NUMBER[self.type].fullmatch(text) and len(text) < _DIGITS:
            return self._checked(self.type(text))
        raise SweepError(f"{self.name} takes {_an(self.type)}, not {_short(text)}")


def storable(value: Value) -> bool:
    """Whether a table, and a notebook, can hold a value."""
    match value:
        case float():
            return math.isfinite(value)
        case str():
            return not _NEVER_TEXT.search(value)
    return -(2**63) <= value < 2**63


def _short(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and _NEVER_TEXT.search(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _an(kind: type) -> str:
    return {int: "whole numbers of 64 bits", float: "numbers", str: "text", bool: "true or false"}[kind]


def parameters(notebook: Any, name: str) -> dict[str, Parameter]:
    """The parameters of a notebook, as its `parameters` cell declares them.

    Args:
        notebook: An nbformat notebook.
        name: What errors call it.

    Raises:
        SweepError: If there is no such cell, or it assigns nothing.
    """
    import papermill

    if not any("parameters" in cell.metadata.get("tags", ()) for cell in notebook.cells):
        raise SweepError(f"{name} has no cell tagged 'parameters': tag the one that assigns what is to be swept")
    found = {}
    for key, seen in papermill.inspect_notebook(notebook).items():
        try:
            default = ast.literal_eval(seen["default"])
        except (ValueError, SyntaxError):
            default = None
        kind = _TYPES.get(seen["inferred_type_name"].strip("'\" "), type(default))
        kind = kind if kind in _TYPES.values() else None
        if kind is float and type(default) is int:
            default = float(default)
        found[key] = Parameter(key, kind, default if type(default) is kind and storable(default) else None)
    if not found:
        raise SweepError(f"{name} assigns nothing in its cell tagged 'parameters': write `name: type = value` there")
    return found


def combinations(
    known: Mapping[str, Parameter], given: Mapping[str, Values], *, zipped: bool = False
) -> list[dict[str, Value]]:
    """Every combination, each with the names given; the last name changes fastest.

    Args:
        known: The notebook's parameters.
        given: Values for some of them, as `Parameter.values` takes them.
        zipped: Take the first values together, then the second ones, and so on, instead of each with each; a single
            value goes with all.

    Raises:
        SweepError: If a name or a value is wrong, or the lengths of what is zipped differ, or there is nothing to run.
    """
    if not given:
        raise SweepError(f"the grid is empty: give values for at least one of {', '.join(known)}")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise SweepError(f"unknown parameter {name!r}{hint}: the notebook takes {', '.join(known)}")
    values = {name: known[name].values(some) for name, some in given.items()}
    lengths = {name: len(some) for name, some in values.items()}
    if zipped:
        longest = max(lengths.values())
        if not set(lengths.values()) <= {1, longest}:
            counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
            raise SweepError(f"only lists of one length can be zipped, and {counts}")
        rows = zip(*(some * longest if len(some) == 1 else some for some in values.values()), strict=True)
    elif math.prod(lengths.values()) > MOST:
        raise SweepError(f"{math.prod(lengths.values()):,} combinations: {MOST:,} are the most; split the sweep")
    else:
        rows = product(*values.values())
    return [dict(zip(values, row, strict=True)) for row in rows]


def shown(combination: Mapping[str, Value]) -> str:
    """`batch_size=4, seq_len=50`."""
    return ", ".join(f"{name}={value}" for name, value in combination.items())
