"""What autograd keeps between the forward and the backward pass, a row for each storage, and why.

Autograd's graph holds the answer: each node keeps the operands that its gradient formula names. So the graph is walked
from the output backwards and each node is asked for what it kept. Nothing is hooked, so nothing about the run changes;
in-place operations on views are the one exception (`_InPlaceOnViews`).
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pandas as pd
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CheckpointFrame

from .attribution import Attribution
from .kinds import parts
from .trace import active, trace
from .units import LARGEST

COLUMNS: Final = ("nbytes", "shape", "dtype", "module", "op", "role", "operand", "why", "uses")


def saved(function: Callable[[], Any], rules: str | None = None) -> Saved:
    """Runs a forward pass and lists what autograd kept for its backward pass.

        >>> layer = torch.nn.Linear(4, 8)
        >>> eb.saved(lambda: layer(torch.ones(2, 4))).total_bytes  # the input: 2 x 4 numbers of 4 bytes
        32

    Args:
        function: A function of no arguments that runs a forward pass and returns its output: a tensor, or tensors in
            tuples, lists and dicts.
        rules: Whose kernels' rules decide what is kept. None: the rules of the trace that is running, else what really
            happens on the tensors' own device. With a name, as in `trace`, the function is run in a trace of its own
            and must make its tensors inside.

    Returns:
        The saved storages, none of them held alive. Parameters are left out, inputs and buffers counted and labelled.

    Raises:
        NotImplementedError: If what is kept is no plain tensor (sparse, nested) and does not say what it consists of.
        ValueError: If the output has no gradient graph, `rules` names other rules than those of the running trace, or
            more is kept than 2**63 - 1 bytes.
    """
    running = active()
    if rules is not None and running is None:
        with trace(rules=rules):
            return saved(function)
    if running is not None and running.retention != "pytorch":
        raise ValueError(f"retention={running.retention!r}: saved() lists what PyTorch keeps; read the run's timeline")
    if rules is not None and running is not None and rules != running.rules:
        raise ValueError(f"rules={rules!r} inside a trace by the rules {running.rules!r}; leave it out")
    attribution = running.attribution if running is not None else Attribution()
    hidden = _InPlaceOnViews()
    with attribution.following() if running is None else nullcontext(), attribution.holding() as modules:
        with hidden:
            output = function()
        counts = running.counts if running is not None else lambda tensor: True
        with torch._C.DisableTorchFunction():  # traced tensors are looked at, not asked
            kept = _collect(output, function, attribution, [*modules, *attribution.roots], hidden, counts)
    if kept.total_bytes > LARGEST:
        raise ValueError(f"{kept.total_bytes:,} B are kept, more than 2**63 - 1; give smaller sizes")
    if running is None:
        return kept
    said = {name: tuple(sorted(getattr(running, name))) for name in ("conditional", "not_covered", "remarks")}
    return replace(kept, **said)


@dataclass(frozen=True)
class Output:
    """What the forward pass returned.

    Attributes:
        nbytes: Bytes of the output's storages.
        unsaved_bytes: Those that are live after the forward pass though no gradient formula needs them.
        shapes: The shape of each tensor.
    """

    nbytes: int
    unsaved_bytes: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Saved:
    """The storages that autograd keeps. Made by `saved`.

    Attributes:
        rows: A dict for each storage, with the columns of `frame`.
        output: What the forward pass returned.
        parameter_bytes: Bytes of the parameters among the kept operands, which are left out of the rows.
        conditional, not_covered, remarks: What the trace, if there is one, says of itself up to here (`trace.Trace`): a
            real run may keep something else.
    """

    rows: tuple[dict[str, Any], ...]
    output: Output
    parameter_bytes: int
    conditional: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes kept, each storage once, parameters left out."""
        return sum(row["nbytes"] for row in self.rows)

    def frame(self) -> pd.DataFrame:
        """A row for each storage in the order in which the forward pass first saved it.

        Columns: nbytes (of the whole storage), shape and dtype (of the operand that first kept it), module (whose
        forward kept it first), op, role (activation, input, buffer), operand (its name in PyTorch's derivative
        formula), why, and uses (how many gradient formulas need it).
        """
        return pd.DataFrame(list(self.rows), columns=list(COLUMNS))

    def by(self, key: str) -> pd.DataFrame:
        """Kept bytes and number of storages for each value of a column, largest first."""
        if key not in COLUMNS:
            raise ValueError(f"no column {key!r}; choose one of {', '.join(COLUMNS)}")
        groups = self.frame().groupby(key, sort=True)["nbytes"]
        table = pd.DataFrame({"nbytes": groups.sum(), "storages": groups.count()})
        return table.sort_values("nbytes", ascending=False, kind="stable")

    def partition(self, patterns: Mapping[str, str | Sequence[str]]) -> dict[str, int]:
        """Kept bytes under names of one's own, so that none is left unexplained.

            >>> layer = torch.nn.Linear(4, 8)
            >>> saved = eb.saved(lambda: layer(torch.ones(2, 4)).relu())
            >>> saved.partition({"input": "* addmm mat1", "ReLU": "* relu *"})
            {'input': 32, 'ReLU': 64}

        Args:
            patterns: For each name one pattern, or several, for a storage's "module op operand"; `*` stands for any
                text (`fnmatch`).

        Returns:
            Bytes for each name, in the given order; 0 where nothing was kept. They add up to `total_bytes`.

        Raises:
            ValueError: If a storage fits none of the names, or two of them.
        """
        parts = dict.fromkeys(patterns, 0)
        for row in self.rows:
            place = " ".join((row["module"], row["op"], row["operand"]))
            fits = [name for name, several in patterns.items() if _fits(place, several)]
            if len(fits) != 1:
                found = f"fits {' and '.join(map(repr, fits))}" if fits else "fits no name"
                raise ValueError(f"{place!r}, {row['nbytes']:,} B, {found}: give patterns so that it fits one")
            parts[fits[0]] += row["nbytes"]
        return parts

    def __repr__(self) -> str:
        doubts = [
            f"; {name}: {', '.join(said)}" for name in ("conditional", "not_covered") if (said := getattr(self, name))
        ]
        return f"<Saved: {self.total_bytes:,} B in {len(self.rows):,} storages{''.join(doubts)}>"


def _fits(place: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatchcase(place, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


# -- the walk ----------------------------------------------------------------------------------------------------------


def _collect(
    output: Any,
    function: Callable[[], Any],
    attribution: Attribution,
    modules: list[torch.nn.Module],
    hidden: _InPlaceOnViews,
    counts: Callable[[torch.Tensor], bool],
) -> Saved:
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes = _graph([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])
    if not nodes:
        raise ValueError(
            "the output has no gradient graph: run with gradients enabled on something that requires a gradient, and "
            "return the output"
        )
    leaves = [node.variable for node in nodes if isinstance(node, _ACCUMULATE_GRAD)]
    parameters = _storages(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
    parameters |= _storages(parameter for module in modules for parameter in module.parameters())
    buffers = _storages(buffer for module in modules for buffer in module.buffers())
    inputs = _storages((*leaves, *_closed_over(function))) | attribution.given
    rows: dict[int, dict[str, Any]] = {}
    parameter_bytes: dict[int, int] = {}
    kept = [*_operands(nodes), *_recomputed_from(nodes)]
    for number, op, operand, tensor in sorted([*kept, *hidden.kept()], key=lambda kept: kept.number):
        storage, nbytes = _storage(tensor), tensor.untyped_storage().nbytes()
        if not counts(tensor):
            continue
        if storage in parameters:
            parameter_bytes[storage] = nbytes
        elif storage in rows:
            rows[storage]["uses"] += 1
        elif nbytes:
            rows[storage] = {
                "nbytes": nbytes,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "module": attribution.module_of_node(number),
                "op": op,
                "role": "buffer" if storage in buffers else "input" if storage in inputs else "activation",
                "operand": operand,
                "why": _why(op, operand),
                "uses": 1,
            }
    returned = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in parts(outputs)}
    unsaved = sum(nbytes for storage, nbytes in returned.items() if storage not in rows and storage not in parameters)
    described = Output(sum(returned.values()), unsaved, tuple(tuple(tensor.shape) for tensor in outputs))
    return Saved(tuple(rows.values()), described, sum(parameter_bytes.values()))


class _Kept(NamedTuple):
    """An operand that a node keeps, and the node's place in the order of the forward pass."""

    number: int
    op: str
    operand: str
    tensor: torch.Tensor


_ACCUMULATE_GRAD: Final = torch._C._functions.AccumulateGrad


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Storages of the plain ones, and of what the others consist of where they say it."""
    found = set()
    for tensor in tensors:
        with suppress(NotImplementedError):
            found |= {_storage(part) for part in parts([tensor])}
    return found


def _graph(roots: list[Any]) -> list[Any]:
    """Every node that is reachable from `roots`, in the order in which the forward pass made them."""
    found, frontier = set(roots), list(roots)
    while frontier:
        for parent, _ in frontier.pop().next_functions:
            if parent is not None and parent not in found:
                found.add(parent)
                frontier.append(parent)
    return sorted(found, key=lambda node: node._sequence_nr())


def kept_by(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of a graph keeps; none once a backward pass has let them go."""
    return [kept.tensor for kept in (*_operands([node]), *_recomputed_from([node]))]


def _operands(nodes: list[Any]) -> Iterator[_Kept]:
    """What the nodes themselves hold, by its names in PyTorch's derivative formulas, as it is or as hooks packed it."""
    for node in nodes:
        number, op = node._sequence_nr(), _op_name(node.name())
        for operand, kept in _raw(node):
            for tensor in _in(kept.data):
                yield _Kept(number, op, operand, tensor)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for operand, value in vars(node).items():  # what a function wrote on its context by itself
                for tensor in _in(value):
                    yield _Kept(number, op, operand, tensor)


def _recomputed_from(nodes: list[Any]) -> Iterator[_Kept]:
    """What checkpointing computes a segment anew from: its hooks, which the segment's nodes hold, hold it.

    `torch/utils/checkpoint.py`, `_CheckpointFrame`. A reentrant segment is a node, whose operands these are.
    """
    seen: set[_CheckpointFrame] = set()
    for node in nodes:
        for _, kept in _raw(node):
            for operand, tensor in _held_by(_surroundings(kept.unpack_hook).get("frame"), seen):
                yield _Kept(node._sequence_nr(), "checkpoint", operand, tensor)


def _held_by(frame: Any, seen: set[_CheckpointFrame]) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(frame, _CheckpointFrame) or frame in seen:
        return
    seen.add(frame)
    for argument in _arguments(frame):
        if isinstance(argument, torch._C._autograd.SavedTensor):
            yield from (("input", tensor) for tensor in _in(argument.data))
            yield from _held_by(_surroundings(argument.unpack_hook).get("frame"), seen)  # a segment in a segment
        else:
            yield from (("input", tensor) for tensor in _in(argument))
    around = _surroundings(frame.recompute_fn)
    named = around.get("kwargs"), list(_surroundings(around["fn"]).values())
    yield from (("input", tensor) for tensor in _in(named))
    yield from (("random state", tensor) for tensor in _in(around.get("fwd_cpu_state")))


def _arguments(frame: _CheckpointFrame) -> list[Any]:
    """The arguments of a checkpointed function, tensors packed; up to 2.11 a node of their own holds them."""
    if hasattr(frame, "saved_args"):
        return frame.saved_args
    node = getattr(frame.input_saver, "grad_fn", None)
    if node is None:
        return []
    _, *packed = node._raw_saved_tensors  # the first is there so that the node is
    return [*packed, *_surroundings(node.get_args)["args"]]


def _raw(node: Any) -> Iterator[tuple[str, Any]]:
    """The saved tensors of a node, packed, and their names."""
    for name in _raw_names(type(node)):
        raw = getattr(node, name)
        operand = "saved by the function" if name == "_raw_saved_tensors" else name.removeprefix("_raw_saved_")
        for kept in raw if isinstance(raw, (tuple, list)) else (raw,):
            if kept is not None:
                yield operand, kept


@lru_cache(maxsize=1024)
def _raw_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _in(value: Any) -> list[torch.Tensor]:
    return list(parts(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))


def _surroundings(function: Any) -> dict[str, Any]:
    """The variables around a function that it holds on to, those that have a value."""
    names, held = getattr(getattr(function, "__code__", None), "co_freevars", ()), {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # empty
            held[name] = cell.cell_contents
    return held


def _closed_over(function: Callable[[], Any]) -> list[torch.Tensor]:
    """Tensors that a function finds in its surroundings: what its author regards as its inputs."""
    try:
        around = inspect.getclosurevars(function)
    except TypeError:
        return []
    values = [*around.nonlocals.values(), *around.globals.values()]
    return [leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# -- what the graph does not show --------------------------------------------------------------------------------------


class _InPlaceOnViews(TorchFunctionMode):
    """Sees what in-place operations on views keep.

    Autograd puts the node of such an operation inside another one, `CopySlices`, which does not show it
    (`torch/csrc/autograd/functions/tensor.h`). So for the length of such a call what is saved passes through a hook,
    which hands it on unchanged. Where the user has hooks of their own, theirs stay in force.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[int, str, str, weakref.ref[_Held]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _writes_into_view(func, args, kwargs) or not _hooks_are_free():
            return func(*args, **kwargs)
        number, op, written = _sequence_number(), func.__name__.strip("_"), _storage(args[0])

        def pack(tensor: torch.Tensor) -> _Held:
            held = _Held(tensor.detach())  # with its graph it would hold the node that holds it
            operand = "result" if _storage(tensor) == written else "other"
            self._seen.append((number, op, operand, weakref.ref(held)))
            return held

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            return func(*args, **kwargs)

    def kept(self) -> list[_Kept]:
        """What such operations keep now: a node that is gone has let go of it."""
        alive = [(number, op, operand, held()) for number, op, operand, held in self._seen]
        return [_Kept(number, op, operand, held.tensor) for number, op, operand, held in alive if held is not None]


@dataclass(frozen=True, eq=False)
class _Held:
    """What a node keeps in place of a tensor; it dies with the node."""

    tensor: torch.Tensor


_sequence_number: Final = torch._C._autograd._get_sequence_nr


def _writes_into_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is `relu_(view)`, `view *= 2`, `relu(view, inplace=True)` or the like."""
    name = getattr(func, "__name__", "")
    in_place = re.search(r"[^_]_$|^__i\w+__$", name) is not None or kwargs.get("inplace") is True
    return in_place and bool(args) and isinstance(args[0], torch.Tensor) and args[0]._is_view()


def _hooks_are_free() -> bool:
    autograd = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None


# -- why ---------------------------------------------------------------------------------------------------------------

_FACTOR: Final = "the other factor's gradient is the incoming one times this"
_REASONS: Final = {
    ("addmm", "mat1"): "input of a product whose weight learns: its gradient is X^T dY",
    ("mm", "self"): "input of a product whose weight learns: its gradient is X^T dY",
    ("addmm", "mat2"): "weight of a product whose input passes a gradient on: dX = dY W^T",
    ("mm", "mat2"): "weight of a product whose input passes a gradient on: dX = dY W^T",
    ("bmm", "self"): _FACTOR,
    ("bmm", "mat2"): _FACTOR,
    ("mul", "self"): _FACTOR,
    ("mul", "other"): _FACTOR,
    ("div", "other"): "divisor: the gradient is divided by it too",
    ("dropout", "other"): "mask: which elements were dropped",
    ("native_layer_norm", "input"): "normalised anew in backward, from the two statistics",
    ("native_layer_norm", "result1"): "mean of each row",
    ("native_layer_norm", "result2"): "reciprocal standard deviation of each row",
    ("native_dropout", "result1"): "mask: which elements were dropped",
    ("max", "indices"): "where each maximum came from, so that its gradient goes back there",
    ("embedding", "indices"): "which rows of the table were read, so that their gradients go back there",
    ("index", "indices"): "which elements were read, so that their gradients go back there",
    ("nll_loss", "target"): "which class was right",
    ("checkpoint", "input"): "computed anew in backward, with all that lies between, from this",
    ("checkpoint", "random state"): "the generator's, so that the same random numbers are drawn again in backward",
    ("scaled_dot_product_flash_attention", "logsumexp"): "a number for each query, from which the scores are made anew",
    ("scaled_dot_product_flash_attention", "rng_state"): "state of the generator, so that the same mask is drawn again",
    ("scaled_dot_product_flash_attention", "unused"): "a number that nobody reads",
    ("mkldnn_rnn_layer", "result3"): "oneDNN's workspace: the gates of every step",
}
"""What PyTorch's derivative formulas (`tools/autograd/derivatives.yaml`) need an operand for, where worth saying."""


def _why(op: str, operand: str) -> str:
    if (op, operand) in _REASONS:
        return _REASONS[op, operand]
    if operand.startswith("result") or operand in ("output", "logsumexp"):
        return f"the gradient of {op} is written in its output"
    return f"the gradient of {op} depends on its {'input' if operand == 'self' else operand}"


def _op_name(node: str) -> str:
    """`NativeLayerNormBackward0` -> `native_layer_norm`."""
    name = re.sub(r"Backward\d*$", "", node.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
