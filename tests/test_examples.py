"""The examples in the library's docstrings, run as they stand; the book's pages of the library show them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import everybyte as eb

MODULES = ["everybyte", *(found.name for found in pkgutil.walk_packages(eb.__path__, "everybyte."))]
MODULES.remove("everybyte.__main__")
EXAMPLES = {
    example.name: example
    for name in MODULES
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    if example.examples
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a file
    example = EXAMPLES[name]
    example.globs = {"eb": eb, "torch": torch}  # as the pages say
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


def test_every_public_name_has_an_example_or_is_made_by_one_that_has():
    without = []
    for name in eb.__all__:
        public = getattr(eb, name)
        text = inspect.getdoc(public)
        if not inspect.ismodule(public) and not re.search(r">>>|Made by `", text) and not issubclass(public, Exception):
            without.append(name)
    assert not without
