"""A script run as Python itself runs it, with something between its end and the end of the process.

`python script.py ARGS` makes a module `__main__`, runs the script in it, and leaves by what the script ended with. The
same is done here, in this process: a traceback has the script's frames and no others, an exit code is the script's own,
and an interrupted script dies of the interrupt.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


def run(path: str, arguments: Sequence[str] = ()) -> BaseException | None:
    """Runs a script as `python path *arguments` does; returns what it ended with, None at its last line.

    Raises:
        OSError: If the file cannot be read. Nothing has run then.
    """
    source, whole = Path(path).read_bytes(), os.path.abspath(path)
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", whole)
    vars(main).update(__file__=whole, __builtins__=builtins, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv[:] = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    try:
        exec(compile(source, whole, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        return error.with_traceback(_of_script(error.__traceback__))
    return None


def leaving(error: BaseException, after: Callable[[], None]) -> None:
    """Lets an error that is raised from here on show itself as the script's own, and calls `after` behind that.

    The interpreter then prints it, and ends, as it would have without us.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, where: TracebackType | None) -> Any:
        if raised is error:
            raised.__traceback__ = where = _of_script(where)
        show(kind, raised, where)
        after()

    sys.excepthook = hook


def _of_script(where: TracebackType | None) -> TracebackType | None:
    """A traceback from the script's first frame on."""
    main = vars(sys.modules["__main__"])
    while where is not None and where.tb_frame.f_globals is not main:
        where = where.tb_next
    return where
