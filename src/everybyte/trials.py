"""A program traced again and again: with another batch size or sequence length, and with each lever pulled.

A program leaves traces of itself in a process: modules, caches, random numbers. So each trial is a process of its own,
forked from one that has nothing but imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from . import changes, sizes
from .changes import Change
from .gpus import GPU
from .largest import Largest, largest
from .levers import LEVERS, Lever
from .otherwise import Found, Seen, compared
from .script import Failed, Program, is_untraceable
from .trace import active
from .verdict import CANNOT_SAY, FITS, TIGHT, Verdict, doubts, judge
from .worlds import GENTLER, OTHERS, WORLDS, ZEROS, Answers, same_draws

MOST: Final = 2**16
"""The largest size that is looked for."""

FRAMEWORKS: Final = ("transformers", "lightning")
"""Whose edits are told where a program has imported them."""

_SLOW_TO_IMPORT: Final = (*FRAMEWORKS, "accelerate", "peft", "pytorch_forecasting", "datasets", "torchvision")


@dataclass(frozen=True)
class Trial:
    """What one trace of a program said.

    Attributes:
        word: The verdict.
        nbytes: The most that is reserved on a GPU that never runs out; 0 if the program failed.
        why: Why the verdict is no plain yes.
        batch_size: Of the loader that feeds the program's first step; None if there is none, or that has none.
        samples: What that loader has to give; None if unknown.
        steps: How often the optimizer stepped.
        frameworks: Those of `FRAMEWORKS` that it imported.
    """

    word: str
    nbytes: int
    why: str = ""
    batch_size: int | None = None
    samples: int | None = None
    steps: int = 0
    frameworks: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict, loaders: changes.Loaders, steps: int) -> Self:
        """That of a run that is over, in this process."""
        frameworks = tuple(name for name in FRAMEWORKS if name in sys.modules)
        reserved = verdict.replay.peak_reserved
        return cls(verdict.word, reserved, verdict.why, loaders.batch_size, loaders.samples, steps, frameworks)

    @property
    def fits(self) -> bool:
        return self.word in (FITS, TIGHT)


def tried(program: Program, gpu: GPU, edits: Sequence[Change] = (), settled: frozenset[str] = frozenset()) -> Trial:
    """Traces a program in this process, which is then of no other use.

    Args:
        settled: Lines at which values decide, and not the verdict.
    """
    loaders = changes.Loaders()
    try:
        with same_draws():
            ran = program.trace(gpu, changes=[loaders.watched(), *(edit() for edit in edits)])
        run = ran.run
        unsure = doubts(run.not_covered, [line for line in run.conditional if line not in settled])
        verdict = judge(run.timeline.with_workspaces(), gpu, unsure, goes_on=ran.goes_on)
    except Failed as error:  # another size may not suit it
        return Trial(CANNOT_SAY, 0, str(error))
    return Trial.of(verdict, loaders, run.timeline.info["steps"])


class TooLong(BaseException):
    """A run takes longer than it may."""


def seen_in(world: str, program: Program, gpu: GPU, seconds: float) -> Seen:
    """Traces a program in a world (`everybyte.worlds`), in this process, which is then of no other use."""
    ended, why, is_own = "", "", False
    try:
        with same_draws():
            ran = program.trace(gpu, changes=[_answering(world), _at_most(seconds)])
        run, ended = ran.run, ran.ended
    except Failed as error:
        run = error.run
        if isinstance(error.__cause__, TooLong):
            why = f"it does not end within {seconds:.0f} seconds"
        elif is_untraceable(error.__cause__):
            why = f"it comes to what cannot be traced: {error}"
        else:
            why, is_own = f"it fails: {error}", run.answers.asked > 0
    verdict = judge(run.timeline.with_workspaces(), gpu, goes_on=not ended.endswith("end"))
    return Seen.of(world, run, verdict, ended, why, is_own)


@contextmanager
def _answering(world: str) -> Iterator[None]:
    active().answers = Answers(WORLDS[world])
    yield


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Leaves the program after so many seconds; what runs then may catch it once, and a second later no more."""
    leaving = active().leaving

    def over(*_: Any) -> None:
        leaving.now(TooLong)

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Pulled:
    """A lever, and what the program says with it."""

    lever: Lever
    trial: Trial


@dataclass(frozen=True)
class Advice:
    """What would help.

    Attributes:
        largest: By kind of size ("batch_size", "sequence") the largest that fits.
        levers: Those that save something, what saves most first.
    """

    largest: Mapping[str, Largest]
    levers: Sequence[Pulled]


class Trials:
    """Processes for trials; to be used in a `with` block."""

    def __init__(
        self, program: Program, gpu: GPU, jobs: int | None = None, settled: frozenset[str] = frozenset()
    ) -> None:
        self._program = program
        self._gpu = gpu
        self._settled = settled
        self._jobs = jobs or min(os.cpu_count() or 1, 4)

    def __enter__(self) -> Self:
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([f"{__package__}.warm", *_imported()])
        self._pool = ProcessPoolExecutor(self._jobs, mp_context=context, initializer=_silent, max_tasks_per_child=1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def trial(self, program: Program, edits: Sequence[Change] = ()) -> Trial:
        """One trial, in a process of its own."""
        return self._pool.submit(tried, program, self._gpu, edits, self._settled).result()

    def worlds(self, base: Seen, seconds: float) -> Found:
        """Whether what the program allocates hangs on values that no trace knows, each run in a process of its own.

        Args:
            seconds: How long one may take.
        """

        def begun(worlds: Iterable[str]) -> list[Future[Seen]]:
            return [self._pool.submit(seen_in, world, self._program, self._gpu, seconds) for world in worlds]

        others = [run.result() for run in begun(OTHERS)]
        gentler = [GENTLER[seen.world] for seen in others if seen.world in GENTLER and not seen.ended]
        others += [run.result() for run in begun(gentler)]
        return compared(base, others, lambda: begun([ZEROS.name])[0].result())

    def advice(self, plain: Trial) -> Advice:
        """The largest sizes that fit, and what each lever saves, beside the program as it is."""
        found = {kind: resized for kind in sizes.NAMES if (resized := self._resized(kind, plain)) is not None}
        with ThreadPoolExecutor(len(found) + len(LEVERS) or 1) as threads:
            searches = {kind: threads.submit(self._largest, resized, plain) for kind, resized in found.items()}
            pulled = [*threads.map(lambda lever: self._pull(lever, plain, found.get("batch_size")), LEVERS)]
            best = {kind: best for kind, search in searches.items() if (best := search.result()) is not None}
        levers = [each for each in pulled if each is not None and 0 < each.trial.nbytes < plain.nbytes]
        return Advice(best, sorted(levers, key=lambda each: each.trial.nbytes))

    def _resized(self, kind: str, plain: Trial) -> Resized | None:
        """How the program gets another size of a kind; None if it has none that can be found."""
        read = plain.batch_size if kind == "batch_size" else None
        most = max(read or 1, min(MOST, plain.samples or MOST))
        if (size := sizes.among(self._program.arguments).get(kind)) is not None:

            def at(value: int) -> tuple[Program, Sequence[Change]]:
                return replace(self._program, arguments=size.to(value, self._program.arguments)), ()

            return at, size.now, most if size.now == read else MOST
        if read is None:
            return None
        return lambda value: (self._program, [partial(changes.loader_batches, read, value)]), read, most

    def _largest(self, resized: Resized, plain: Trial) -> Largest | None:
        """The largest that fits; None where the program reads or needs the same, whatever size it is told."""
        at, now, most = resized
        tries = {}

        def attempt(value: int) -> Trial:
            trial = self.trial(*at(value))
            if trial.nbytes and plain.steps and not trial.steps:
                trial = Trial(CANNOT_SAY, 0, "there it takes no step: no batch is full")
            tries[value] = trial
            return trial

        found = largest(attempt, now, self._gpu.usable[0], most)
        ran = {value: trial for value, trial in tries.items() if trial.nbytes}
        if plain.batch_size == now and any(trial.batch_size != value for value, trial in ran.items()):
            return None
        return found if len({trial.nbytes for trial in ran.values()}) > 1 or found.size != most else None

    def _pull(self, lever: Lever, plain: Trial, batch: Resized | None) -> Pulled | None:
        if lever.needs and lever.needs not in plain.frameworks:
            return None
        program, edits = self._program, []
        if lever.halves:
            if batch is None or batch[1] < 2:
                return None
            program, edits = batch[0]((batch[1] + 1) // 2)
        return Pulled(lever, self.trial(program, [*edits, lever.change]))


Resized = tuple[Callable[[int], tuple[Program, Sequence[Change]]], int, int]
"""The program at another size, the size that it has, and the most that there is."""


def _imported() -> list[str]:
    """What the program made this process import and takes long: the forked ones then have it already."""
    return [name for name in sys.modules if name.partition(".")[0] in _SLOW_TO_IMPORT]


def _silent() -> None:
    """A trial prints nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
