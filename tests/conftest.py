"""What all tests share: how hard property tests look, and where recorded runs are found."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# `make test` looks at the same 200 cases each time; `--hypothesis-profile=deep` at 5,000 new ones.
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("deep", max_examples=5_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


LONGEST = ("test_runs.py", "test_random_networks.py")  # begin with these, so that no worker ends alone with one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what times itself, so that nothing runs beside it, and puts the longest files first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if "execution" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def snapshots() -> Path:
    """The folder of memory snapshots recorded on real GPUs; a test that needs it is skipped where there is none."""
    folder = Path(os.environ.get("EVERYBYTE_SNAPSHOTS", ROOT.parent / "shared" / "snapshots"))
    if not folder.is_dir():
        pytest.skip(f"no recorded GPU runs in {folder}: set EVERYBYTE_SNAPSHOTS to a folder that holds some")
    return folder
