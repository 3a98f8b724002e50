"""The workflow files for a fork: each as the published schema has it, running commands that this project has."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
each = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path) -> dict:
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="needs pip install check-jsonschema")
@each
def test_a_workflow_is_as_the_published_schema_has_it(path):
    command = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_a_workflow_runs_commands_that_are_there(path):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    steps = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    for step in steps:
        program, *arguments = step.split()
        assert program.startswith(".venv/bin/") or (ROOT / program).exists() or set(arguments) <= targets, step
    assert steps


@each
def test_a_workflow_installs_the_cpu_build_without_a_variable_set(path):
    installing = [
        job for job in jobs(path).values() if any("setup-python" in step.get("uses", "") for step in job["steps"])
    ]
    assert installing
    for job in installing:
        assert re.search(r"vars\.\w+ \|\| 'https://\S+/cpu'", job["env"]["PIP_EXTRA_INDEX_URL"])


def test_one_workflow_publishes_the_book_and_it_alone_may():
    may = {path.stem for path in WORKFLOWS if "pages" in yaml.safe_load(path.read_text())["permissions"]}
    assert may == {"pages"}
    build, publish = jobs(ROOT / ".github" / "workflows" / "pages.yml").values()
    assert build["steps"][-1]["with"]["path"] == "_build/html"
    assert publish["needs"] == "build"
