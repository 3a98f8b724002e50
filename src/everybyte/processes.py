"""Other processes that traced code starts: a trace follows one, and is told whether another may work on the GPU.

A process that is forked has the trace with it, and one of `multiprocessing` that begins anew is given one. It does its
work, and where it first asks the GPU for memory it notes so in a file. Of a program that is started as a command only
the text can be read: a Python program that imports more than what is known to stay on the host may work on the GPU.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import walk_stack
from typing import Any, Final, Protocol
from unittest import mock

from .attribution import is_ours
from .gpus import GPU
from .places import lines_of

_BEGUN: Final = "begun\n"
_PATIENCE: Final = 10.0  # seconds, for a process to begin its work

_SHOWN: Final = 80  # characters of a command
_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh"})
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "deepspeed", "ray"})
_STARTING_OTHERS: Final = frozenset(
    {"env", "nohup", "nice", "time", "timeout", "sudo", "numactl", "taskset", "xargs", "mpirun", "mpiexec", "srun"}
)
_ON_THE_HOST: Final = frozenset(
    {"numpy", "pandas", "pyarrow", "scipy", "sklearn", "matplotlib", "PIL", "requests", "tqdm", "yaml"}
    | {"pip", "setuptools", "tensorboard", "wandb"}
)
"""Packages that leave the GPU alone."""
_RUNS_OTHERS: Final = frozenset({"importlib", "runpy", "ctypes", "subprocess", "multiprocessing"})
_RUNS_TEXT: Final = frozenset({"__import__", "eval", "exec", "system", "popen"})


class Run(Protocol):
    """What is needed of the trace under way."""

    gpu: GPU
    not_covered: set[str]
    remarks: list[str]

    def on_memory(self, tell: Callable[[str], None]) -> None:
        """From now on `tell` gets the line of whatever takes memory of the GPU."""


@contextmanager
def followed(run: Run) -> Iterator[None]:
    """While the block lasts, a trace is told which processes begin in it, and at its end what they did on the GPU."""
    own, fork, begin = os.getpid(), getattr(os, "fork", None), BaseProcess.start
    start, system = subprocess.Popen.__init__, os.system
    children: list[tuple[str, Path, Callable[[], bool]]] = []

    def child(is_alive: Callable[[], bool]) -> Path:
        file = Path(folder, str(len(children)))
        file.touch()
        children.append((_line(), file, is_alive))
        return file

    @wraps(begin)
    def begun(process: BaseProcess) -> None:
        process.run = _Followed(process.run, child(process.is_alive), run.gpu)
        try:
            with mock.patch.object(os, "fork", fork, create=True):
                begin(process)
        finally:
            del process.run

    def forked() -> int:
        file = child(lambda: False)
        if (pid := fork()) == 0:
            _follow(run, file)
        return pid

    @wraps(start)
    def started(popen: Any, args: Any, *more: Any, **options: Any) -> None:
        command = args if isinstance(args, (str, bytes, os.PathLike)) else [*args]
        _check(run, command, options.get("cwd"))
        start(popen, args, *more, **options)

    @wraps(system)
    def by_shell(command: Any) -> int:
        _check(run, command, None)
        return system(command)

    changes = [(BaseProcess, "start", begun), (subprocess.Popen, "__init__", started), (os, "system", by_shell)]
    with tempfile.TemporaryDirectory(prefix="everybyte-") as folder, ExitStack() as stack:
        for owner, name, change in (*changes, *([(os, "fork", forked)] if fork else [])):
            stack.enter_context(mock.patch.object(owner, name, change))
        try:
            yield
        finally:
            if os.getpid() == own:
                for line, file, is_alive in children:
                    _say(run, line, file, is_alive)


def _say(run: Run, line: str, file: Path, is_alive: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not file.stat().st_size and is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    told = file.read_text().splitlines()
    if told[1:]:
        run.not_covered.add(f"what the process that is started at {line} does on the GPU, at {told[1]}")
    elif not told and is_alive():
        run.not_covered.add(f"what the process that is started at {line} does, which has not begun yet")
    else:
        _remark(run, f"{line}: another process is started, which asks the GPU for nothing as far as it comes")


def _remark(run: Run, text: str) -> None:
    if text not in run.remarks:
        run.remarks.append(text)


# -- in the other process ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Followed:
    """What a process runs instead of its work: the same in a trace, which it brings with it if it was forked."""

    work: Callable[[], None]
    file: Path
    gpu: GPU

    def __call__(self) -> None:
        from .trace import active, trace  # which imports this module

        if (run := active()) is not None:
            self._work(run)
        else:
            with trace(rules="cuda", gpu=self.gpu, default="cpu") as run:
                self._work(run)

    def _work(self, run: Run) -> None:
        _follow(run, self.file)
        try:
            self.work()
        except Exception as error:
            if is_ours(error):
                _note(self.file, f"{error}\n")
            raise


def _follow(run: Run, file: Path) -> None:
    told: list[str] = []

    def tell(line: str) -> None:
        if not told:
            told.append(line)
            _note(file, f"{line}\n")

    _note(file, _BEGUN)
    run.on_memory(tell)


def _note(file: Path, text: str) -> None:
    with suppress(OSError), file.open("a", encoding="utf-8") as notes:  # gone, if the trace is over
        notes.write(text)


# -- commands ----------------------------------------------------------------------------------------------------------


def _check(run: Run, command: Any, folder: Any) -> None:
    if isinstance(command, (str, bytes, os.PathLike)):
        text = os.fsdecode(command)
    else:
        text = shlex.join(map(os.fsdecode, command))
    shown = re.sub(r"^\S*/", "", text)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
    if may_work_on_the_gpu(text, Path(os.fsdecode(folder or "."))):
        what = f"what the command {shown!r} does, which may work on the GPU"
        run.not_covered.add(f"{what}, at {_line()}")
        raise NotImplementedError(f"{_line()}: a trace sees nothing of {what}; trace its program by itself")
    name = next(iter(shown.split()), "")
    _remark(run, f"{_line()}: {name} is started; what it may take of the GPU is not in these figures")


def _line() -> str:
    """The innermost line of the user's own code, else of a library's, that is running."""
    line, own = lines_of((frame.f_code.co_filename, number) for frame, number in walk_stack(None))
    return own or line


def may_work_on_the_gpu(command: str, folder: Path = Path()) -> bool:
    """Whether a command, as it is given to a shell, may start a Python program that works on the GPU."""
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = [*lexer]
    except ValueError:
        return True
    one: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("();<>|&"):
            if one and _may_work(one, folder):
                return True
            one = []
        else:
            one.append(word)
    return False


def _may_work(words: list[str], folder: Path) -> bool:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return False
    name, rest = Path(words[0]).name, words[1:]
    if name in _STARTING_OTHERS:
        return any(_is_program(word, folder) and _may_work(rest[i:], folder) for i, word in enumerate(rest))
    if _PYTHON.fullmatch(name):
        return _python_may_work(rest, folder)
    if name in _SHELLS:
        texts = [rest[i + 1] for i, word in enumerate(rest[:-1]) if re.fullmatch(r"-\w*c", word)]
        return any(_lines_may_work(text, folder) for text in texts or map(_text, _files(rest, folder)))
    return name in _LAUNCHERS or any(_file_may_work(file, folder) for file in _files(words[:1], folder))


def _is_program(word: str, folder: Path) -> bool:
    name = Path(word).name
    known = bool(_PYTHON.fullmatch(name)) or name in _SHELLS | _LAUNCHERS | _STARTING_OTHERS
    return known or any(_text(file).startswith("#!") for file in _files([word], folder))


def _files(words: Iterable[str], folder: Path) -> list[Path]:
    """The file that the first of these words names, as a path or as a command."""
    for word in words:
        if word.startswith("-"):
            continue
        path = folder / word
        found = path if path.is_file() else shutil.which(word)
        return [Path(found)] if found else []
    return []


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            start = opened.read(2**20)
    except OSError:
        return ""
    return "" if b"\0" in start else start.decode("utf-8", "replace")


def _file_may_work(file: Path, folder: Path) -> bool:
    """Of a file that is run as a program itself, by what its first line says."""
    text = _text(file)
    first = text.partition("\n")[0]
    if not first.startswith("#!"):
        return False
    if "python" in first:
        return _source_may_work(text, file.parent, set())
    return _lines_may_work(text, folder)


def _lines_may_work(text: str, folder: Path) -> bool:
    return any(may_work_on_the_gpu(line, folder) for line in text.splitlines())


def _python_may_work(arguments: list[str], folder: Path) -> bool:
    for i, argument in enumerate(arguments):
        rest = arguments[i + 1 :]
        if argument in ("-V", "--version", "-h", "--help"):
            return False
        if argument == "-c":
            return not rest or _source_may_work(rest[0], folder, set())
        if argument == "-m":
            return not rest or _module_may_work(rest[0], folder, set())
        if argument in ("-W", "-X") or (i and arguments[i - 1] in ("-W", "-X")):
            continue
        if not argument.startswith("-"):
            file = folder / argument
            return not file.is_file() or _source_may_work(_text(file), file.parent, set())
    return True


def _module_may_work(name: str, folder: Path, seen: set[Path]) -> bool:
    first = name.partition(".")[0]
    file = folder / f"{first}.py"
    if file.is_file():
        if file in seen:
            return False
        seen.add(file)
        return _source_may_work(_text(file), folder, seen)
    return first in _RUNS_OTHERS or not (first in sys.stdlib_module_names or first in _ON_THE_HOST)


def _source_may_work(source: str, folder: Path, seen: set[Path]) -> bool:
    """Whether a program of Python imports what may work on the GPU, or runs what its text does not show."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return True
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
            if node.level:
                return True
        elif (isinstance(node, ast.Name) and node.id in _RUNS_TEXT) or (
            isinstance(node, ast.Attribute) and node.attr in _RUNS_TEXT
        ):
            return True
        else:
            continue
        if any(_module_may_work(name, folder, seen) for name in names):
            return True
    return False
