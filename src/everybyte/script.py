"""A user's program, run unedited under a trace or a measurement: a script with its arguments, or a function.

A script runs as `python script.py ARGS` would run it, until its optimizer has stepped so often. A step ends where the
optimizer's `step()` returns; the next one begins with the next call of a model, so that what a loop does between the
two, `zero_grad()` for example, belongs to the step before. There the run ends as well: `Enough` is raised out of the
call, past whatever handles errors, and the program unwinds as it does when it is interrupted.

Where evaluation or prediction is what matters, its batches are counted instead, and loops over data loaders are cut
short: training, as soon as the optimizer has its state; evaluation, when its batches leave no more behind.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import inspect
import re
import runpy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, Final, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from . import attribution
from .files import unwritten
from .gpus import GPU
from .importing import Change, changed
from .measure import measure
from .places import PYTORCH, whose
from .run import Run
from .trace import Trace, trace
from .values import DataDependentShape, Endless

PHASES: Final = ("train", "eval", "predict")
_REMEMBERING: Final = ("accelerate.utils.imports", "transformers.utils.import_utils")
"""Modules that ask once a process what is there."""
_LIGHTNINGS: Final = ("lightning.pytorch", "pytorch_lightning")


class Enough(BaseException):
    """Ends a program that has done all the steps that were asked for. No `except Exception` catches it."""


class Failed(Exception):
    """A program did not come to its end.

    Attributes:
        cannot_say: Whether that is because of what a trace does not know or no rule covers; else the program is wrong.
        run: The trace or the measurement, up to there; None if there was none.
    """

    def __init__(self, message: str, cannot_say: bool, run: Any = None) -> None:
        super().__init__(message)
        self.cannot_say = cannot_say
        self.run = run


@dataclass(frozen=True)
class Ran:
    """What is left of a program that ran.

    Attributes:
        run: The trace or the measurement; it is over.
        remarks: What is worth knowing of how it ran.
        ended: "the script's end", "the function's end", or "3 steps".
    """

    run: Any
    remarks: tuple[str, ...]
    ended: str

    @property
    def goes_on(self) -> bool:
        """Whether the program was cut off there, and a real run goes on."""
        return not self.ended.endswith("end")


@dataclass(frozen=True)
class Program:
    """A program to run.

        >>> script = "import torch; layer = torch.nn.Linear(4, 8).to('cuda')"
        >>> with open("train.py", "w") as file:
        ...     _ = file.write(script)
        >>> eb.Program("train.py").trace(gpu="a4000").run.timeline.peak_bytes  # 4 x 8 weights, 8 biases of 4 bytes
        160

    Attributes:
        target: "train.py" or "-m pkg.mod", run as `python train.py` and `python -m pkg.mod` do; "train.py:build" or
            "pkg.mod:build", a function that returns a step (a function without arguments), or runs everything itself.
        arguments: Of a script.
        steps: How often its optimizer may step, or the function's step is run; in the other phases, how many batches of
            a loader are evaluated at least. It goes on while they leave something behind, predictions for example.
        phase: "train"; "eval", up to the first training after so many batches of evaluation; "predict", to the
            script's end. In the last two, a batch is what is done with what a `DataLoader` yields, with gradients off.

    Raises:
        ValueError: If the target names neither, or a function is given arguments or another phase than "train", or the
            number of steps is none.
    """

    target: str
    arguments: tuple[str, ...] = ()
    steps: int = 3
    phase: str = "train"

    def __post_init__(self) -> None:
        where, _, name = self.target.rpartition(":")
        if not self.is_script and not (where and name):
            raise ValueError(
                f"{self.target!r} names no program: write script.py ARGS, -m MODULE ARGS, MODULE:FUNCTION or "
                "file.py:FUNCTION"
            )
        if self.arguments and not self.is_script:
            raise ValueError(f"{self.target} is a function, which gets no arguments: {' '.join(self.arguments)}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r}: the number of steps is a positive integer")
        if self.phase not in PHASES:
            raise ValueError(f"phase={self.phase!r}: a program is followed in 'train', 'eval' or 'predict'")
        if self.phase != "train" and not self.is_script:
            raise ValueError(f"phase={self.phase!r} is for scripts: let {self.target} return the step that is meant")

    @property
    def is_script(self) -> bool:
        """Whether it runs as `__main__`."""
        return self.target.endswith(".py") or self._module is not None

    @property
    def _module(self) -> str | None:
        return self.target.removeprefix("-m ") if self.target.startswith("-m ") else None

    def trace(
        self,
        gpu: str | GPU | None = None,
        rules: str = "cuda",
        changes: Iterable[AbstractContextManager[Any]] = (),
    ) -> Ran:
        """Runs the program in `everybyte.trace`.

        Args:
            gpu, rules: As `everybyte.trace` takes them.
            changes: Entered inside the trace, around the program.

        Raises:
            Failed: If the program, or the tracing of it, did not come to its end.
        """
        default = "cpu" if self.is_script and rules == "cuda" else None
        return self._under(trace(rules=rules, gpu=gpu, default=default), changes)

    def measure(self, device: str = "cpu", changes: Iterable[AbstractContextManager[Any]] = ()) -> Ran:
        """Runs the program in `everybyte.measure`; otherwise as `trace`. Of scripts, training alone."""
        if self.phase != "train":
            raise ValueError(f"phase={self.phase!r}: where evaluation leaves nothing behind only a trace can tell")
        return self._under(measure(device), changes)

    def _under(self, run: Run, changes: Iterable[AbstractContextManager[Any]]) -> Ran:
        ended, remarks = "", []
        try:
            with self._as_main(), run, ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                ended = self._script(run, remarks) if self.is_script else self._function(run, remarks)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _failed(error, run, self.is_script) from error
        return Ran(run, tuple(remarks), ended)

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        """Modules beside the script, or in the working folder, can be imported; it sees its own arguments alone.

        Wherever it goes, afterwards the working folder is what it was, and so is what frameworks remember.
        """
        file = self.target if self.is_script else self.target.rpartition(":")[0]  # `runpy` names a module's file itself
        folder = str(Path(file).resolve().parent if file.endswith(".py") else Path.cwd())
        with (
            chdir("."),
            mock.patch.object(sys, "path", [folder, *sys.path]),
            mock.patch.object(sys, "argv", [file, *self.arguments]),
            _remembering_nothing(),
        ):
            yield

    def _script(self, run: Run, remarks: list[str]) -> str:
        if self._module is None:
            _check_file(self.target)
        unsaved: list[str] = []
        counter = _Steps(run, self.steps) if self.phase == "train" else _Batches(run, self.steps, self.phase)
        ended, names = "the script's end", None
        kept = getattr(run, "kept", None)
        with counter.counted(), unwritten(kept, lambda: unsaved.append(attribution.user_line())):
            try:
                names = run.leaving.of(lambda: _called(self._run_as_main))
            except Enough:
                ended = _several(counter.done, counter.unit)
            except FileNotFoundError as error:
                if unsaved:
                    raise NotImplementedError(
                        f"{error.strerror}: {error.filename}; what the code saves is not written, at {unsaved[0]}: a "
                        "trace has no values. Leave out what loads it, or trace a shorter run"
                    ) from error
                raise
        counter.end()
        del names  # what the program leaves is given back after its last step
        if unsaved:
            remarks.append(f"{unsaved[0]}: what the code saves is not written: a trace has no values")
        return ended

    def _run_as_main(self) -> dict[str, Any]:
        if self._module is None:
            return runpy.run_path(self.target, run_name="__main__")
        try:
            return runpy.run_module(self._module, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if [frame for frame, _ in walk_tb(error.__traceback__)][-1].f_globals["__name__"] != "runpy":
                raise
            raise ValueError(f"{error}: run in the folder from which it can be imported") from None

    def _function(self, run: Run, remarks: list[str]) -> str:
        return run.leaving.of(lambda: self._steps_of_function(run, remarks))

    def _steps_of_function(self, run: Run, remarks: list[str]) -> str:
        where, _, name = self.target.rpartition(":")
        step = _called(_found(where, name), self.target)
        if callable(step) and not isinstance(step, nn.Module):
            for _ in run.steps(self.steps):
                _called(step, f"the step of {self.target}")
            return _several(self.steps, "step")
        if step is not None:
            what = f"a {type(step).__name__}, which is no step"
            remarks.append(f"{self.target} returned {what}: it was taken to have run everything")
        return "the function's end"


@contextmanager
def _remembering_nothing() -> Iterator[None]:
    """Lets frameworks forget, while the block lasts, which devices this process has: a program begins a new one."""

    def states() -> dict[str, dict[str, Any]]:
        module = sys.modules.get("accelerate.state")
        names = ("PartialState", "AcceleratorState", "GradientState") if module is not None else ()
        return {name: getattr(module, name)._shared_state for name in names}

    def ask_again() -> None:
        for name in _REMEMBERING:
            for function in [*vars(sys.modules.get(name, object)).values()]:
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

    before = {name: dict(state) for name, state in states().items()}
    for state in states().values():
        state.clear()
    ask_again()
    try:
        yield
    finally:
        ask_again()
        for name, state in states().items():
            state.clear()
            state.update(before.get(name, {}))


class _Counter:
    """Counts up to some number of what a program does, and marks where each begins, and where the last one is over."""

    unit: str

    def __init__(self, run: Any, most: int) -> None:
        self._run = run
        self._most = most
        self._over = False
        self.done = 0

    def stop(self) -> NoReturn:
        """Raises `Enough`, past whatever the program catches."""
        self.end()
        self._run.leaving.now(Enough)

    def end(self) -> None:
        """Marks that what comes now is after the last one: what the program gives back as it unwinds, for example."""
        if self.done and not self._over:
            self._over = True
            self._run.mark_step(self.done, over=True)


class _Steps(_Counter):
    """Counts a program's steps, marks where each begins, and raises `Enough` where one too many would.

    Where there are several optimizers, as of a generator and a discriminator, the one that steps most often counts, and
    a step is over when those have stepped that are one behind.
    """

    unit = "step"

    def __init__(self, run: Run, most: int) -> None:
        super().__init__(run, most)
        self._by_optimizer: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._begun = False
        self._called = False  # a module, since the last step ended
        self._last: list[weakref.ref[Any]] = []  # the model that began the step, and the optimizer that ended it

    @contextmanager
    def counted(self) -> Iterator[None]:
        initialise = torch.optim.Optimizer.__init__

        @wraps(initialise)
        def initialised(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            initialise(optimizer, *args, **kwargs)
            self._by_optimizer[optimizer] = 0

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.optim.Optimizer, "__init__", initialised))
            strategies = (f"{name}.strategies.strategy" for name in _LIGHTNINGS)
            stack.enter_context(changed(dict.fromkeys(strategies, self._teardown)))
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            stack.callback(register_optimizer_step_post_hook(self._on_step).remove)
            stack.callback(lambda: self._last.clear())
            yield

    def _on_call(self, module: nn.Module, args: Any) -> None:
        self._called = True
        if not self._begun and self.done - 1 not in self._by_optimizer.values():
            self._end_or_begin(begins=torch.is_grad_enabled())
            if self._begun:
                self._last = [weakref.ref(module, self._on_death)]

    def _on_death(self, _: Any) -> None:
        """What goes with the model or the optimizer's state is no step's: for all one knows, none will follow."""
        if not self._begun:
            self.end()

    def _teardown(self, module: ModuleType) -> Iterator[Change]:
        """Lightning takes the model and the optimizer's state off the GPU when it is done."""
        teardown = module.Strategy.teardown

        @wraps(teardown)
        def ended(strategy: Any) -> None:
            self.end()
            teardown(strategy)

        yield module.Strategy, "teardown", ended

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count = self._by_optimizer[optimizer] = self._by_optimizer.get(optimizer, 0) + 1
        if count <= self.done:
            return
        if not self._begun:
            self._end_or_begin()
        called, self._called = self._called, False
        self.done, self._begun = count, False
        self._last.append(weakref.ref(optimizer, self._on_death))
        if not called:
            self._end_or_begin()

    def _end_or_begin(self, begins: bool = True) -> None:
        if self.done == self._most:
            self.stop()
        if not begins:
            return
        self._begun, self._over = True, False
        if self.done == 0:
            gc.collect()  # as before the first of `Run.steps`
        self._run.mark_step(self.done)


class _Batches(_Counter):
    """Counts batches of evaluation, marks where each begins, and cuts loops over data loaders short."""

    unit = "batch"

    def __init__(self, run: Trace, most: int, phase: str) -> None:
        super().__init__(run, most)
        self._most_trained = 1 if phase == "predict" else most
        self._predicts = phase == "predict"
        self._open: list[set[bool]] = []  # of each loop under way, whether its batch was trained on, or evaluated

    @contextmanager
    def counted(self) -> Iterator[None]:
        iterate = DataLoader.__iter__
        with ExitStack() as stack:
            cut = mock.patch.object(DataLoader, "__iter__", lambda loader: self._cut(iterate(loader)))
            stack.enter_context(cut)
            trainers = (f"{name}.trainer.trainer" for name in _LIGHTNINGS)
            stack.enter_context(changed(dict.fromkeys(trainers, self._limits)))
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            yield

    def _on_call(self, module: nn.Module, args: Any) -> None:
        trains = torch.is_grad_enabled()
        if trains and self.done >= self._most and not self._predicts:
            self.stop()
        if not trains and self._open and not self._open[-1]:
            self._run.mark_step(self.done)
        for kinds in self._open:
            kinds.add(trains)

    def _limits(self, module: ModuleType) -> Iterator[Change]:
        """Lightning validates after as many batches as it expects: it is told how many there will be."""
        initialise = module.Trainer.__init__

        @wraps(initialise)
        def limited(trainer: Any, *args: Any, limit_train_batches: Any = None, **kwargs: Any) -> None:
            fewer = type(limit_train_batches) is int and limit_train_batches < self._most_trained
            most = limit_train_batches if fewer else self._most_trained
            initialise(trainer, *args, limit_train_batches=most, **kwargs)

        yield module.Trainer, "__init__", limited

    def _cut(self, batches: Iterable[Any]) -> Iterator[Any]:
        kinds: set[bool] = set()
        trained, evaluated, before = 0, 0, self._run.live_bytes
        self._open.append(kinds)
        try:
            for batch in batches:
                yield batch
                live, before = self._run.live_bytes - before, self._run.live_bytes
                trained += True in kinds
                if kinds == {False}:
                    evaluated, self.done = evaluated + 1, self.done + 1
                kinds.clear()
                if trained >= self._most_trained or (evaluated >= self._most and live <= 0):
                    return
        finally:
            self._open.remove(kinds)


def _several(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}{'es' if unit == 'batch' else 's'}"


def _called(function: Callable[[], Any], name: str = "") -> Any:
    """What a function returns; nothing if it ends with `sys.exit()`, as a script may."""
    try:
        made = function()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None
    if inspect.iscoroutine(made) or inspect.isgenerator(made):
        made.close()
        raise ValueError(f"{name} is a generator or a coroutine, of which nothing has run: write a plain function")
    return made


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")


def _found(where: str, name: str) -> Callable[[], Any]:
    """The function of a module or a file.

    Raises:
        ValueError: If there is none.
    """
    if where.endswith(".py"):
        _check_file(where)
        spec = spec_from_file_location(f"{Path(where).stem} (traced)", where)
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        hint = f"run in its folder, or write path/to/file.py:{name}"
        if not all(part.isidentifier() for part in where.split(".")):
            raise ValueError(f"there is no module {where}: {hint}")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"there is no module {error.name}: {hint}") from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=3)
        script = f"what runs as __main__ is traced as a script: everybyte trace {Path(module.__file__ or where).name}"
        hint = f"did you mean {' or '.join(near)}?" if near else script
        raise ValueError(f"{where} has no function {name}; {hint}") from None


def _failed(error: BaseException, run: Run, is_script: bool) -> Failed:
    """One line that says what went wrong, and where in the user's code."""
    ours, line = attribution.is_ours(error), attribution.line_of(error)
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        hint = "; it gets no arguments: set its options in it"
        if is_script:
            hint = "; that is how a wrong use ends: give the script's own arguments after it" * (error.code == 2)
        message = f"the code ended itself with exit code {error.code}{hint}"
    elif isinstance(error, OSError) and "couldn't connect to 'https://huggingface.co'" in message:
        message = (
            "what the code loads from the Hugging Face hub is not on this machine, and a trace fetches nothing: name a "
            "folder with the config.json, or fetch it once with hf download NAME config.json"
        )
    elif not (ours or isinstance(error, Endless)):
        message = f"{type(error).__name__}: {message}"
    elsewhere = bool(getattr(run, "conditional", ()))  # who knows whether a real run comes there
    if answered := not (ours or elsewhere) and _may_be_of_values(error) and _has_answered(run):
        message += "; the numbers that stand for what no trace knows may be why"
    if line and not re.match(r"\S+:\d+: ", message):
        message = f"{line}: {message}"
    return Failed(message, is_untraceable(error) or elsewhere or answered, run)


_NOT_OF_VALUES: Final = (AttributeError, ImportError, NameError, OSError, SyntaxError, SystemExit)
"""What code raises whatever values it meets."""


def _may_be_of_values(error: BaseException) -> bool:
    """Whether code may raise an error for a value, or a number's type, that it does not expect."""
    raised_in = [frame for frame, _ in walk_tb(error.__traceback__)][-1].f_code.co_filename
    of_shapes = isinstance(error, (RuntimeError, TypeError)) and whose(raised_in) is PYTORCH
    return not (isinstance(error, _NOT_OF_VALUES) or of_shapes)


def _has_answered(run: Run) -> bool:
    """Whether the program has asked for a value that nobody knows."""
    return isinstance(run, Trace) and run.answers.asked > 0


def is_untraceable(error: BaseException | None) -> bool:
    """Whether an error is that a trace does not know, or no rule covers, what a program does there."""
    ours = isinstance(error, NotImplementedError) and attribution.is_ours(error)
    no_memory = isinstance(error, (BufferError, NotImplementedError, RuntimeError)) and "on meta" in str(error)
    return ours or isinstance(error, (DataDependentShape, Endless)) or no_memory or "'meta' device" in str(error)
