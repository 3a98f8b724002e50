"""Values during a trace: the few that are known stay known, the rest is unknown and said to be.

Tracing computes nothing, but training code counts its steps, makes small index tensors and asks for their items. So a
small storage whose content follows from constants keeps a real twin, on which the same ops are run, and one of whole
numbers or truth values (tokens, positions, masks) may be larger. Whatever touches a value that nobody knows (a weight,
a loss) is unknown; asking for such a value gives the type's zero and is recorded.
"""

from __future__ import annotations

import ast
import dis
import linecache
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType
from typing import Any, Final

import torch

from .attribution import user_frame
from .ops import Op

LIMIT: Final = 4096
"""Storages of at most this many bytes keep their values."""

WHOLE_LIMIT: Final = 2**20
"""The same where they hold whole numbers or truth values: 512 sequences of 256 tokens."""

UNKNOWN: Final = object()
"""The result of an op whose result nobody knows."""

_UNINITIALISED: Final = frozenset(
    {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
)


_DRAWN: Final = frozenset({"randperm", "randint", "random_"})
"""Whole numbers drawn at random are really drawn: samplers shuffle with them."""

_ABSORBS: Final = {
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), True),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__", "mul"), False),
}
"""Op -> the truth value of an operand that decides the result, whatever the other one is (Kleene's logic)."""


class DataDependentShape(RuntimeError):
    """The shape of a result depends on values, which a trace does not have."""


class Endless(BaseException):
    """A loop waits for a value that a trace does not have."""


@dataclass(frozen=True)
class UnknownRead:
    """One place where the traced code asked for a value that the trace does not know."""

    line: str
    op: str


def unknown(number: float, decided: Callable[[Any], None]) -> float:
    """A stand-in for a number that nobody knows: it counts as `number`, and tells when it decides something.

    What a function written in C makes of one is a plain number, of which nobody is told; `everybyte.worlds` finds what
    such numbers decide.

    Args:
        number: What it counts as, the type's zero for one.
        decided: Called whenever the stand-in, or what was computed from it, is compared, cut to a whole number, or used
            as a condition or (`decide_sizes`) a size, with what that came to; with None where that is not known.
    """
    if type(number) not in _STAND_INS:
        return number
    made = _STAND_INS[type(number)](number)
    made.decided = decided
    return made


def _stand_in(base: type) -> type:
    """A kind of number that reports being compared or tested, and passes this on through arithmetic."""

    def telling(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            result = getattr(base, name)(self, *args)
            if not (name in ("__eq__", "__ne__") and _asks_whether_finite(self, *args)):
                self.decided(result)
            return result

        return method

    def passing_on(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            try:
                result = getattr(base, name)(self, *args)
            except ArithmeticError:  # the true value is not zero, or not for all we know
                result = base()
            return unknown(result, self.decided) if type(result) in _STAND_INS else result

        return method

    deciding = ("bool", "lt", "le", "gt", "ge", "eq", "ne")
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    arithmetic = ("neg", "pos", "abs", "round", *binary, *(f"r{name}" for name in binary))
    if base is float:
        deciding = (*deciding, "int", "trunc", "floor", "ceil")  # becomes a plain number, a size as a rule

    def divmod_(self: Any, other: Any) -> Any:
        return self // other, self % other

    def rdivmod(self: Any, other: Any) -> Any:
        return other // self, other % self

    methods = {f"__{name}__": telling(f"__{name}__") for name in deciding}
    methods |= {name: telling(name) for name in ("as_integer_ratio", "is_integer") if hasattr(base, name)}
    methods |= {"__divmod__": divmod_, "__rdivmod__": rdivmod}
    methods |= {"__copy__": lambda self: self, "__deepcopy__": lambda self, memo: self}
    methods["__reduce__"] = lambda self: (base, (repr(self),))  # what is written, or sent, is a plain number
    methods |= {f"__{name}__": passing_on(f"__{name}__") for name in arithmetic}

    def hashed(self: Any) -> int:
        if decides_branch(*user_frame()):  # whether it is in a set: other numbers would not be compared with it
            self.decided(None)
        return base.__hash__(self)

    methods["decided"] = staticmethod(lambda result: None)  # of one made by its type, of what has been told already
    return type(f"Unknown{base.__name__.title()}", (base,), {**methods, "__hash__": hashed})


def _asks_whether_finite(number: float, other: Any) -> bool:
    """Whether a comparison tells NaN or infinity from all other numbers, as before a number is written as JSON."""
    return other is number or (isinstance(other, float) and math.isinf(other))


_STAND_INS: Final[dict[type, type]] = {}
_STAND_INS |= {float: _stand_in(float), int: _stand_in(int)}


def plain(number: Any) -> Any:
    """The plain number that a stand-in counts as; anything else is what it is."""
    return next((base(number) for base, kind in _STAND_INS.items() if type(number) is kind), number)


def decide_sizes(value: Any) -> None:
    """Lets stand-ins among sizes, indices and slices tell that they decide something."""
    if isinstance(value, tuple(_STAND_INS.values())):
        value.decided(str(value))
    elif isinstance(value, slice):
        decide_sizes((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list)):
        for part in value:
            decide_sizes(part)


class _Twin(weakref.ref):
    """A traced storage that is alive, its address, and a real tensor in a storage that holds what it would.

    That is `assumed` where it is so in a run that goes well.
    """

    __slots__ = ("address", "assumed", "real")


class KnownValues:
    """Real twins of small storages, by the address of the traced storage, each until that dies."""

    def __init__(self) -> None:
        self._twins: dict[int, _Twin] = {}

    def __len__(self) -> int:
        return len(self._twins)

    def forget(self, storage: int) -> None:
        """Drops the value of a storage that has been written with something unknown."""
        self._twins.pop(storage, None)

    def remember(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        """Says what a traced storage holds, if it is small and arranged as the real one, which has memory."""
        same = traced.stride() == real.stride() and traced.dtype == real.dtype and not real._is_zerotensor()
        if same and is_small(real):
            self._add(traced.untyped_storage(), real.detach())

    def copy(self, storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Says that another traced storage holds what this one does."""
        if (twin := self._twins.get(storage._cdata)) is not None:
            self._add(other, _in(twin.real.untyped_storage().clone(), twin.real))

    def _add(self, storage: torch.UntypedStorage, real: torch.Tensor) -> None:
        twin = _Twin(storage, self._die)
        twin.address, twin.real, twin.assumed = storage._cdata, real, False
        self._twins[twin.address] = twin

    def _die(self, twin: Any) -> None:
        if self._twins.get(twin.address) is twin:  # or another storage has taken the address since
            del self._twins[twin.address]

    def assume(self, tensor: torch.Tensor) -> None:
        """Says that a traced tensor holds what it holds in a run that goes well."""
        if (twin := self._twins.get(tensor.untyped_storage()._cdata)) is not None:
            twin.assumed = True

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether that was said."""
        twin = self._twins.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        return twin is not None and twin.assumed

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the value of a traced one, or None if it is unknown."""
        if not tensor.is_meta:
            return tensor
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None or _arrangement(twin.real) == _arrangement(tensor):
            return None if twin is None else twin.real
        return _in(twin.real.untyped_storage(), tensor)

    def positions(self, indices: Any) -> list[torch.Tensor | None] | None:
        """Indices in which each mask is replaced by the positions, real ones, at which it is true.

        Returns:
            None if a mask's values are not known.
        """
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            mask = self.twin(index)
            if mask is None:
                return None
            with torch._C._DisableTorchDispatch():
                positions += mask.nonzero(as_tuple=True)
        return positions

    def covers(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all these tensors are traced ones whose values are known."""
        twins = self._twins
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata if tensor.is_meta else None
            if address not in twins:
                return False
        return True

    def follow(self, op: Op, args: Any, kwargs: Any) -> Any:
        """Runs an op on the twins of its arguments, all of which `covers` says are known.

        Returns:
            The real result, or `UNKNOWN` if it does not follow from the arguments.
        """
        if op.draws and op.name not in _DRAWN:
            return UNKNOWN
        if op.name in _UNINITIALISED:
            dtype = kwargs.get("dtype") or next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), None)
            if dtype is None or dtype.is_floating_point or dtype.is_complex:
                return UNKNOWN

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self.twin(leaf)
            if isinstance(leaf, (list, tuple)):
                return [real(item) for item in leaf]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        try:
            with torch._C._DisableTorchDispatch():
                return op.func(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
        except (RuntimeError, NotImplementedError, TypeError):
            return UNKNOWN

    def absorbed(self, op: Op, args: Any, out: Any) -> Any:
        """What one known operand makes of a result, whatever the other one is: all of `unknown | True` is true.

        Returns:
            The real result in `out`'s arrangement, or `UNKNOWN`.
        """
        absorbing = _ABSORBS.get(op.name.removesuffix("_") if op.mutates else op.name)
        if absorbing is None or not isinstance(out, torch.Tensor) or not out.is_meta or not is_small(out):
            return UNKNOWN
        whole = out.untyped_storage().nbytes() == out.numel() * out.element_size()
        if not whole or (out.dtype != torch.bool if absorbing else out.is_floating_point() or out.is_complex()):
            return UNKNOWN
        with torch._C._DisableTorchDispatch():
            for operand in args[:2]:
                real = self.twin(operand) if isinstance(operand, torch.Tensor) else torch.tensor(operand)
                if real is not None and bool((real.bool() == absorbing).all()):
                    made = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu")
                    return made.fill_(absorbing)
        return UNKNOWN


def _arrangement(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _in(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A real tensor in a storage, arranged like another one in its own."""
    with torch._C._DisableTorchDispatch():
        real = torch.empty(0, dtype=like.dtype, device="cpu")
        return real.set_(storage, like.storage_offset(), like.size(), like.stride())


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage is small enough to keep its values."""
    fractional = tensor.is_floating_point() or tensor.is_complex()
    return tensor.untyped_storage().nbytes() <= (LIMIT if fractional else WHOLE_LIMIT)


def decides_branch(filename: str, lineno: int) -> bool:
    """Whether a value that was read as a plain number on this line of source decides which way the program goes.

    `float(loss)` must return a plain number, which cannot tell; so the source is asked. True if the line lies in a
    comparison or in the test of an `if`, `while`, `assert`, conditional expression or comprehension, or in a `range`,
    or if it assigns a name that such a test of the same function uses. Where the source cannot be read, the answer is
    the cautious one.
    """

    return _is_used(filename, lineno, _tests)


def counts_loop(filename: str, lineno: int) -> bool:
    """As `decides_branch`, of `range` alone: it asks a stand-in for nothing, which then cannot tell either."""
    return _is_used(filename, lineno, _ranges)


@cache
def passes_check(code: CodeType, at: int) -> bool | None:
    """The truth value that a check lets pass, `if not mask.all(): raise ...` for one: a real run that goes on had it.

    Args:
        code, at: What runs, and the place of the instruction in it that asks for the value.

    Returns:
        None if the value does not decide at once whether the code raises.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "TO_BOOL"]
    index = {step.offset: i for i, step in enumerate(steps)}
    asks = next((i for i, step in enumerate(steps) if step.offset >= at), len(steps) - 1)
    if steps[asks].opname.startswith("CALL"):  # `.item()`: what follows asks
        asks += 1
    if "JUMP" not in steps[asks].opname or "_IF_" not in steps[asks].opname or "NONE" in steps[asks].opname:
        return None
    raises = [False] * (len(steps) + 1)  # whether every way from here ends in a `raise`; a way back does not
    for i in reversed(range(asks, len(steps))):
        name, ways = steps[i].opname, []
        if "JUMP" in name or name == "FOR_ITER":
            jumped = index.get(steps[i].argval, 0)
            ways.append(jumped > i and raises[jumped])
        if "JUMP" not in name or "_IF_" in name:
            ways.append(raises[i + 1])
        raises[i] = "RAISE" in name or (all(ways) and not any(end in name for end in ("RETURN", "YIELD")))
    jumped = raises[index[steps[asks].argval]]
    if jumped == raises[asks + 1]:
        return None
    return jumped != ("IF_TRUE" in steps[asks].opname)


@cache
def catches_out_of_memory(code: CodeType) -> bool:
    """Whether code knows what PyTorch raises when a GPU is full, by its name or its message."""
    texts = {constant.lower().rstrip(". ") for constant in code.co_consts if isinstance(constant, str)}
    by_message = code.co_exceptiontable and not texts.isdisjoint({"out of memory", "cuda out of memory"})
    return "OutOfMemoryError" in code.co_names or bool(by_message)


def _tests(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Compare):
        return [node]
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    return list(node.ifs) if isinstance(node, ast.comprehension) else _ranges(node)


def _ranges(node: ast.AST) -> list[ast.AST]:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    return [node] if called else []


def _is_used(filename: str, lineno: int, places: Callable[[ast.AST], list[ast.AST]]) -> bool:
    """Whether a line lies in one of the places of its function, or assigns a name that one of them uses."""
    linecache.checkcache(filename)
    return _is_used_in("".join(linecache.getlines(filename)), lineno, places)


@lru_cache(maxsize=64)
def _is_used_in(source: str, lineno: int, places: Callable[[ast.AST], list[ast.AST]]) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    own = list(_own_nodes(_innermost_function(tree, lineno)))
    found = [place for node in own for place in places(node)]
    if any(_spans(place, lineno) for place in found):
        return True
    assigned: set[str] = set()
    for node in own:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and _spans(node, lineno):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                assigned |= _names(target)
    return any(assigned & _names(place) for place in found)


def _innermost_function(tree: ast.AST, lineno: int) -> ast.AST:
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and _spans(n, lineno)
    ]
    return max(functions, key=lambda function: function.lineno, default=tree)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, those of functions defined in it left out."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _own_nodes(child)


def _spans(node: Any, lineno: int) -> bool:
    return node.lineno <= lineno <= (node.end_lineno or node.lineno)


def _names(node: ast.AST) -> set[str]:
    return {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
