"""The book as the tests see it: its pairs, one run of all notebooks, and the rendered pages. Each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from press import BOOK, Run


@pytest.fixture(scope="session")
def runs() -> list[Run]:
    """All notebooks executed by papermill with their default parameters, as `make book` does."""
    return BOOK.execute()


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The pages rendered from the stored outputs; rendering fails on any warning."""
    return BOOK.render(html=tmp_path_factory.mktemp("stored") / "html").parent
