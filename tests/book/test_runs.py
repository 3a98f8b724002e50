"""Every notebook runs, in time, with its own parameters and with others; wrong ones stop it before any work."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import nbformat
import papermill
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from press import BOOK, execute

from everybyte.parameters import INJECTED, ParameterError

PARAMETERISED = [path for path in BOOK.executed() if papermill.inspect_notebook(str(path))]
CASES = tomllib.loads(Path(__file__).with_name("other_parameters.toml").read_text())

# What the book promises on two cores, and the allowance for a machine that is busy with something else.
SECONDS_A_NOTEBOOK, SECONDS_IN_ALL, ALLOWANCE = 30, 360, 1.5

parameterised = pytest.mark.parametrize("notebook", PARAMETERISED, ids=lambda path: path.stem)


def test_the_kernel_is_the_environments_own():
    folder = Path(KernelSpecManager().get_kernel_spec("python3").resource_dir)
    assert folder.is_relative_to(Path(sysconfig.get_path("data"))), f"{folder} belongs to another Python"


def test_every_notebook_keeps_the_promised_time(execution):
    runs = execution.runs
    assert [run.notebook for run in runs] == [path.stem for path in BOOK.executed()]
    slow = {run.notebook: run.seconds for run in runs if run.seconds > SECONDS_A_NOTEBOOK * ALLOWANCE}
    assert not slow, "over what they promise"
    assert sum(run.seconds for run in runs) <= SECONDS_IN_ALL * ALLOWANCE


def test_executing_writes_nothing_beside_the_notebooks(execution):
    assert execution.after == execution.before


def test_the_pages_render_from_a_fresh_run_too(execution, tmp_path):
    assert BOOK.render(executed=True, html=tmp_path / "html").exists()


def test_every_parameterised_notebook_has_other_and_wrong_parameters_listed():
    assert set(CASES) == {path.stem for path in PARAMETERISED}
    for name, case in CASES.items():
        defaults = papermill.inspect_notebook(str(BOOK.notebooks / f"{name}.ipynb"))
        assert set(case["other"]) <= set(defaults)
        assert case["other"], name
        assert set(case["wrong"]) <= set(defaults)
        assert case["wrong"], name
        same = [key for key, value in case["other"].items() if ast.literal_eval(defaults[key]["default"]) == value]
        assert not same, f"{name}: {same} are the defaults"


@parameterised
def test_the_cell_after_the_parameters_checks_all_of_them(notebook):
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    (place,) = (i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    launch = sum("launch" in cell.metadata.get("tags", []) for cell in cells)  # in a fork that can be launched
    assert place == launch, "the parameters are the first code cell"
    tree = ast.parse(cells[place + 1].source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"]
    assert len(calls) == 1, "the second code cell calls check(globals(), ...)"
    checked = {keyword.arg for keyword in calls[0].keywords}
    assert checked == set(papermill.inspect_notebook(str(notebook)))


@parameterised
def test_other_parameters_run_through(notebook, tmp_path):
    execute(notebook, tmp_path / notebook.name, cwd=BOOK.notebooks, parameters=CASES[notebook.stem]["other"])


def wrong_values(path: Path) -> list[tuple[Path, str, object]]:
    return [(path, name, value) for name, values in CASES[path.stem]["wrong"].items() for value in values]


def cases(chosen: list[tuple[Path, str, object]]) -> pytest.MarkDecorator:
    named = [pytest.param(*case, id=f"{case[0].stem}-{case[1]}-{case[2]}") for case in chosen]
    return pytest.mark.parametrize(("notebook", "name", "value"), named)


@cases([case for path in PARAMETERISED for case in [(path, "no_such_parameter", 3), *wrong_values(path)]])
def test_the_check_refuses_every_wrong_parameter(notebook, name, value):
    defaults, check = [c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"][:2]
    injected = f"{INJECTED}{name} = {value!r}\n"
    namespace = {"In": [defaults, injected]}
    exec(defaults + "\n" + injected, namespace)
    with pytest.raises(ParameterError, match=name):
        exec(check, namespace)


# One run of each notebook: with a name that it does not have, or with a wrong value, by turns.
@cases([wrong_values(path)[0] if n % 2 else (path, "no_such_parameter", 3) for n, path in enumerate(PARAMETERISED)])
def test_a_wrong_parameter_stops_papermill_before_any_work_and_the_last_line_says_why(notebook, name, value, tmp_path):
    output = tmp_path / notebook.name
    command = ["papermill", "--cwd", str(BOOK.notebooks), "-p", name, str(value), str(notebook), str(output)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("ParameterError: ")
    assert name in last
    assert str(value) in last or name == "no_such_parameter"
    executed = [cell for cell in nbformat.read(output, as_version=4).cells if cell.get("execution_count")]
    # papermill's own notice apart: the defaults, the injected values, the check.
    assert len([cell for cell in executed if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]) == 3
