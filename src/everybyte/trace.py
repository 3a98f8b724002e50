"""What a run would allocate: the real training code on the meta device, where nothing is computed.

Every op that reaches a kernel passes through one dispatch mode. It lets the op run on meta tensors, which have shapes
and storages but no memory, and notes each new storage and, through a weak reference, its end. What real kernels do
otherwise is stated in `rules`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from itertools import islice
from typing import Any, Final, Self

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

from . import checkpoints, foreign, gpus, loaders, pretrained, serializers, snapshot_file, values, workspace
from .attribution import Attribution, asking_frame, line_of_code_that, storage_of, user_frame, user_line
from .direct import HOST, Direct, Known
from .files import guarded
from .gpus import GPU
from .kernels import ABSENT, META, Call, New, make, tensors_in
from .kinds import has_no_memory, other_kind, runs_own_code
from .memory_stats import MemoryStats
from .operands import Operands
from .ops import COPY, EMPTY, ITEM, LIFT, PACK, RESCALE, TO, UNSCALE, Op
from .outlines import Outlines, is_large
from .places import OWN, whose
from .rounds import Rounds
from .rules import RULES, Rules, candle, engine
from .rules.autocast import Autocast
from .run import Run, empty_caches_of_tensors
from .scalars import Scalars
from .storages import Storages
from .surface import Surface, made_for_the_host, shown_to
from .timeline import Timeline
from .torch_cuda import believable, refusing
from .values import UNKNOWN, DataDependentShape, Endless, KnownValues, UnknownRead
from .worlds import ENDLESS, Answers

aten: Final = torch.ops.aten
_INDEX: Final = aten.index.Tensor
_TO_COPY: Final = aten._to_copy.default
_ACROSS: Final = frozenset({COPY, _TO_COPY, _INDEX, aten._index_put_impl_.default, aten.index_put_.default})
"""Ops that take a tensor from the host beside the device's own: copies, and indices (`ATen/native/IndexingUtils.h`)."""
_RETAIN: Final = torch.Tensor.retain_grad
_HEALTHY: Final = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **dict.fromkeys((torch.isnan, torch.Tensor.isnan, torch.isinf, torch.Tensor.isinf), False),
}
"""Question -> its answer for every number of a training run that goes well; data that is brought in may hold others."""
_TAKES_A_NUMBER: Final = frozenset({"fill_", "index_fill_", "index_put_", "_index_put_impl_", "masked_fill_"})
"""Ops by which a tensor on the host takes a number from the device: PyTorch reads it for that."""
_BY_SHAPE: Final = frozenset(
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
) | frozenset(f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full"))
"""Ops that need no value of their argument."""
_REJECTS: Final = torch.nn.init._no_grad_trunc_normal_.__code__
"""Draws numbers anew, those out of bounds, while there are any."""
_BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__
_NO_META_KERNEL: Final = ("no fake impl registered", "INTERNAL ASSERT FAILED")
_ACCUMULATE_GRAD: Final = torch._C._functions.AccumulateGrad
_is_inference = torch.is_inference_mode_enabled
_current_node = torch._C._current_autograd_node


def trace(
    rules: str = "cpu", gpu: str | GPU | None = None, retention: str = "pytorch", default: str | None = None
) -> Trace:
    """Runs the training code of a `with` block on the meta device and records what it would allocate.

        >>> with eb.trace(rules="cpu") as run:
        ...     model = torch.nn.Linear(4, 8)
        ...     adam = torch.optim.Adam(model.parameters())
        ...     x = run.to_device(torch.ones(2, 4))
        ...     for step in run.steps(2):
        ...         model(x).sum().backward()
        ...         adam.step()
        ...         adam.zero_grad()
        >>> run.timeline.by("category")["nbytes"]["parameter"].item()  # 4 x 8 weights and 8 biases of 4 bytes
        160

    A value that nobody knows, a loss for example, reads as zero. Where it decides a branch, `Trace.conditional` names
    the line; but not where C code has made another number of it before, `math.exp(loss.item()) < 10` for one. To find
    what such a branch changes takes more than one run: `everybyte trace` and `everybyte.forecast` do that.

    Args:
        rules: Whose kernels' rules the trace follows; "cpu" or "cuda". Under "cuda" new tensors are put on the GPU, as
            under `with torch.device("cuda")`; what is put on the host explicitly is not counted (and if it is large, as
            a model's weights are, only its outline is there). `torch.cuda` answers for the GPU, its memory statistics
            from the trace so far.
        gpu: The GPU to follow, by a name of `everybyte.gpus` ("a4000") or described; left out, an A100 of 80 GB. Where
            its memory is full nothing is raised: a trace goes on, to find what the code needs. Code that catches
            `OutOfMemoryError`, to find the largest batch, therefore goes another way, which `Trace.conditional` says.
        retention: What is kept for the backward pass: what the gradients' formulas need, as "pytorch" does, or every
            operand of every recorded operation, composed as "candle" composes it (`everybyte.rules.candle`).
        default: The device of new tensors for which none is named, "cpu" for a script that builds on the host and
            moves; left out, the traced one.

    Raises:
        TypeError: If `gpu` is neither a name nor a `GPU`.
        ValueError: If there are no such rules, no such GPU, or no such retention.
    """
    if rules not in RULES:
        known = " or ".join(repr(name) for name in RULES)
        raise ValueError(f"rules={rules!r}: this version traces by the rules {known}")
    if gpu is not None and RULES[rules].on_host:
        raise ValueError(f"gpu={gpu!r} has no meaning under rules={rules!r}; leave it out")
    if retention not in ("pytorch", "candle"):
        raise ValueError(f"retention={retention!r}: a trace keeps what 'pytorch' keeps, or what 'candle' keeps")
    followed = candle.retaining(RULES[rules]) if retention == "candle" else RULES[rules]
    followed_gpu = None if followed.on_host else gpus.find(gpus.DEFAULT if gpu is None else gpu)
    return Trace(followed, followed_gpu, None if default is None else torch.device(default))


class Trace(Run):
    """A trace under way, or done. Made by `trace`.

    Attributes:
        rules: Whose kernels' rules it follows.
        gpu: The GPU that it follows; None under the CPU's rules.
        retention: Whose way of keeping memory for a backward pass it follows, "pytorch" or "candle".
        attribution: Whose memory it is.
        unknown_reads: Every place where the code asked for a value that nobody knows: it got the type's zero, or where
            it asks whether numbers are finite, that they are.
        answers: What it is answered where nobody knows.
        decisions: Lines at which such a value decided a branch, or at which the GPU was full and the code catches
            that: a real run may go the other way. With each what was decided there, as far as that is known. A value
            that C code has made a plain number (`math.exp(loss.item())`) decides unseen (`everybyte.worlds`).
        not_covered: Backward nodes and modes that the run used and that allocate otherwise in a real run.
        stream: Number of the stream that is current; 0 is the default stream.
        left_out: Memory that kernels of the run take beside what is traced, workspaces for example, and that no rule
            derives.
        remarks: What is worth knowing of single calls, with their lines.
        kept: What the code has saved, which is written to no file.
    """

    def __init__(self, rules: Rules, gpu: GPU | None = None, default: torch.device | None = None) -> None:
        super().__init__()
        self.rules = rules.name
        self.retention = "candle" if rules.keeps_operands else "pytorch"
        self.gpu = gpu
        self.stream = 0
        self.outlines = Outlines()
        self._rules = rules
        self._default = default
        self._ops: dict[int, Op] = {}  # by the op's identity: its own hash is a call of Python
        self._device = str(rules.device)
        self.attribution = Attribution(self._on_module, self._on_optimizer, self._label_module)
        self.unknown_reads: list[UnknownRead] = []
        self.decisions: dict[str, set[Any]] = {}
        self.answers = Answers()
        self._rounds = Rounds()
        self.not_covered: set[str] = set()
        self.left_out: set[str] = set()
        self.remarks: list[str] = []
        self._known = KnownValues()
        self.kept = checkpoints.Kept(self, lambda tensor: self._surface.place(tensor))
        self._finite = True  # all numbers that were brought in
        self._rejected = 0  # how often in the call under way
        self._autocast = Autocast(
            rules.device.type,
            rules.autocast,
            made=lambda: self._made,
            on_casts=lambda made: self._storages.label_lost(made),  # those that the op did not keep
            rename=lambda storage, op: self._storages.recorder.rename(storage, op),
        )
        self._writes = engine.Writes()
        self._storages = Storages()
        self._scalars = Scalars(self._storages)
        self._operands = Operands()
        self._direct = Direct(rules.device)
        self._after = {*rules.not_covered, *rules.left_out, *_HEALTHY}  # functions after which something is noted
        self._calls: list[tuple[Any, Any]] = []  # open calls of torch's Python face, and the backward node of each
        self._made: list[int] = []  # by the op that ran last
        self._workspaces: dict[tuple[str, str], workspace.Workspace] = {}  # by library and thread
        self._libraries = workspace.libraries()
        self._room = gpu.usable[0] if gpu else None  # until it has been full once
        self._optimizing = False
        self._number: int | None = None  # of the backward node that ran the last op; None where the phase may change
        self._steps_marked = 0
        self._timeline: Timeline | None = None

    # -- the with block ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _active is not None:
            raise RuntimeError("a trace is already running; traces do not nest")
        if self._timeline is not None:
            raise RuntimeError("this trace is over; make a new one with everybyte.trace(...)")
        engine.unshared()
        empty_caches_of_tensors()
        with ExitStack() as stack:
            stack.callback(_set_active, None)
            gc.freeze()  # many small objects make collections frequent: leave out of them what was there before
            stack.callback(gc.unfreeze)
            for context in (
                gpus.following(self.gpu),
                self.attribution.following(),
                self._autocast.acting(),
                guarded(self, self._rules.device),
                loaders.in_this_process(),
                pretrained.shapes_alone(),
                foreign.refused(),
                serializers.given_plain_numbers(),
                refusing() if self.gpu is None else believable(self, self._memory_stats()),
            ):
                stack.enter_context(context)
            self._surface = stack.enter_context(shown_to(self, self._rules, self._default))
            stack.enter_context(_Ops(self, self._surface))
            _set_active(self)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, where: Any) -> None:
        self._exit.close()
        if exception is not None and self.conditional:
            exception.add_note(
                f"The trace took a branch on a value it does not know, at {', '.join(self.conditional)}."
            )
        for root in self.attribution.roots:
            self._label_module(root)
        self._label_gradients()
        self._timeline = self.timeline
        self._left = self._storages.weakly()
        self._storages = Storages()  # what dies from here on is no event of this run
        empty_caches_of_tensors()

    def live_storages(self) -> dict[int, int]:
        left = self._storages.weakly() if self._timeline is None else self._left
        return {address: event for address, (event, storage) in left.items() if storage() is not None}

    @property
    def live_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._storages.recorder.live_bytes

    def address(self, tensor: torch.Tensor) -> int:
        storage = storage_of(tensor)
        return storage._cdata if storage is not None else 0

    @property
    def timeline(self) -> Timeline:
        if self._timeline is not None:
            return self._timeline
        return self._storages.recorder.finish(
            {
                "evidence": "traced",
                "rules": self.rules,
                "retention": self.retention,
                "gpu": self.gpu.name if self.gpu else None,
                "torch": torch.__version__.split("+")[0],
                "steps": self._steps_marked,
                "conditional": list(self.conditional),
                "not_covered": sorted(self.not_covered),
                "left_out": sorted(self.left_out),
                "remarks": list(self.remarks),
                "workspaces": [asdict(taken) for taken in self._workspaces.values()],
            }
        )

    @property
    def workspaces(self) -> tuple[workspace.Workspace, ...]:
        """Workspaces of matrix products that the run's threads would hold, in the order in which they come."""
        return tuple(self._workspaces.values())

    def _begin_step(self, step: int, *, over: bool = False) -> None:
        self._label_gradients()  # the model may be gone before anything else happens
        self._number = None
        self._storages.recorder.begin_step(step, over=over)
        self._steps_marked = max(self._steps_marked, step)

    def _place(self, host: torch.Tensor, category: str) -> torch.Tensor:
        placed = self._likeness(host)
        if not self._storages.is_known(placed):  # it holds something
            self._storages.recorder.label(self.count(placed, "to_device"), category)
        return placed

    # -- what the surface asks for -------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of torch's Python face, by the path that the rules give."""
        kind = self._direct.kind(function, args, kwargs) if self._optimizing else None
        known = None if kind is None else self._direct.known.get(kind)
        if (
            known is not None
            and _current_node() is None
            and not (self.outlines and self.outlines.among(tensors_in(args, ())))
        ):
            return self._directly(known, args, kwargs)
        watched = kind is not None and self._direct.watch(kind, args, kwargs)
        self._calls.append((function, _current_node()))
        try:
            if function in self._rules.functions and "out" not in kwargs:
                out = self._autocast.run(function, args, kwargs, partial(self._by_rule, function))
            else:
                out = function(*args, **kwargs)
                if watched and function not in self._after:
                    self._direct.learn()
        except StopRecomputation:
            self._storages.label_lost(self._made)
            raise
        finally:
            self._calls.pop()
            if watched:
                self._direct.watched = None
        self._scalars.settle(out)
        if self._rules.keeps_operands:
            self._operands.settle(out)
        if function is _RETAIN:
            self._writes.retains(args[0])
        if function in self._after:
            self._note_left_out(function, args, kwargs)
            if function in _HEALTHY:
                self._answer_healthy(function, out)
        return out

    def _directly(self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that is known to become an op, outside any backward node."""
        if self._number != -1:
            self._at_node(None, -1)
        if known.call is HOST:
            with torch._C._DisableTorchDispatch():
                return known.op.func(*args, **kwargs)
        if known.op.aliases:
            out = self._run(*known, args, kwargs, tensors_in(args, kwargs), None, None, True)
        else:
            with torch._C._DisableTorchDispatch():
                out = self._run(*known, args, kwargs, tensors_in(args, kwargs), None, None, True)
        for i, _ in known.op.written:
            increment_version(args[i])
        self._scalars.settle(out)
        return out

    def _answer_healthy(self, function: Callable[..., Any], answer: torch.Tensor) -> None:
        """Answers whether numbers are finite as a run that goes well does, where the answer would be unknown."""
        healthy = answer.is_meta and (self._finite or answer.numel() == 1)
        if healthy and values.is_small(answer) and self._known.twin(answer) is None:
            self.unknown_reads.append(UnknownRead(user_line(), function.__name__))
            with torch._C._DisableTorchDispatch():
                real = torch.empty_strided(answer.size(), answer.stride(), dtype=torch.bool, device="cpu")
                self._known.remember(answer, real.fill_(_HEALTHY[function]))

    def _by_rule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for i in self._rules.reads.get(function, ()):
            if i < len(args) and isinstance(args[i], torch.Tensor) and args[i].is_meta:
                args = (*args[:i], self.read_out(torch.Tensor.tolist, args[i]), *args[i + 1 :])
        out = self._rules.functions[function](*args, **kwargs)
        if function in self._rules.remarks:
            self.remark(self._rules.remarks[function](*args, **kwargs))
        return out

    def backward(
        self,
        tensor: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`Tensor.backward`, without its own check for function modes."""
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def adopt(self, real: torch.Tensor, op: str) -> torch.Tensor:
        """A new traced tensor in the likeness of a real one or an outline, its value remembered if it is small."""
        made = self._likeness(real)
        if not self._storages.is_known(made):  # it holds something
            self.count(made, op)
        return made

    def count(self, tensor: torch.Tensor, op: str) -> int:
        """Records a tensor that no op made."""
        node = _current_node()
        self._at_node(node, -1 if node is None else node._sequence_nr())
        storage = self._storages.record(tensor, op=op, **self._whose(node))
        self._note_room()
        return storage

    def read_out(self, function: Any, tensor: torch.Tensor) -> Any:
        """`item`, `tolist`, `numpy`: what is known, else an answer that tells if it decides anything."""
        real = self._known.twin(tensor)
        with torch._C._DisableTorchDispatch():
            if real is not None:
                known = function(real.detach())
                rescaled = type(known) is float and self._known.is_assumed(tensor)
                return known * self.answers.times(self._round()) if rescaled else known
            if function is torch.Tensor.item and (passing := self._passes_check("item")) is not None:
                return type(_zeros(tensor).item())(passing)
            answer = function(self.answers.fill(_zeros(tensor), self._round()))
        line = self._unknown_read(function.__name__, tensor)
        looked_at = values.decides_branch if function is torch.Tensor.numpy else values.counts_loop
        if (function is torch.Tensor.numpy or not tensor.is_floating_point()) and looked_at(*user_frame()):
            self._decided(line)  # an array does not tell what is done with it, nor does a number as a loop's count
        decided = partial(self._decided, line)
        return tree_map_only((int, float), lambda number: values.unknown(number, decided), answer)

    def contents(self, tensor: torch.Tensor) -> str:
        """What is shown of a tensor's values: where they are not known, those of an answer."""
        real = self._known.twin(tensor)
        if real is None:
            self.unknown_reads.append(UnknownRead(user_line(), "repr"))
            if values.decides_branch(*user_frame()):
                self._decided(user_line())
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if real is None:
                few = torch.zeros(tensor.shape if tensor.numel() <= 1000 else (), dtype=tensor.dtype, device="cpu")
                real = self.answers.fill(few, self._round()).expand(tensor.shape)
            return torch._tensor_str._tensor_str(real, len("tensor("))

    def unknown_number(self, op: str) -> float:
        """A number that no trace knows, a time for example, which tells if it decides anything."""
        line = user_line()
        self.unknown_reads.append(UnknownRead(line, op))
        return values.unknown(self.answers.number(self._round()), partial(self._decided, line))

    def _memory_stats(self) -> MemoryStats:
        return MemoryStats(self._storages.recorder, lambda: self.workspaces, self.gpu)

    def snapshot(self) -> dict[str, Any]:
        """The allocator's history so far, as `torch.cuda.memory._snapshot` gives it."""
        return snapshot_file.contents(self.timeline.with_workspaces())

    def on_memory(self, tell: Callable[[str], None]) -> None:
        """From now on `tell` gets the line of the code that asks for memory, whenever some does."""
        alloc = self._storages.recorder.alloc

        def told(*args: Any, **what: Any) -> int:
            tell(what.get("line") or user_line())
            return alloc(*args, **what)

        self._storages.recorder.alloc = told

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes memory of the device: a real one does where that is the host."""
        return (self._rules.on_host or tensor.is_meta) and self.outlines.device(tensor) is None

    def outline(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new outline of a tensor, on this device."""
        self._check_plain(tensor, "a copy")
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self.outlines.add(torch.empty_like(tensor.detach(), device=META), device)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with a traced one's values where they are known, else an outline."""
        self._check_plain(tensor, "a copy to the host")
        real = self._known.twin(tensor)
        if real is None:
            return self.outline(tensor, _HOST)
        with torch._C._DisableTorchDispatch():
            return real.clone()

    def copy_storage(self, tensor: torch.Tensor, op: str) -> torch.UntypedStorage:
        """A new storage with what a traced tensor's whole storage holds, counted with the tensor's shape."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            copy = storage.clone()
            self._known.copy(storage, copy)
            made = torch.empty(0, dtype=tensor.dtype, device=META)
            made.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        if (elsewhere := self.outlines.device(tensor)) is not None:
            self.outlines.add(made, elsewhere)
        elif not self._storages.is_known(made):
            self.count(made, op)
        return copy

    def _unknown_read(self, op: str, tensor: torch.Tensor) -> str:
        line = user_line()
        self.unknown_reads.append(UnknownRead(line, op))
        if tensor.dtype == torch.bool:
            self._decided(line)
        return line

    # -- ops -----------------------------------------------------------------------------------------------------------

    def op(self, func: Any) -> Op:
        """What is to be known of an op."""
        known = self._ops.get(id(func))
        if known is None:
            known = self._ops[id(func)] = Op.of(func, self._rules)
            if func.namespace not in foreign.PYTORCHS:
                self.not_covered.add(f"{func.namespace}::{known.name}, a kernel of its own")
        return known

    def on_op(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lets one op run on the meta device and records the storages it makes."""
        node = _current_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._number or (self._optimizing and torch.is_grad_enabled()):
            self._at_node(node, number)
        self.attribution.note_nodes()
        if self._direct.watched is not None:
            self._direct.note(op, args, kwargs)
        caller, caller_node = self._calls[-1] if self._calls else (None, None)
        from_python = caller is not None and caller_node is node
        if self._rules.keeps_operands:
            self._operands.note([tensor for tensor in tensors_in(args, kwargs) if self.counts(tensor)])
        if op.is_view and args[0].is_meta:
            try:
                out = op.plan.kernel(*args, **kwargs)
                self._made = []
                return out
            except (RuntimeError, NotImplementedError):
                pass  # raised again, and explained, below
        if op.may_take_over and self._writes.takes_over(op.func, args, node, caller, from_python):
            if op.takes_more:
                self._record_scratch(op, args, kwargs, node)
            return args[0]
        if (
            op.special
            and op.func in (EMPTY, LIFT)
            and not self._calls
            and self._surface.makes_its_own()
            and (self._rules.on_host or not made_for_the_host(asking_frame()))
        ):
            if op.func is EMPTY:  # torch.Tensor(2, 3), which has no Python face
                kwargs = {**kwargs, "device": META}
            elif args[0].untyped_storage().resizable():  # torch.Tensor([1.0, 2.0]); not torch.from_numpy(...)
                return self.adopt(args[0], "tensor")
        tensors, of_host, key = self._look(op, args, kwargs)
        if self.outlines and (elsewhere := self.outlines.among(tensors)):
            of_host += len(elsewhere)
            if of_host == len(tensors) and (kwargs.get("device") != META or op.func is _TO_COPY):
                named = kwargs.get("device")
                return self._in_outline(op, tensors, args, kwargs, _HOST if named == _HOST else elsewhere[0])
        if of_host == len(tensors) and not self._rules.on_host and kwargs.get("device") != META:
            return op.func(
                *args, **kwargs
            )  # the host's own, beside the device: really run, and nothing of it is counted
        if op.special:
            if op.func is ITEM:
                return self._read(tensors[0])
            if op.func is COPY and not self._rules.on_host and not self.counts(args[0]):
                return self._fill(op, args[0])
            if op.func is PACK:
                args, key = (args[0], self._lengths(args[1]), *args[2:]), None
            if op.func.namespace == "prims":
                return op.func(*args, **kwargs)  # asked about shapes by `BinaryOps.cpp`, where a tensor of zeros comes
            if op.func is TO and self._writes.asks_of_zeros(args[0]):
                return torch.empty_like(torch.as_tensor(args[0]), device=META)  # for the same question
        if 0 < of_host < len(tensors) and op.func is not PACK:
            if op.name in _TAKES_A_NUMBER and not self.counts(args[0]):
                return self._fill(op, args[0])
            args, kwargs = self._meet(op, tensors, args, kwargs)
            tensors, of_host, key = op.plan.look(args, kwargs)
        return self._run(op, op.plan.known(key), args, kwargs, tensors, key, node, from_python)

    def _in_outline(self, op: Op, tensors: list[torch.Tensor], args: Any, kwargs: Any, device: torch.device) -> Any:
        """What an op beside the traced device comes to, of which not all values are known: outlines again."""
        if op.func is ITEM:
            return self._read(tensors[0])
        if op.func is PACK:
            args = (args[0], self._lengths(args[1]), *args[2:])
        if op.name in _BY_SHAPE and device == _HOST:
            made = op.func(*args, **{**kwargs, "device": META})
            return self.outlines.add(made, device) if is_large(made) else op.func(*args, **{**kwargs, "device": device})
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.written] if op.mutates else ()
        for tensor in tensors_in(written, {}):
            self._fill(op, tensor)
        stand_ins = {id(tensor): tensor if tensor.is_meta else self._likeness(tensor) for tensor in tensors}
        given = {id(stand_ins[id(tensor)]): tensor for tensor in tensors}
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: stand_ins[id(tensor)], (args, kwargs))
        kwargs = {name: META if isinstance(value, torch.device) else value for name, value in kwargs.items()}
        try:
            out = op.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if not op.data_dependent:
                raise
            out = self._by_value(op, args, UNKNOWN)

        def placed(made: torch.Tensor) -> torch.Tensor:
            if id(made) in given:
                return given[id(made)]
            return made if self.outlines.device(made) is not None else self.outlines.add(made, device)

        return tree_map_only(torch.Tensor, placed, out)

    def _run(
        self,
        op: Op,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        key: Any,
        node: Any,
        from_python: bool,
    ) -> Any:
        """Lets an op run whose tensors are traced ones, and records what it makes and writes."""
        if from_python and op.number_slots:
            self._make_scalars(op, args)
        known = self._known.covers(tensors)
        early = op.mutates or op.data_dependent
        real = self._known.follow(op, args, kwargs) if known and early else UNKNOWN
        returns, takes = call
        if returns is not ABSENT:
            out = make(returns, args)
        else:
            try:
                out = op.plan.run(key, args, kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if op.data_dependent:
                    out = self._by_value(op, args, real)
                elif isinstance(error, NotImplementedError) or any(sign in str(error) for sign in _NO_META_KERNEL):
                    raise NotImplementedError(
                        f"{user_line()}: {op.name} cannot be traced: PyTorch does not say what shape it returns on the "
                        "meta device; leave it out of the traced block, or write it in other operations"
                    ) from None
                else:
                    raise
        if known and not early and all(map(values.is_small, tensors_in((out,), {}))):
            real = self._known.follow(op, args, kwargs)
        absorbed = UNKNOWN if known else self._known.absorbed(op, args, out)
        self._made = []
        if not op.aliases:
            if type(returns) is New and not op.scratch_first:
                if returns.nbytes:
                    self._made.append(self._storages.record_made(out, returns, op.name, **self._whose(node)))
            else:
                results = tensors_in(op.as_made(out, args), {})
                if not op.scratch_first:
                    self._record_results(results, op, node)
            if op.takes_more and takes != ():
                self._record_scratch(op, args, kwargs, node, takes, results if op.scratch_first else ())
            elif self._room is not None:
                self._note_room()
        elif op.mutates and op.takes_more and takes != ():
            self._record_scratch(op, args, kwargs, node, takes)
        if op.mutates:
            for i, name in op.written:
                written = args[i] if i < len(args) else kwargs.get(name)
                for tensor in (written,) if isinstance(written, torch.Tensor) else written or ():
                    if op.may_grow and self.counts(tensor) and self._storages.has_grown(tensor):
                        self._storages.record_growth(tensor, op=op.name, **self._whose(node))
                    keeps = op.name == "set_" or (op.func is UNSCALE and i == 1)  # it finds no infinity
                    if real is UNKNOWN and not keeps:
                        self._known.forget(tensor.untyped_storage()._cdata)
            if op.func is RESCALE:
                self._known.assume(args[0])
            if op.func is UNSCALE:
                self.unknown_reads.append(UnknownRead(user_line(), op.name))
        elif real is not UNKNOWN:
            self._remember(out, real)
        if absorbed is not UNKNOWN:
            self._remember(out, absorbed)
        if from_python and op.number_slots and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            self._scalars.release(op.name)
        return out

    def _look(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], int, Any]:
        """`Plan.look`; real tensors that are not plain are left to the host, if it is another device, or refused."""
        try:
            tensors, of_host, key = op.plan.look(args, kwargs)
        except RuntimeError:  # one has no sizes or no strides
            tensors, key = tensors_in(args, kwargs), None
            of_host = sum(not tensor.is_meta for tensor in tensors)
        if of_host and (self._rules.on_host or of_host < len(tensors)):
            for tensor in tensors:
                if not tensor.is_meta:
                    self._check_plain(tensor, op.name)
        return tensors, of_host, key

    def _check_plain(self, tensor: torch.Tensor, where: str) -> None:
        """Raises NotImplementedError if a tensor is no plain memory."""
        if (kind := other_kind(tensor)) is not None:
            raise NotImplementedError(
                f"{user_line()}: {where}: {kind}, cannot be traced here; make it inside the block, of traced "
                "tensors, or measure the run"
            )

    def check_own(self, where: str, args: Any, kwargs: Any) -> None:
        """Before the code of a tensor's class runs: whether what it computes with comes by here.

        Raises:
            NotImplementedError: If it takes no memory in a real run either, or was made outside the trace.
        """
        with torch._C.DisableTorchFunction():
            tensors = tensors_in(args, kwargs)
            traced = any(tensor.is_meta for tensor in tensors)
            for tensor in tensors:
                kind = type(tensor)
                if runs_own_code(kind) and (has_no_memory(kind) or (traced and not tensor.is_meta)):
                    self._check_plain(tensor, where)

    def _at_node(self, node: Any, number: int) -> None:
        """Notes which backward node is running, its number -1 outside any, and so which phase of the run it is."""
        self._number = number
        if self._writes.at_node(number) and node is not None and node.name() in engine.NOT_REPRODUCED:
            self.not_covered.add(node.name())
        self._scalars.at_node(node)
        recorder = self._storages.recorder
        if node is None and recorder.phase == "backward":
            self._label_gradients()
        closure = self._optimizing and torch.is_grad_enabled()  # for which alone an optimizer enables gradients
        if closure:
            self._number = None  # it may be over at the next op
        optimizer = self._optimizing and not closure
        recorder.enter_phase(backward=node is not None, optimizer=optimizer, module=self.attribution.module)

    def _whose(self, node: Any) -> dict[str, Any]:
        """Module, lines and stream that the op running now belongs to."""
        module = self.attribution.module
        if module or node is None:
            pass
        elif isinstance(node, _ACCUMULATE_GRAD):
            module = self.attribution.owner(node.variable)
        else:
            module = self.attribution.module_of_node(node._sequence_nr())
        line, own = self.attribution.lines(node)
        return {"module": module, "line": line, "own": own, "device": self._device, "stream": self.stream}

    def _record_results(self, results: Iterable[torch.Tensor], op: Op, node: Any) -> None:
        """Records the storages among an op's results that are new."""
        for made in results:
            try:
                new = (made.is_meta or self._rules.on_host) and not self._storages.is_known(made)
            except NotImplementedError:  # it has no storage
                self._check_plain(made, op.name)
                raise
            if new:
                self._made.append(self._storages.record(made, op=op.name, **self._whose(node)))

    def _record_scratch(
        self,
        op: Op,
        args: Any,
        kwargs: Any,
        node: Any,
        takes: Iterable[int | None] | None = None,
        results: Iterable[torch.Tensor] = (),
    ) -> None:
        """Records what the kernel allocates for itself, results that it makes after that, and that it gives it back.

        What it takes is asked of the rules where it is not known.
        """
        if op.is_named:
            self._note_left_out(op.func, args, kwargs)
        if takes is None:
            takes = op.scratch(*args, **kwargs) if op.scratch is not None else ()
        recorder, live, results = self._storages.recorder, [], iter(results)
        whose = self._whose(node) if takes else {}
        for nbytes in takes:
            if nbytes is None:
                self._record_results(islice(results, 1), op, node)
            elif nbytes < 0:  # gives one back before the others
                recorder.free(live.pop(next(i for i, (size, _) in enumerate(live) if size == -nbytes))[1])
            elif nbytes > 0:
                live.append((nbytes, recorder.alloc(nbytes, op=op.name, **whose)))
                recorder.label(live[-1][1], "scratch")
        self._record_results(results, op, node)
        if op.multiplies and self.gpu is not None:
            self._note_workspace(op, args, kwargs, node)
        self._note_room()
        for _, event in reversed(live):  # as C++ destroys what a function holds
            recorder.free(event)

    def _note_workspace(self, op: Op, args: Any, kwargs: Any, node: Any) -> None:
        """Notes the first product of each thread: autograd's engine has one of its own for the GPU."""
        thread = "forward" if node is None else "backward"
        if all((library, thread) in self._workspaces for library in self._libraries):
            return
        event = self._storages.recorder.events
        for library, nbytes in workspace.asked(op.func, args, kwargs, self.gpu).items():
            if (library, thread) not in self._workspaces:
                taken = workspace.Workspace(library, thread, nbytes, event, op.name, *self.attribution.lines(node))
                self._workspaces[library, thread] = taken

    def _note_room(self) -> None:
        """Notes where the GPU is first full, if the code would catch that: there a real run goes another way."""
        if self._room is None or self._storages.recorder.live_bytes <= self._room:
            return
        self._room = None
        line = line_of_code_that(values.catches_out_of_memory)
        if line is not None:
            self._decided(line)
            self.remarks.append(f"{line}: the GPU's memory is full, which this code catches; a trace raises nothing")

    def _note_left_out(self, called: Any, args: Any, kwargs: Any) -> None:
        if called in self._rules.not_covered:
            self.not_covered.add(self._rules.not_covered[called])
        what = self._rules.left_out.get(called)
        if callable(what):
            what = what(*args, **kwargs)
        if what is not None:
            self.left_out.add(what)

    def remark(self, text: str | None) -> None:
        """Notes what is worth knowing of a call, with its line."""
        remark = f"{user_line()}: {text}"
        if text is not None and remark not in self.remarks:
            self.remarks.append(remark)

    def _make_scalars(self, op: Op, args: tuple[Any, ...]) -> None:
        """Counts numbers that Python hands over among tensors; those of a gradient formula are tensors already."""
        for slot in op.number_slots:
            if slot < len(args) and isinstance(args[slot], (bool, int, float, complex)):
                self._scalars.make(args[slot], op=op.name, module=self.attribution.module)

    def _meet(self, op: Op, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Lets real tensors meet traced ones where a real run does: meta tensors stand in for them and are not counted.

        Raises:
            ValueError: If a real tensor learns.
            RuntimeError: If it is on the host, no single number, and the device's kernel does not take it from there.
        """
        self._check_learners(tensors)
        many = not self._rules.on_host and any(not self.counts(tensor) and tensor.dim() for tensor in tensors)
        if many and op.func not in _ACROSS:
            raise RuntimeError(
                f"{user_line()}: {op.name}: Expected all tensors to be on the same device, but found at "
                f"least two devices, {self._rules.device} and cpu! Bring the data over with run.to_device(data) or "
                f".to({self._rules.device.type!r})"
            )

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.is_meta else self._likeness(tensor)

        return tree_map_only(torch.Tensor, stand_in, args), tree_map_only(torch.Tensor, stand_in, kwargs)

    def _check_learners(self, tensors: list[torch.Tensor]) -> None:
        if torch.is_grad_enabled() and any(not t.is_meta and t.requires_grad and t.is_leaf for t in tensors):
            raise ValueError(
                f"{user_line()}: a tensor that learns was made outside the trace; build the model inside the with "
                "block, or bring it in with model = run.to_device(model)"
            )

    def _lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """The lengths of sequences to be packed, which decide how much is: their values in host memory."""
        real = self._known.twin(lengths)
        if real is None:
            raise DataDependentShape(
                f"{user_line()}: how much is packed depends on the lengths' values, which the trace does not know; "
                "bring them in with run.to_device(lengths), or leave them on the host"
            )
        return real

    # -- values --------------------------------------------------------------------------------------------------------

    def _likeness(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor in the likeness of a real one, or of a traced one, not yet counted."""
        self._check_plain(real, "a copy")
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            copy = torch.empty_like(real, device=META)
            likeness = torch.empty_strided(copy.size(), copy.stride(), dtype=copy.dtype, device=META)
            if self._finite and not real.is_meta and real.is_floating_point() and real.element_size() > 1:
                self._finite = bool(real.isfinite().all())
            known = self._known.twin(real)
            if known is not None and values.is_small(copy):
                self._remember(likeness, known.detach().clone(memory_format=torch.preserve_format))
            return likeness

    def _remember(self, traced: Any, real: Any) -> None:
        """Keeps the values of what an op returned, where the real op returned the same arrangement."""
        for t, r in zip(tree_leaves(traced), tree_leaves(real), strict=True):
            if isinstance(t, torch.Tensor) and isinstance(r, torch.Tensor) and t.is_meta:
                self._known.remember(t, r)

    def _read(self, tensor: torch.Tensor) -> Any:
        """The value of a one-element tensor; an answer, recorded, if it is unknown."""
        real = self._known.twin(tensor)
        with torch._C._DisableTorchDispatch():
            if real is not None:
                return real.item()
            if (passing := self._passes_check("item")) is not None:
                return type(_zeros(tensor).item())(passing)
            if tensor.dtype == torch.bool and (frame := asking_frame()).f_code is _REJECTS:
                return self._rejects(frame)
            if tensor.dtype == torch.bool and frame.f_code is _BACKWARD and torch.is_anomaly_enabled():
                self.unknown_reads.append(UnknownRead(user_line(), "item"))
                return False  # whether a gradient holds NaNs
            answer = self.answers.fill(_zeros(tensor), self._round()).item()
        self.unknown_reads.append(UnknownRead(user_line(), "item"))
        if tensor.dtype == torch.bool:
            self._decided(user_line(), answer)
        elif values.decides_branch(*user_frame()):
            self._decided(user_line())
        return answer

    def _fill(self, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory into which an op writes what nobody knows; if it is real, it holds an answer."""
        if not tensor.is_meta:
            self._unknown_read(op.name, tensor)
            with torch._C._DisableTorchDispatch():
                self.answers.fill(tensor.detach().zero_(), self._round())
        return tensor

    def _rejects(self, frame: Any) -> bool:
        """Whether numbers are to be expected out of bounds again; twice is what the most memory takes."""
        names = frame.f_locals
        within, count = names["p"], names["tensor"].numel()
        if type(names) is dict:
            names.clear()  # a copy, which would keep the tensors alive
        self._rejected += 1
        again = self._rejected <= 2 and count * (1 - within) ** self._rejected >= 0.5
        if not again:
            self._rejected = 0
        return again

    def _passes_check(self, op: str) -> bool | None:
        """The truth value that the code asks for and that lets it go on, if the other one makes it raise; recorded."""
        frame = asking_frame()
        passing = values.passes_check(frame.f_code, frame.f_lasti)
        if passing is not None:
            self.unknown_reads.append(UnknownRead(user_line(), op))
        return passing

    @property
    def conditional(self) -> list[str]:
        """The lines of `decisions`."""
        return list(self.decisions)

    def _round(self) -> int:
        """How often the loop that asks has asked before; a program whose loop never ends is left."""
        rounds = self._rounds.count(asking_frame(), self._steps_marked)
        if rounds >= ENDLESS:
            why = f"{user_line()}: a loop has asked {rounds:,} times for a value that no trace knows: does it ever end?"
            self.leaving.now(Endless, why)
        return rounds

    def _decided(self, line: str, outcome: Any = None) -> None:
        frame = asking_frame()
        is_own = whose(frame.f_code.co_filename) is OWN
        asked = None if outcome is None else (frame.f_lasti, outcome, is_own)  # a line may compare twice
        self.decisions.setdefault(line, set()).add(asked)

    def _by_value(self, op: Op, args: Any, real: Any) -> Any:
        """What an op returns whose result depends on values, where they are known.

        Raises:
            DataDependentShape: If they are not.
        """
        if real is not UNKNOWN:
            return tree_map_only(torch.Tensor, self._likeness, real)
        if op.func is _INDEX and (positions := self._known.positions(args[1])) is not None:
            return op.func(args[0], [at if at is None or at.is_meta else self._likeness(at) for at in positions])
        if not any("Tensor" in str(returned.type) for returned in op.func._schema.returns):
            if (passing := self._passes_check(op.name)) is not None:
                return passing
            self.unknown_reads.append(UnknownRead(user_line(), op.name))
            answer = bool(self.answers.number(self._round()))
            self._decided(user_line(), answer)
            return answer
        raise DataDependentShape(
            f"{user_line()}: the result of {op.name} depends on values, which a trace does not have; "
            "index with a small constant tensor, or use a form of fixed size (torch.where, a mask multiplied in)"
        ) from None

    # -- categories ----------------------------------------------------------------------------------------------------

    def _label_module(self, module: torch.nn.Module) -> None:
        with torch._C.DisableTorchFunction():
            self._storages.label(module.parameters(), "parameter")
            self._storages.label(module.buffers(), "buffer")

    def _label_gradients(self) -> None:
        with torch._C.DisableTorchFunction():
            for root in self.attribution.roots:
                self._storages.label(_gradients(root.parameters()), "gradient")

    def _on_module(self, path: str | None) -> None:
        self._number = None

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        self._optimizing, self._number = begins, None
        if not begins:
            self._storages.recorder.end_update()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with torch._C.DisableTorchFunction():
            self._storages.label(parameters, "parameter")
            self._storages.label(_gradients(parameters), "gradient")
            states = [optimizer.state[p] for p in parameters if p in optimizer.state]
            for value in (value for state in states for value in state.values()):
                leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
                self._storages.label([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], "optimizer state")


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            yield gradient


_HOST: Final = torch.device("cpu")
_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd
_COMPOSED: Final = torch._C.DispatchKey.CompositeExplicitAutograd
_VIEWS: Final = torch._C.DispatchKey.ADInplaceOrView


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)  # not one in Python, as batch norm's


class _Ops(engine.DispatchMode):
    """Hands every op that reaches a kernel to the trace."""

    def __init__(self, run: Trace, surface: Surface) -> None:
        super().__init__()
        self._run = run
        self._surface = surface

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = self._run.op(func)
        if _is_inference() and _is_composite(func):  # without autograd it arrives in one piece, its views still to come
            with self, torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False):
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        if op.composed:
            with self:
                return func._op_dk(_COMPOSED, *args, **(kwargs or {}))
        if types and (own := [kind for kind in types if runs_own_code(kind)]):
            self._run.check_own(op.name, args, kwargs or {})
            with self, self._surface.in_place():  # what the code of an argument's class calls comes here again
                answers = (kind.__torch_dispatch__(func, types, args, kwargs or {}) for kind in own)
                return next((answer for answer in answers if answer is not NotImplemented), NotImplemented)
        with torch._C.DisableTorchFunction():  # inside, a traced tensor is a meta tensor and says so
            return self._run.on_op(op, args, kwargs or {})


_active: Trace | None = None


def active() -> Trace | None:
    """The trace whose `with` block is running, if any."""
    return _active


def _set_active(run: Trace | None) -> None:
    global _active
    _active = run


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the host, in a tensor's shape and dtype."""
    with torch._C._DisableTorchDispatch():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
