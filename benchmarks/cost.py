"""What the tracer itself takes: its process's memory, and where its time goes.

    python benchmarks/cost.py "TFT of 225 variables, batch 8"    the memory of one trace, as JSON

Memory is of a process of its own: the most it ever held, less what it held after its imports. Linux says the former in
/proc/self/status; what `getrusage` says begins, in a child, with its parent's.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import speed
from row import Row, timed

import everybyte as eb

LIBRARY = Path(eb.__file__).parent
SUBJECTS: dict[str, Callable[[], Row]] = {
    speed.FULL_TFT: lambda: speed.traced(speed.FULL_TFT, speed.tft(speed.FULL), "cpu", times=2),
    speed.BIG: lambda: speed.traced(speed.BIG, speed.decoder(speed.DECODER), "cuda", times=2),
    f"{speed.BIG}, 100 layers": lambda: speed.traced(
        speed.BIG, speed.decoder(replace(speed.DECODER, layers=100)), "cuda", times=2
    ),
}

# -- memory ------------------------------------------------------------------------------------------------------------


def held(key: str) -> int:
    """Bytes of this process: VmRSS, now; VmHWM, at most so far."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)[1]) * 1024


def memory(times: int = 2) -> Iterator[Row]:
    """Of each trace, three steps long, the seconds of its process and what it took beyond its imports."""
    for what in SUBJECTS:
        taken: list[int] = []

        def once(what: str = what, taken: list[int] = taken) -> None:
            done = subprocess.run([sys.executable, __file__, what], check=True, capture_output=True, text=True)
            taken.append(json.loads(done.stdout))

        yield Row(f"{what}, a process", "everybyte", timed(once, times), memory=tuple(taken))


# -- time --------------------------------------------------------------------------------------------------------------

OURS = {
    "functions seen above autograd": ("surface.py",),
    "what a call returns, looked up": ("kernels.py", "ops.py", "direct.py", "operands.py"),
    "whose memory it is: modules and lines": ("attribution.py", "places.py"),
    "events noted, and storages followed": ("storages.py", "timeline.py", "run.py"),
}
"""Parts of the tracer by its modules; the others take what comes down from PyTorch to these."""
ENTRY, ENGINE, MODEL = (
    "ops taken from PyTorch's dispatcher",
    "PyTorch's dispatcher and autograd, C++",
    "the model's code",
)
PYTHON = "PyTorch's Python: modules, functions, optimizer"
PARTS = (ENGINE, PYTHON, MODEL, ENTRY, *OURS, "rules, values, scratch")
Function = tuple[str, int, str]


def part(function: Function) -> str | None:
    """Which part a function belongs to; None for Python's own, which belong to their callers."""
    file, _, name = function
    if file == "~":
        return ENGINE if "torch" in name.lower() or "run_backward" in name or "TensorBase" in name else None
    path = Path(file)
    if LIBRARY in path.parents:
        if path.parent.name in ("models", "formulas") or path.name == "training.py":
            return MODEL
        if path.parent.name == "rules" or path.name in ("scalars.py", "values.py", "workspace.py", "kinds.py"):
            return PARTS[-1]
        return next((part for part, files in OURS.items() if path.name in files), ENTRY)
    return PYTHON if "torch" in path.parts else MODEL if path.parent == Path(__file__).parent else None


def shares(step: Callable[[], object], plain: float) -> Counter[str]:
    """Seconds of a step by part.

    A profiler adds about as much to each call. So what it added in all, beyond the `plain` seconds of a step, is taken
    off again, from each part by its calls.
    """
    profiler = cProfile.Profile()
    began = time.perf_counter()
    profiler.runcall(step)
    added = time.perf_counter() - began - plain
    stats = pstats.Stats(profiler).stats
    each = max(added, 0.0) / sum(calls for _, calls, *_ in stats.values())
    seconds: Counter[str] = Counter()
    for function, (_, calls, own, _, callers) in stats.items():
        if (whose := part(function)) is not None:
            seconds[whose] += own - calls * each
            continue
        for caller, (_, calls_from, own_from, _) in callers.items():
            seconds[part(caller) or ENTRY] += own_from - calls_from * each
    return seconds


def profile(what: str = speed.FULL_TFT, build: speed.Build | None = None, times: int = 3) -> Iterator[Row]:
    """The seconds of each part of a traced step, beside those of the whole."""
    with eb.trace(rules="cuda") as run:
        job = (build or speed.tft(speed.FULL))(run.to_device)
        plain, found = [], []
        for step in run.steps(1 + 2 * times):
            if step % 2:
                plain += timed(job.step, 1)
            elif step:
                found.append(shares(job.step, plain[-1]))
    whole = Row(f"{what}, parts of a traced step", "the whole step", tuple(plain))
    yield whole
    for name in PARTS:
        yield Row(whole.what, name, tuple(max(parts[name], 0.0) for parts in found))


if __name__ == "__main__":
    before = held("VmRSS")
    SUBJECTS[sys.argv[1]]()
    print(held("VmHWM") - before)
