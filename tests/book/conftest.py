"""The book as the tests see it: its pairs, one run of all notebooks, and the rendered pages. Each is made once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from press import BOOK, Run


@dataclass(frozen=True)
class Execution:
    """One run of all notebooks, and the digest of each file under `notebooks/` before and after it."""

    runs: list[Run]
    before: dict[str, str]
    after: dict[str, str]


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def execution() -> Execution:
    """All notebooks executed by papermill with their default parameters, as `make book` does."""
    before = digests(BOOK.notebooks)
    runs = BOOK.execute()
    return Execution(runs, before, digests(BOOK.notebooks))


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The pages rendered from the stored outputs; rendering fails on any warning."""
    return BOOK.render(html=tmp_path_factory.mktemp("stored") / "html").parent
