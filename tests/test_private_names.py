"""The private names of PyTorch that the library uses stand in one file, and this PyTorch has them."""

import ast
import importlib
import operator
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import everybyte

LISTED = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text())
WHAT_ENDS = {name: use for uses in LISTED.values() for name, use in uses.items()}
OF_CUDA = LISTED["on a GPU, in builds with CUDA alone"]


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; none if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before else []


def private_names(tree: ast.AST) -> Iterator[str]:
    """Those of PyTorch that a module imports or asks for."""
    imported = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked = [names for node in ast.walk(tree) if id(node) not in parts and (names := dotted(node))]
    names = {*imported.values(), *(".".join([imported.get(first, first), *rest]) for first, *rest in asked)}
    yield from (name for name in names if name.split(".")[0] == "torch" and is_private(name))


def test_the_list_is_complete_and_holds_nothing_that_is_not_used():
    sources = Path(everybyte.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in private_names(ast.parse(path.read_text()))}
    assert used == set(WHAT_ENDS)


@pytest.mark.parametrize("name", WHAT_ENDS)
def test_pytorch_has(name):
    if name in OF_CUDA and torch.version.cuda is None:
        pytest.skip("this PyTorch is built without CUDA")
    module, rest = "torch", name.split(".")[1:]
    while rest:
        try:
            module = importlib.import_module(f"{module}.{rest[0]}").__name__
        except ModuleNotFoundError:
            break
        rest.pop(0)
    thing = importlib.import_module(module)
    assert not rest or operator.attrgetter(".".join(rest))(thing) is not None, WHAT_ENDS[name]
