"""A script run as Python itself runs it, with something between its end and the end of the process.

`python script.py ARGS` makes a module `__main__`, runs the script in it, and leaves by what the script ended with. The
same is done here, in this process: a traceback has the script's frames and no others, an exit code is the script's own,
and an interrupted script dies of the interrupt.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


def run(script: str, arguments: Sequence[str] = ()) -> BaseException | None:
    """Runs a script as `python script *arguments` does; returns what it ended with, None at its last line.

    Args:
        script: The path of its file, or "-m pkg.mod".
        arguments: Its own.

    Raises:
        OSError, ImportError: If the file cannot be read, or there is no such module. Nothing has run then but, of a
            module, the packages that it is in.
    """
    main = ModuleType("__main__")
    if script.startswith("-m "):
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        sys.argv[:] = ["-m", *arguments]
        try:
            spec, code = _module(script.removeprefix("-m "))
        except SyntaxError as error:
            return error.with_traceback(None)
        vars(main).update(__file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)
        sys.argv[0] = spec.origin
    else:
        source, whole = Path(script).read_bytes(), os.path.abspath(script)
        vars(main).update(__file__=whole, __loader__=SourceFileLoader("__main__", whole))
        sys.argv[:] = [script, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(script).resolve().parent)
        code = None
    vars(main).update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    try:
        exec(code or compile(source, whole, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        return error.with_traceback(_of_script(error.__traceback__))
    return None


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    """What `python -m` runs for a name (`runpy`): the module, or a package's `__main__`."""
    _, spec, code = runpy._get_module_details(name, ImportError)
    return spec, code


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
