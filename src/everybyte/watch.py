"""The memory of this process's GPUs, watched while it runs: a snapshot where it runs out, one at the end, and reports.

PyTorch keeps the history (`torch.cuda.memory._record_memory_history`, `torch/cuda/memory.py`, with these arguments
since 2.1): the latest `events` allocations and releases, and the Python stack of each allocation. It is begun when the
program first uses CUDA, and no sooner, so that what a program sets before counts: which GPUs it sees, how its allocator
behaves. PyTorch also tells of each request that fails, before it raises `OutOfMemoryError`
(`torch._C._cuda_attach_out_of_memory_observer`): a program that catches it leaves a snapshot as well.

Nothing here may change how the program ends. What fails here is said in the report.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import pickle
import runpy
import sys
import time
from collections.abc import Callable
from importlib import util
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final

from .lines import LONGEST_LINE
from .names import printable

EVENTS: Final = 100_000
"""Of each GPU's history the latest are kept; each costs some KB of the host's memory (`torch/cuda/memory.py`)."""

RAN_OUT, AT_END = "out-of-memory", "end"
REST: Final = 20
"""Times as long as a snapshot took, none is made of a later failure: a program that lives with them is not held up."""


def unavailable() -> str | None:
    """Why no GPU can be watched here, and what to do instead; None if one may be there. CUDA is not touched."""
    instead = "everybyte trace needs no GPU"
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return f"torch is not installed here: run it where the script runs; {instead}"
    built = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    if not built.get("cuda") and not built.get("hip"):
        return f"this PyTorch, {built['__version__']}, is built without CUDA: run it on a machine with a GPU; {instead}"
    if built.get("cuda") and not _driver():
        return f"this machine has no NVIDIA driver: run it on a machine with a GPU; {instead}"
    return None


def _driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")  # loading it makes no context
    except OSError:
        return False
    return True


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Calls a function as soon as a package is imported, at once if it is; the package is not imported for it."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Notice(name, then))


class _Notice(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module
        return spec


class Watch:
    """Watches this process's GPUs from their first use until `finish`, which writes what was seen to a folder.

        watch = Watch("everybyte-run")
        watch.begin()
        ...                                 # the program
        watch.tell()

    A request that fails leaves `out-of-memory.pickle` at once, the end `end.pickle`, unless the program ended with such
    a failure. `finish` adds to each a report for people, `.html` and `.txt`, and one for programs, `.json`. A process
    that ends without it does so as it exits, a notebook as a cell runs out of memory.

    Args:
        folder: Where to; it is made, and a watch's own files from before are removed from it. A launcher's processes
            each have one in it, by their rank.
        events: Of each GPU's history as many are kept.

    Attributes:
        failures: How many requests failed.
        troubles: What did not work in watching, for a person.
        seconds: What our own snapshots and reports took; not PyTorch's own keeping of the history.

    Raises:
        OSError: If the folder cannot be made or written to.
    """

    def __init__(self, folder: str | Path = "everybyte-run", events: int = EVENTS) -> None:
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK"))
        self.folder = Path(folder, *([f"rank-{rank}"] if rank else [])).absolute()
        self.events = events
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in (RAN_OUT, AT_END):
            for suffix in ("pickle", "html", "txt", "json"):
                (self.folder / f"{kind}.{suffix}").unlink(missing_ok=True)
        self.failures = 0
        self.troubles: list[str] = []
        self.seconds = 0.0
        self._process = os.getpid()
        self._rest_until = 0.0
        self._ran_out_on: int | None = None
        self._finished = False

    def begin(self) -> None:
        """Begins, now or, where PyTorch or CUDA is not yet in use, as soon as it is."""
        atexit.register(self._at_exit)
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:  # a notebook's process goes on after an error
            shell.events.register("post_run_cell", self._after_cell)
        when_imported("torch", lambda: self._timed(self._torch_is_there))

    def finish(self, ended_with: BaseException | None = None, **known: Any) -> list[str]:
        """Ends, writes the reports, and returns lines for a person.

        Args:
            ended_with: The exception that ended the program.
            **known: What else is known of the run, for the JSON.
        """
        if not self._is_on:
            return []
        self._finished = True
        atexit.unregister(self._at_exit)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return [*self.troubles, "the program did not use a GPU: there is nothing to report"]
        out_of_memory = isinstance(ended_with, torch.cuda.OutOfMemoryError)
        if not (out_of_memory and (self.folder / f"{RAN_OUT}.pickle").is_file()):
            self._snapshot(AT_END)
        known |= self._known(torch, ended_with)
        lines: list[str] = []
        for kind in (RAN_OUT, AT_END):
            if (self.folder / f"{kind}.pickle").is_file():
                lines += self._timed(lambda kind=kind: self._report(kind, known)) or []
        return [*lines, *self.troubles]

    def tell(self, ended_with: BaseException | None = None, **known: Any) -> None:
        """`finish`, and its lines on the error output."""
        for line in self.finish(ended_with, **known):
            print(f"everybyte: {printable(line, LONGEST_LINE)}", file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        self.tell(getattr(sys, "last_value", None))  # what the interpreter has just printed

    def _after_cell(self, result: Any) -> None:
        torch = sys.modules.get("torch")
        if self._is_on and torch is not None and isinstance(result.error_in_exec, torch.cuda.OutOfMemoryError):
            self.tell(result.error_in_exec)

    @property
    def _is_on(self) -> bool:
        return not self._finished and os.getpid() == self._process  # a forked child has its parent's watch

    # -- what PyTorch calls --------------------------------------------------------------------------------------------

    def _torch_is_there(self) -> None:
        import torch

        torch.cuda._lazy_call(self._cuda_is_there)

    def _cuda_is_there(self) -> None:
        self._timed(self._record)

    def _record(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=self.events)
        torch._C._cuda_attach_out_of_memory_observer(self._failed)

    def _failed(self, device: int, requested: int, total: int, free: int) -> None:
        """A request failed. The allocator's lock is not held (`CUDACachingAllocator.cpp`, `malloc`)."""
        if not self._is_on:
            return
        self.failures += 1
        began = time.monotonic()
        if began >= self._rest_until:
            self._snapshot(RAN_OUT)
            self._ran_out_on = device
            ended = time.monotonic()
            self._rest_until = ended + REST * (ended - began)

    # -- what is written -----------------------------------------------------------------------------------------------

    def _timed(self, action: Callable[[], Any]) -> Any:
        """Does something that may fail, and counts its time as ours."""
        began = time.monotonic()
        try:
            return action()
        except Exception as error:
            self.troubles.append(f"watching met {type(error).__name__}: {error}")
            return None
        finally:
            self.seconds += time.monotonic() - began

    def _snapshot(self, kind: str) -> None:
        def write() -> None:
            whole = self.folder / f"{kind}.pickle"
            part = whole.with_suffix(".part")
            with open(part, "wb") as file:
                pickle.dump(sys.modules["torch"].cuda.memory._snapshot(), file)
            part.replace(whole)

        self._timed(write)

    def _known(self, torch: Any, ended_with: BaseException | None) -> dict[str, Any]:
        def peaks() -> list[dict[str, Any]]:
            return [
                {
                    "name": torch.cuda.get_device_name(device),
                    "total": torch.cuda.get_device_properties(device).total_memory,
                    "peak_allocated": torch.cuda.max_memory_allocated(device),
                    "peak_reserved": torch.cuda.max_memory_reserved(device),
                }
                for device in range(torch.cuda.device_count())
                if torch.cuda.max_memory_reserved(device)
            ]

        return {
            "ended": "without an error" if ended_with is None else f"{type(ended_with).__name__}: {ended_with}"[:1_000],
            "failures": self.failures,
            "most_events": self.events,
            "torch": str(
                torch.__version__
            ),  # with the CUDA that it is built for, which the package's own does not name
            "gpus": self._timed(peaks) or [],
        }

    def _report(self, kind: str, known: dict[str, Any]) -> list[str]:
        from . import page  # these read tables and draw: not before the program is over
        from .account import Account

        base, began = self.folder / kind, time.monotonic()
        account = Account.read(base.with_suffix(".pickle"), self._ran_out_on if kind == RAN_OUT else None)
        seconds = self.seconds + time.monotonic() - began
        run = {**known, "whole": account.answer["events"] < self.events, "seconds": round(seconds, 3)}
        answer = {**account.answer, "run": run}
        for suffix, text in (
            (".txt", "\n".join([*account.lines(), ""])),
            (".json", json.dumps(answer, indent=1, allow_nan=False) + "\n"),
            (".html", page.html(answer, account.timeline)),
        ):
            base.with_suffix(suffix).write_text(text, encoding="utf-8", errors="backslashreplace")
        return [f"{self._gist(answer)}: {base.with_suffix('.html')}"]

    @staticmethod
    def _gist(answer: dict[str, Any]) -> str:
        from .figures import amount
        from .places import led_there

        if not answer["out_of_memory"]:
            peak = answer["recorded"]
            return f"peak {amount(peak['peak_allocated'])} allocated, {amount(peak['peak_reserved'])} reserved"
        failed = answer["out_of_memory"][-1]
        held = f"{amount(failed['allocated'])} of {amount(failed['reserved'] + failed['free'])} allocated"
        who = f" by {failed['line']}{led_there(failed)}" if failed["line"] else ""
        return f"out of memory, {failed['cause']}: {amount(failed['requested'])} asked for{who}, {held}"
