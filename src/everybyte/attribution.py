"""Whose memory it is: which module, which phase and which line of the user's code a moment of the run belongs to.

Modules are followed by PyTorch's global module hooks, so the model is not touched. Backward needs one idea more:
autograd numbers the nodes of its graph in the order in which they are made (`torch/csrc/autograd/function.h`,
`sequence_nr`), so the numbers given out between a module's entry and its exit name the nodes that its forward made, and
a backward op belongs to the module, and to the line, whose forward made its node.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as _hooks
from torch.optim import optimizer as _optim
from torch.utils._pytree import tree_leaves

from .places import LIBRARY, MACHINERY, OWN, called, whose

_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)
_BACKWARD: Final = _engine_run_backward.__code__
_NOT_USER: Final = (_TORCH, *MACHINERY, contextlib.__file__, copy.__file__, "<")

_next_sequence_number = torch._C._autograd._get_sequence_nr


class Attribution:
    """Follows a run from inside `with attribution.following(): ...`.

    Attributes:
        module: Path of the innermost module whose forward is running, `""` outside any. The outermost module of a
            forward goes by its class name, its children by their path inside it (`encoder.0.gate`).
        given: Addresses of the storages that came into a module from outside any module and any graph.
    """

    def __init__(
        self,
        on_module: Callable[[str | None], None] = lambda path: None,
        on_optimizer: Callable[[torch.optim.Optimizer, bool], None] = lambda optimizer, begins: None,
        on_root: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        """Args:
        on_module: Called with a path when a module's forward begins, with None when it ends.
        on_optimizer: Called with the optimizer and True before its step, False after it.
        on_root: Called with a module when it is first called from outside any module.
        """
        self._on_module = on_module
        self._on_optimizer = on_optimizer
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        # Change points: from sequence number `_numbers[i]` on, nodes are made by module `_makers[i]`.
        self._numbers: list[int] = []
        self._makers: list[str] = []
        # The same for the lines that make them: those below `_upto[i]` and not below the one before, at `_made_at[i]`.
        self._upto = [_next_sequence_number()]
        self._made_at = [("", "")]
        self._on_root = on_root
        self._thread = threading.get_ident()  # modules of other threads are not part of the run
        self._roots: list[weakref.ref[nn.Module]] = []  # weak, so that looking keeps no module alive
        self._held: list[nn.Module] | None = None
        self.given: set[int] = set()

    @property
    def module(self) -> str:
        return self._stack[-1] if self._stack else ""

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that were called from outside any module and still live, in order of their first call."""
        return [module for root in self._roots if (module := root()) is not None]

    def module_of_node(self, sequence_number: int) -> str:
        """The module whose forward made the node with this number."""
        at = bisect_right(self._numbers, sequence_number) - 1
        return self._makers[at] if at >= 0 else ""

    def note_nodes(self) -> None:
        """Notes which lines of the forward pass have made the nodes that are new."""
        number = _next_sequence_number()
        if number == self._upto[-1]:
            return
        lines = self.lines()
        if lines == self._made_at[-1]:
            self._upto[-1] = number
        else:
            self._upto.append(number)
            self._made_at.append(lines)

    def lines(self, node: Any = None) -> tuple[str, str]:
        """Where memory is asked for: the innermost line outside of PyTorch, and the innermost of the user's own code.

        In a backward pass they are those of the forward pass which made the node that is running.
        """
        frame, line = sys._getframe(1), ""
        while frame is not None:
            code = frame.f_code
            if code is _BACKWARD and node is not None:
                at = bisect_right(self._upto, node._sequence_nr())
                made_at, own = self._made_at[at] if at < len(self._made_at) else ("", "")
                if own:
                    return line or made_at, own
            owner = whose(code.co_filename)
            if owner is OWN or (owner is LIBRARY and not line):
                found = f"{called(code.co_filename)}:{frame.f_lineno}"
                line = line or found
                if owner is OWN:
                    return line, found
            frame = frame.f_back
        return line, ""

    def owner(self, parameter: torch.Tensor) -> str:
        """The module a parameter belongs to."""
        for root in self.roots:
            for path, module in root.named_modules():
                if any(parameter is own for own in module.parameters(recurse=False)):
                    return self._paths.get(module, path)
        return ""

    @contextmanager
    def holding(self) -> Iterator[list[nn.Module]]:
        """Collects, and so keeps alive while the block lasts, the modules that are called from outside any module."""
        self._held = []
        try:
            yield self._held
        finally:
            self._held = None

    @contextmanager
    def following(self) -> Iterator[Attribution]:
        """Watches every module and optimizer of the process until the block ends."""
        with ExitStack() as stack:
            for handle in (
                _hooks.register_module_forward_pre_hook(self._enter),
                _hooks.register_module_forward_hook(self._exit, always_call=True),
                _optim.register_optimizer_step_pre_hook(lambda opt, *_: self._on_optimizer(opt, True)),
                _optim.register_optimizer_step_post_hook(lambda opt, *_: self._on_optimizer(opt, False)),
            ):
                stack.callback(handle.remove)
            yield self

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _path(self, module: nn.Module) -> str:
        if module not in self._paths:
            if not self._stack:
                self._roots.append(weakref.ref(module))
                self._on_root(module)
                for name, child in module.named_modules():
                    self._paths.setdefault(child, name)
                self._paths[module] = type(module).__name__
            else:  # made on the way, or not registered as a child
                self._paths[module] = f"{self._stack[-1]}.{type(module).__name__}"
        return self._paths[module]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise NotImplementedError(
                "torch.compile is not covered: its kernels allocate by a plan of their own; use the module uncompiled"
            )
        path = self._path(module)
        if not self._stack:
            if self._held is not None:
                self._held.append(module)
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None]
            self.given |= {storage._cdata for t in tensors if (storage := storage_of(t)) is not None}
        self._stack.append(path)
        self._mark()
        self._on_module(path)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and threading.get_ident() == self._thread:
            self._stack.pop()
            self._mark()
            self._on_module(None)

    def _mark(self) -> None:
        number = _next_sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._makers[-1] = self.module
        else:
            self._numbers.append(number)
            self._makers.append(self.module)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage, or None if it has none of its own (sparse, lazy, wrapped by a function transform)."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def user_frame() -> tuple[str, int]:
    """File and line of the innermost running frame that belongs neither to PyTorch nor to our machinery."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_user_s(filename := frame.f_code.co_filename):
            return filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of(error: BaseException) -> str:
    """`file:line` where an exception left the user's code: the innermost of its own frames, else of a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{called(error.filename)}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    frames = [(filename, line) for filename, line in frames if _is_user_s(filename)]
    own = [at for at in frames if whose(at[0]) is OWN]
    return next((f"{called(filename)}:{line}" for filename, line in reversed(own or frames)), "")


def is_ours(error: BaseException) -> bool:
    """Whether an exception was raised by this library."""
    return [frame for frame, _ in walk_tb(error.__traceback__)][-1].f_code.co_filename.startswith(_OURS)


def asking_frame() -> FrameType:
    """The innermost running frame that does not belong to our machinery, PyTorch's own Python code included."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(MACHINERY) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def line_of_code_that(holds: Callable[[CodeType], bool]) -> str | None:
    """`file:line` of the innermost running frame of the user's for whose code something holds."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_user_s(frame.f_code.co_filename) and holds(frame.f_code):
            return f"{called(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@cache
def _is_user_s(filename: str) -> bool:
    return not filename.startswith(_NOT_USER)


def user_line() -> str:
    """`user_frame` as `file:line`, the same on every machine."""
    filename, line = user_frame()
    return f"{called(filename)}:{line}" if filename else ""
