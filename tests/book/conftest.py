"""The book as the tests see it: its pairs, one run of all notebooks, and the rendered pages. Each is made once."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
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
    """The pages rendered from the stored outputs, once for all workers; rendering fails on any warning."""
    base = tmp_path_factory.getbasetemp()
    html = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stored" / "html"
    with FileLock(html.parent.with_suffix(".lock")):
        return html if html.is_dir() else BOOK.render(html=html).parent
