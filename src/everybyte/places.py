"""Places in code: whose file a line is in, and how it is called so that it says the same on every machine.

A line of an installed package tells where memory is really asked for; the line of the user's own code that led there
is the one that he can change. Both are told from the names of files alone, for a recording comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

PYTORCH, LIBRARY, OWN = "PyTorch's", "a library's", "the user's"

_OURS: Final = Path(__file__).parent
MACHINERY: Final = tuple(
    str(_OURS / name)
    for name in (
        *("as_main.py", "attribution.py", "cli.py", "commands", "direct.py", "elsewhere.py", "files.py"),
        *(
            "foreign.py",
            "importing.py",
            "kernels.py",
            "leaving.py",
            "loaders.py",
            "measure.py",
            "measure_cuda.py",
            "operands.py",
            "pretrained.py",
            "processes.py",
            "rules",
        ),
        *(
            "rounds.py",
            "run.py",
            "saved.py",
            "scalars.py",
            "script.py",
            "storages.py",
            "surface.py",
            "torch_cuda.py",
            "trace.py",
        ),
        *("values.py",),
    )
)
"""What of this library runs between a user's code and PyTorch."""

_INSTALLED: Final = re.compile(r"(?:.*/)?(?:site|dist)-packages/")
_STANDARD: Final = re.compile(
    rf".*/lib/python3[.\d]*t?/|.*/Python3\d+/Lib/|{re.escape(Path(contextlib.__file__).parent.as_posix())}/"
)
_PARTS: Final = r"_\w+|amp|autograd|cuda|distributed|fft|functional|fx|jit|linalg|nn|optim|random|serialization|utils"
_SOURCE: Final = re.compile(rf"(?:.*/)?(?=torch/(?:{_PARTS})[./])")  # of PyTorch, not installed
_CELL: Final = re.compile(r"/ipykernel_\d+/|/\.ipykernel/\d+/command-|^<(ipython-input|command)-|^notebook$")
"""Of Jupyter (and Colab, Kaggle, papermill), of Databricks, of IPython."""


@cache
def whose(filename: str) -> str | None:
    """Whose code a file holds: `PYTORCH`, `LIBRARY` or `OWN`; None of the standard library, and of what is no file.

    Own is what is not installed: the script, the modules beside it, a notebook's cells, a package under development.
    """
    path = filename.replace("\\", "/")
    if _CELL.search(path) or path == "<stdin>":
        return OWN
    if not path.endswith(".py") or filename.startswith(("<", *MACHINERY)):
        return None
    if installed := _INSTALLED.match(path):
        return PYTORCH if path.startswith("torch/", installed.end()) else LIBRARY
    if _SOURCE.match(path):
        return PYTORCH
    if _STANDARD.match(path):
        return None
    return LIBRARY if path.startswith(f"{_OURS.as_posix()}/") else OWN


@cache
def called(filename: str) -> str:
    """A file's name without the machine: from its package on, or below the working folder, or below one of imports.

    Of a notebook's cells, which are files named after a process, it is one name; of a file elsewhere the whole path.
    """
    path = filename.replace("\\", "/")
    if _CELL.search(path):
        return "notebook"
    if path.startswith(f"{_OURS.as_posix()}/"):
        return f"{__package__}{path.removeprefix(_OURS.as_posix())}"
    for package in (_INSTALLED, _SOURCE, _STANDARD):
        if found := package.match(path):
            return path[found.end() :]
    file = Path(filename)
    if file.is_absolute():
        for folder in (Path.cwd(), *sorted(sys.path, key=len, reverse=True)):
            if str(folder) and file.is_relative_to(folder):
                return file.relative_to(folder).as_posix()
    return path


def lines_of(frames: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """Of a stack, innermost frame first, the innermost line outside of PyTorch, and the innermost of the user's own."""
    line = ""
    for filename, number in frames:
        owner = whose(filename)
        if owner is None or owner is PYTORCH:
            continue
        found = f"{called(filename)}:{number}"
        line = line or found
        if owner is OWN:
            return line, found
    return line, ""


def led_there(row: Mapping[str, Any]) -> str:
    """What is said behind a row's `line` of its `own`, where that is another."""
    own = row.get("own", "")
    return f", called from {own}" if own and own != row["line"] else ""
