"""Values during a trace: the few that are known stay known, the rest is unknown and said to be.

Tracing computes nothing, but training code counts its steps, makes small index tensors and asks for their items. So a
small storage whose content follows from constants keeps a real twin, on which the same ops are run. Whatever touches a
value that nobody knows (a weight, a loss) is unknown; asking for such a value gives the type's zero and is recorded.
"""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

LIMIT: Final = 4096
"""Storages of at most this many bytes keep their values."""

aten: Final = torch.ops.aten
_UNKNOWN: Final = frozenset({"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"})


class DataDependentShape(RuntimeError):
    """The shape of a result depends on values, which a trace does not have."""


@dataclass(frozen=True)
class UnknownRead:
    """One place where the traced code asked for a value that the trace does not know."""

    line: str
    op: str
    decides_branch: bool


class KnownValues:
    """Real twins of small storages, by the identity of the traced storage."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.UntypedStorage] = {}

    def __len__(self) -> int:
        return len(self._twins)

    def forget(self, storage: int) -> None:
        """Drops the value of a storage that has died or been written with something unknown."""
        self._twins.pop(storage, None)

    def remember(self, storage: int, real: torch.Tensor) -> None:
        """Says what a traced storage holds."""
        if real.untyped_storage().nbytes() <= LIMIT:
            self._twins[storage] = real.untyped_storage()

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the value of a traced one, or None if it is unknown."""
        if not tensor.is_meta:
            return tensor
        storage = self._twins.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        real = torch.empty(0, dtype=tensor.dtype)
        return real.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def follow(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Runs an op on the twins of its arguments.

        Returns:
            The real result, or None if the op's result is not known.
        """
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.name.split("::")[1] in _UNKNOWN:
            return None
        if tensors and any(t.is_meta and t.untyped_storage()._cdata not in self._twins for t in tensors):
            return None
        if not tensors and _numel(args) > LIMIT:
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self.twin(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        try:
            return func(*tree_map(real, args), **tree_map(real, kwargs))
        except (RuntimeError, NotImplementedError, TypeError):
            return None


def _numel(args: Any) -> int:
    """A bound on the size of what a factory makes, from the numbers among its arguments."""
    size = 1
    for leaf in tree_leaves(args):
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            size *= max(1, abs(int(leaf)))
    return size


def decides_branch(filename: str, lineno: int) -> bool:
    """Whether the value read on this line of source decides which way the program goes.

    True if the line lies in the test of an `if`, `while`, conditional expression, `assert` or comparison, or if it
    assigns a name that such a test of the same function uses.
    """
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True  # unreadable source: assume the worst
    scope = _innermost_scope(tree, lineno)
    tests = [node.test for node in ast.walk(scope) if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert))]
    tests += [node for node in ast.walk(scope) if isinstance(node, ast.Compare)]
    tests += [test for node in ast.walk(scope) if isinstance(node, ast.comprehension) for test in node.ifs]
    if any(test.lineno <= lineno <= (test.end_lineno or test.lineno) for test in tests):
        return True
    assigned = _names_assigned_on(scope, lineno)
    used = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
    return bool(assigned & used)


def _innermost_scope(tree: ast.AST, lineno: int) -> ast.AST:
    scope, width = tree, float("inf")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= lineno <= (node.end_lineno or 0):
            span = (node.end_lineno or 0) - node.lineno
            if span < width:
                scope, width = node, span
    return scope


def _names_assigned_on(scope: ast.AST, lineno: int) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            if node.lineno <= lineno <= (node.end_lineno or node.lineno):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names
