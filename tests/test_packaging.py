"""The library stands alone: its wheel holds nothing else, asks for five packages, and imports without the book's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import BytesParser
from importlib.metadata import version

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from everybyte.audit import packaged

LIBRARY = {"torch", "numpy", "pandas", "pyarrow", "sympy"}


def pins(*files: str) -> dict[str, str]:
    text = "\n".join((ROOT / file).read_text() for file in files)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE))


PINS = pins("requirements.txt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    # From a copy: setuptools builds beside the sources, and would find there what an earlier build left.
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder, folder]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=folder)
    (path,) = folder.glob("everybyte-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_installs_the_package_and_nothing_beside_it(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"everybyte"}


def test_the_wheel_carries_every_module_and_the_look_of_figures_and_pages(wheel):
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "everybyte").rglob("*.py")}
    assert sources <= set(wheel.namelist())
    data = ("book.mplstyle", "page.css", "answer.schema.json", "messages.toml")
    assert {f"everybyte/{name}" for name in data} <= set(wheel.namelist())


def test_the_wheel_installs_the_command(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("dist-info/entry_points.txt"))
    assert b"everybyte = everybyte.cli:main" in wheel.read(entry_points)


def test_the_wheel_carries_the_ledgers_that_the_audit_reads(wheel):
    assert {f"everybyte/claims/{path.name}" for path in packaged()} <= set(wheel.namelist())


def test_the_wheel_asks_for_five_packages(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
    asked = BytesParser().parsebytes(wheel.read(metadata)).get_all("Requires-Dist")
    plain = {Requirement(line).name for line in asked if "extra ==" not in line}
    assert plain == LIBRARY


def test_the_library_imports_without_the_books_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {Requirement(line).name for lines in project["optional-dependencies"].values() for line in lines}
    modules = {{"TA-Lib": "talib", "beautifulsoup4": "bs4"}.get(name, name.replace("-", "_")) for name in extras}
    # None in sys.modules makes an import fail as if the package were not there.
    script = f"import sys; sys.modules.update(dict.fromkeys({sorted(modules)!r})); from everybyte import *"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_pin_lies_in_the_range_the_project_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pinned = pins("requirements.txt", "benchmarks/requirements.txt")
    for requirement in map(Requirement, lines):
        assert requirement.name in pinned, f"{requirement.name} is pinned nowhere"
        assert requirement.specifier.contains(pinned[requirement.name], prereleases=True), requirement


def test_what_is_installed_is_what_is_pinned():
    installed = {name: version(name).partition("+")[0] for name in PINS}
    assert installed == PINS, "run `make setup`, or pip install -r requirements.txt"
