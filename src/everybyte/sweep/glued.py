"""What an executed notebook glued, and how that becomes a column with a type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from .grid import Value

_WHOLE: Final = r"-?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)"
_INTEGER: Final = re.compile(rf"({_WHOLE})(?: B(?: \(.*\))?)?")  # 1,024 B (1.024 KB, 1.000 KiB), of format_bytes
_NUMBER: Final = re.compile(rf"{_WHOLE}(?:\.\d+)?(?:e[+-]?\d+)?|-?inf|nan", re.IGNORECASE)
_IN_NUMPY: Final = re.compile(r"(?:np|numpy)\.\w+\((.+)\)")


def glued(notebook: Any) -> dict[str, Value]:
    """What an executed notebook glued, by name: text, numbers, true and false. Figures stay in the notebook.

    It may have done so by `myst_nb.glue`, whose record is the value's repr, or by scrapbook, or by papermill's own
    `record` of old, whose records are JSON.
    """
    found: dict[str, Value] = {}
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output):
        data, name = output["data"], output.get("metadata", {}).get("scrapbook", {}).get("name")
        scraps = [data[kind] for kind in data if kind.startswith("application/scrapbook.scrap.")]
        if scraps and isinstance(scraps[0], Mapping):
            found[str(scraps[0]["name"])] = _scalar(scraps[0]["data"])
        elif "application/papermill.record+json" in data:
            found |= {key: _scalar(value) for key, value in data["application/papermill.record+json"].items()}
        elif name is not None and not any("image/" in kind for kind in data):
            found[name] = _literal("".join(next((data[kind] for kind in data if kind.endswith("text/plain")), "")))
    return {text(name): text(value) if isinstance(value, str) else value for name, value in found.items()}


def text(found: str) -> str:
    """A text as a table can hold it: half a surrogate pair as its escape."""
    return found.encode("utf-8", "backslashreplace").decode()


def _literal(shown: str) -> Value:
    """The value behind a repr: `'4 to 16'`, `0.25`, `np.int64(7)`."""
    shown = {"np.True_": "True", "np.False_": "False"}.get(shown, shown)
    inner = _IN_NUMPY.fullmatch(shown)
    try:
        return _scalar(ast.literal_eval(inner[1] if inner else shown))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return inner[1] if inner else shown


def _scalar(value: Any) -> Value:
    return value if isinstance(value, Value) else json.dumps(value, default=str)


def column(values: Sequence[Value | None]) -> pd.api.extensions.ExtensionArray:
    """A column of true and false, of whole numbers, of numbers, or of text: the first that takes every value."""
    readers: dict[str, Callable[[Value], Value]] = {"boolean": _boolean, "Int64": _integer, "Float64": _number}
    for dtype, read in readers.items():
        try:
            return pd.array([None if value is None else read(value) for value in values], dtype=dtype)
        except (ValueError, OverflowError):
            continue
    return pd.array([None if value is None else str(value) for value in values], dtype="string")


def _boolean(value: Value) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _integer(value: Value) -> int:
    if isinstance(value, str) and (match := _INTEGER.fullmatch(value)):
        value = int(match[1].replace(",", ""))
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def _number(value: Value) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        raise ValueError(value)
    return float(value.replace(",", "") if isinstance(value, str) else value)
