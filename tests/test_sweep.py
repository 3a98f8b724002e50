"""Sweeps: what is refused before anything runs, that nothing is lost or run twice whatever is killed, and the table."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybyte.cli import main
from everybyte.sweep import SweepError, cluster, collect, glued, run, worker
from everybyte.sweep.folder import Folder
from everybyte.sweep.grid import Parameter, combinations

PARAMETERS = "batch_size: int = 8  # rows\nrate: float = 0.5\nname: str = 'a'\nquick: bool = True\nlog: str = ''"
BODY = """
import time
from myst_nb import glue
if log:
    open(log, "a").write(f"begin {batch_size}\\n")
time.sleep(0.7)
assert batch_size != 5, "five is unlucky"
glue("bytes", f"{batch_size * 1024:,} B ({batch_size * 1.024:,.3f} KB)", display=False)
glue("half", batch_size / 2, display=False)
glue("text", f"{name} of {batch_size}", display=False)
if log:
    open(log, "a").write(f"end {batch_size}\\n")
"""


def write(path: Path, *cells: str, tag: str = "parameters") -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.cells[0].metadata["tags"] = [tag]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def notebook(tmp_path) -> Path:
    return write(tmp_path / "small.ipynb", PARAMETERS, BODY)


@pytest.fixture
def command(notebook, tmp_path) -> list[str]:
    """Six combinations, one of which fails, on two workers."""
    sweep = [sys.executable, "-m", "everybyte", "sweep", str(notebook), "--out", str(tmp_path / "out")]
    return [*sweep, "-p", "batch_size=1:6", "-p", f"log={tmp_path / 'log'}"]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def results(out: Path) -> int:
    return len(list(out.glob("results/*.json")))


def ended(log: Path) -> Counter[str]:
    return Counter(line for line in log.read_text().splitlines() if line.startswith("end"))


def interruptible() -> None:
    """In a new process: what a shell starts in the background ignores Ctrl-C, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def each_once(log: Path) -> bool:
    return ended(log) == {f"end {size}": 1 for size in (1, 2, 3, 4, 6)}


# -- values ------------------------------------------------------------------------------------------------------------

KNOWN = {
    "batch_size": Parameter("batch_size", int, 8),
    "rate": Parameter("rate", float, 0.5),
    "name": Parameter("name", str, "a"),
    "quick": Parameter("quick", bool, True),
    "sizes": Parameter("sizes", None, None),
}


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("batch_size", "4,8,16", [4, 8, 16]),
        ("batch_size", "50:250:50", [50, 100, 150, 200, 250]),
        ("batch_size", "1:3, 10", [1, 2, 3, 10]),
        ("batch_size", "5:1:-2", [5, 3, 1]),
        ("batch_size", "1:6:2", [1, 3, 5]),
        ("rate", "0.1:0.5:0.1", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("rate", "1,1e-3", [1.0, 0.001]),
        ("name", 'x:y:z,"a,b"', ["x:y:z", "a,b"]),
        ("quick", "true,False", [True, False]),
    ],
)
def test_text_gives_the_values_that_it_reads_as(name, text, values):
    found = KNOWN[name].values(text)
    assert found == values
    assert {type(value) for value in found} == {KNOWN[name].type}


@given(st.integers(-50, 50), st.integers(0, 60), st.integers(1, 9))
def test_a_range_is_every_step_from_its_start_to_its_end_the_end_included(start, length, step):
    stop = start + length
    assert KNOWN["batch_size"].values(f"{start}:{stop}:{step}") == list(range(start, stop + 1, step))
    tenths = KNOWN["rate"].values(f"{start / 10}:{stop / 10}:{step / 10}")
    assert tenths == [float(Fraction(place, 10)) for place in range(start, stop + 1, step)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "the grid is empty"),
        ({"batchsize": "4"}, "did you mean 'batch_size'"),
        ({"batch_size": "four"}, "batch_size takes whole numbers of 64 bits, not 'four'"),
        ({"batch_size": "4.0"}, "batch_size takes whole numbers of 64 bits, not '4.0'"),
        ({"batch_size": [4.0]}, "batch_size takes whole numbers of 64 bits, not 4.0"),
        ({"batch_size": [True]}, "batch_size takes whole numbers of 64 bits, not True"),
        ({"batch_size": "4,,8"}, "batch_size takes whole numbers of 64 bits, not ''"),
        ({"batch_size": ""}, "batch_size gets no value"),
        ({"batch_size": []}, "batch_size gets no value"),
        ({"batch_size": "4:1"}, "holds no value"),
        ({"batch_size": "1:4:0"}, "holds no value"),
        ({"batch_size": "1:2:3:4"}, "not '1:2:3:4'"),
        ({"batch_size": "4,4"}, "gets 4 twice"),
        ({"batch_size": "0:1000000000000"}, "more values than the 100,000"),
        ({"batch_size": "1:1000", "rate": "1:1000"}, "1,000,000 combinations"),
        ({"batch_size": str(2**63)}, "takes whole numbers of 64 bits, not 9223372036854775808"),
        ({"batch_size": "9" * 5000}, "takes whole numbers of 64 bits, not '999"),
        ({"rate": "1:1e-300000000:-1e-300000000"}, "holds no value"),  # read as fractions, they fill the memory
        ({"name": "\udcff"}, r"name takes text, not '\udcff'"),
        ({"name": "a\0"}, r"name takes text, not 'a\x00'"),
        ({"rate": "nan"}, "rate takes numbers, not 'nan'"),
        ({"rate": "1e999"}, "rate takes numbers, not inf"),
        ({"quick": "1"}, "quick takes true or false"),
        ({"name": '"open'}, "cannot be read"),
        ({"sizes": "1"}, "cannot be swept"),
    ],
)
def test_values_that_will_not_do_are_refused_in_one_line(given, why):
    with pytest.raises(SweepError, match=re.escape(why)) as refused:
        combinations(KNOWN, given)
    assert "\n" not in str(refused.value)


def test_zipped_values_go_together_and_a_single_one_goes_with_all():
    both = {"batch_size": "1:3", "rate": "0.1,0.2,0.3", "name": "x"}
    zipped = combinations(KNOWN, both, zipped=True)
    assert [tuple(row.values()) for row in zipped] == [(1, 0.1, "x"), (2, 0.2, "x"), (3, 0.3, "x")]
    assert len(combinations(KNOWN, both)) == 9
    with pytest.raises(SweepError, match="batch_size has 3, rate has 2"):
        combinations(KNOWN, {"batch_size": "1:3", "rate": "1,2"}, zipped=True)


# -- what is refused before anything is written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "tag", "why"),
    [
        ((PARAMETERS, BODY), "other", "no cell tagged 'parameters'"),
        (("print('nothing')",), "parameters", "assigns nothing"),
    ],
)
def test_a_notebook_without_parameters_is_refused(tmp_path, cells, tag, why):
    path = write(tmp_path / "bare.ipynb", *cells, tag=tag)
    with pytest.raises(SweepError, match=why):
        run(path, {"batch_size": [1]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kernel": "no-such"}, "no Jupyter kernel 'no-such'"),
        ({"jobs": 0}, "jobs is 0"),
        ({"jobs": 10**6}, "jobs is 1,000,000: from one to "),
        ({"jobs": 2, "scheduler": "tcp://127.0.0.1:1"}, "workers of its own"),
        ({"scheduler": "nowhere"}, "no scheduler's address"),
        ({"out": "a\0b"}, "cannot be a path here"),
        ({"out": "\udcff"}, "cannot be a path here"),
    ],
)
def test_options_that_will_not_do_are_refused(notebook, tmp_path, options, why):
    with pytest.raises(SweepError, match=why):
        run(notebook, {"batch_size": [1]}, **{"out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", ["GPU=-1", "GPU=nan", "GPU=0", "=1", "GPU=one", "GPU"])
def test_a_resource_that_no_worker_could_offer_is_refused(notebook, asked, capsys):
    assert main(["sweep", str(notebook), "-p", "batch_size=1", "--out", "unused", "--resources", asked]) == 2
    assert f"'{asked}' is no resource: write NAME=N" in capsys.readouterr().err


def test_where_no_scheduler_listens_one_line_says_so_and_nothing_is_left(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(SweepError, match=rf"no Dask scheduler answers at {address}: .*refused"):
            run(notebook, {"batch_size": [1]}, out=tmp_path / "out", scheduler=address)
    with pytest.raises(SweepError, match=r"no Dask scheduler answers at tcp:.*:99999"):
        run(notebook, {"batch_size": [1]}, out=tmp_path / "out", scheduler="tcp://127.0.0.1:99999")
    assert time.monotonic() - start < 8
    assert not (tmp_path / "out").exists()


def test_what_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "text.ipynb").write_text("no notebook")
    (tmp_path / "small.md").write_text("# its source")
    for name, why in (
        ("", "is no notebook"),
        ("text.ipynb", "is no notebook"),
        ("absent.ipynb", "No such file"),
        ("small.md", "an .ipynb"),
    ):
        with pytest.raises(SweepError, match=why):
            run(tmp_path / name, {"batch_size": [1]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_notebook_that_names_no_kernel_or_is_of_an_old_format_is_python_and_one_in_another_language_is_refused(
    notebook, tmp_path
):
    bare = nbformat.read(notebook, as_version=4)
    del bare.metadata["kernelspec"]
    nbformat.write(bare, tmp_path / "bare.ipynb")
    cell = {"cell_type": "code", "input": PARAMETERS, "outputs": [], "language": "python", "collapsed": False}
    cell["metadata"] = {"tags": ["parameters"]}
    sheets = {"worksheets": [{"cells": [cell], "metadata": {}}]}
    (tmp_path / "old.ipynb").write_text(json.dumps({"nbformat": 3, "nbformat_minor": 0, "metadata": {}, **sheets}))
    bare.metadata["language_info"] = {"name": "julia"}
    nbformat.write(bare, tmp_path / "julia.ipynb")
    for name, why in (("bare", "takes whole numbers"), ("old", "takes whole numbers"), ("julia", "is in julia")):
        with pytest.raises(SweepError, match=why):
            run(tmp_path / f"{name}.ipynb", {"batch_size": "x"}, out=tmp_path / "out")


def test_what_a_scheduler_s_workers_do_not_offer_is_said_once_and_so_is_that_it_has_gone():
    from distributed import LocalCluster

    local = {"processes": False, "protocol": "tcp://", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=1, threads_per_worker=1, resources={"CPU": 2}, **local) as there:
        address = there.scheduler_address
        (answer,) = cluster.completed(len, {"one": ("abc",)}, address, 0, {"CPU": 1})
        assert answer == ("one", 3)
        ((_, error),) = cluster.completed(len, {"one": (1,)}, address, 0, {})
        assert isinstance(error, TypeError)
        waiting = cluster.completed(len, {"one": ("abc",)}, address, 0, {"GPU": 1})
        assert next(waiting) == ("", "no worker offers GPU=1 (there: 1 with CPU=2): waiting for one that does")
        assert next(waiting) == ("", "")
        there.close()
        with pytest.raises(SweepError, match="the scheduler has gone away"):
            next(waiting)


def test_a_folder_with_other_things_in_it_or_a_file_is_refused_and_left_alone(notebook, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    outs = {tmp_path / "mine": "holds no sweep", notebook: "is a file", notebook / "x": "Not a directory"}
    for out, why in outs.items():
        with pytest.raises(SweepError, match=why):
            run(notebook, {"batch_size": [1]}, out=out)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def everybyte(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everybyte", "sweep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))  # as a full disk: writing fails with an OSError


def test_where_nothing_can_be_written_one_line_says_so_and_nothing_is_left(notebook, tmp_path):
    full = everybyte(notebook, "-p", "batch_size=1", "--out", tmp_path / "out", preexec_fn=limited)
    assert (full.returncode, full.stdout) == (2, "")
    assert full.stderr.count("\n") == 1
    assert "File too large" in full.stderr
    assert not (tmp_path / "out").exists()


def test_without_permission_one_line_says_so(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("IPYTHONDIR", folder)
        notebook = write(Path(folder) / "small.ipynb", PARAMETERS, BODY)
        with pytest.raises(SweepError, match="jobs is 0"):
            run(notebook, {"batch_size": [1]}, out="unused", jobs=0)  # imports what the next call needs
        (Path(folder) / "theirs").mkdir(mode=0o500)
        user = os.geteuid()
        try:
            os.seteuid(user or 65534)  # root may write anywhere
            with pytest.raises(SweepError, match="Permission denied"):
                run(notebook, {"batch_size": [1]}, out=Path(folder) / "theirs" / "out")
        finally:
            os.seteuid(user)


def test_a_disk_that_is_full_when_a_run_ends_leaves_no_result_and_is_no_failure_of_the_run(
    notebook, tmp_path, monkeypatch
):
    folder = Folder(tmp_path / "out")
    folder.write("notebook.ipynb", notebook.read_bytes())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        worker.execute(str(folder.path), "one", {"batch_size": 1}, "python3", str(tmp_path))
    assert not [path for path in folder.path.rglob("*") if path.parent.name in ("results", "notebooks")]


# -- what is glued -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "column"),
    [
        (["1,085,880,728 B (1.086 GB, 1.011 GiB)", "512 B", None], "Int64", [1_085_880_728, 512, None]),
        (["2,048", 7, "-3"], "Int64", [2048, 7, -3]),
        (["2,048", "0.5"], "Float64", [2048.0, 0.5]),
        ([1, 2.5, "1,234.5", "1e3"], "Float64", [1.0, 2.5, 1234.5, 1000.0]),
        ([True, False], "boolean", [True, False]),
        ([True, 2], "string", ["True", "2"]),
        (["4 to 16", "8"], "string", ["4 to 16", "8"]),
        (["007", "12,34", "1_000"], "string", ["007", "12,34", "1_000"]),
        ([2**63, 1], "Float64", [float(2**63), 1.0]),
        ([10**400, 1], "string", [str(10**400), "1"]),
    ],
)
def test_a_column_has_the_first_type_that_takes_all_its_values(values, dtype, column):
    found = glued.column(values)
    assert str(found.dtype) == dtype
    assert [None if value is pd.NA else value for value in found] == column


def test_glued_values_are_read_from_each_kind_of_record():
    def display(data: dict, **metadata: object) -> nbformat.NotebookNode:
        return nbformat.v4.new_output("display_data", data=data, metadata=metadata)

    def record(name: str, text: str) -> nbformat.NotebookNode:
        return display({"application/papermill.record/text/plain": text}, scrapbook={"name": name})

    scrap = {"name": "scrap", "data": 5, "encoder": "json", "version": 1}
    cell = nbformat.v4.new_code_cell("")
    cell.outputs = [
        record("text", "'4 to 16'"),
        record("integer", "np.int64(7)"),
        record("twice", "1"),
        record("twice", "2"),
        record("object", "<Thing>"),
        record("yes", "np.True_"),
        record("half", r"'\ud800'"),
        display({"text/plain": "<Figure>", "image/png": "…"}, scrapbook={"name": "figure"}),
        display({"text/plain": "'no record'"}),
        display({"application/scrapbook.scrap.json+json": scrap}, scrapbook={"name": "scrap"}),
        display({"application/papermill.record+json": {"old": 0.5}}),
    ]
    found = glued.glued(nbformat.v4.new_notebook(cells=[cell]))
    texts = {"text": "4 to 16", "object": "<Thing>", "half": r"\ud800"}
    assert found == texts | {"integer": 7, "yes": True, "twice": 2, "scrap": 5, "old": 0.5}


# -- runs --------------------------------------------------------------------------------------------------------------


def test_killed_and_run_again_nothing_is_lost_or_finished_twice_and_what_failed_or_is_damaged_is_known(
    command, notebook, tmp_path
):
    out, log = tmp_path / "out", tmp_path / "log"
    command += ["--jobs", "2"]

    coordinator = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: results(out) >= 2)
    coordinator.kill()
    coordinator.wait()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")}

    again = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = log.read_text().count("begin")
    wait_for(lambda: log.read_text().count("begin") > begun)
    (child,) = subprocess.run(
        ["pgrep", "-n", "-P", str(again.pid), "-f", "spawn_main"], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(child), signal.SIGKILL)
    _, errors = again.communicate(timeout=90)

    assert again.returncode == 1
    assert "1 of 6 failed, such as batch_size=5" in errors
    assert f"[{len(kept)}/6] 6 combinations, {6 - len(kept)} to run" in errors
    assert re.search(r"\[5/6\] batch_size=\d.*; about \d+ s left\n", errors)
    assert "Traceback" not in errors
    assert each_once(log)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock", "notebook.ipynb", "notebooks", "results", "results.parquet", "sweep.json"
    ]  # fmt: skip

    table = pd.read_parquet(out / "results.parquet")
    assert table.dtypes[["batch_size", "rate", "name", "quick"]].astype(str).tolist() == [
        "int64", "float64", "string", "bool"
    ]  # fmt: skip
    assert table["batch_size"].tolist() == [1, 2, 3, 4, 5, 6]
    assert table["run.error"].dropna().tolist() == ["AssertionError: five is unlucky (cell 3)"]
    good = table[table["run.status"] == "done"].set_index("batch_size")
    assert good["bytes"].to_dict() == {size: 1024 * size for size in (1, 2, 3, 4, 6)}
    assert good["half"].to_dict() == {size: size / 2 for size in (1, 2, 3, 4, 6)}
    assert good["text"].to_dict() == {size: f"a of {size}" for size in (1, 2, 3, 4, 6)}
    for path in table["run.notebook"]:
        nbformat.validate(nbformat.read(out / path, as_version=4))

    # A damaged result and a lost notebook run again and no other, beside what failed and what is new.
    with pytest.raises(SweepError, match="holds another sweep, of 6 combinations without batch_size=7"):
        run(notebook, {"batch_size": "1:7", "log": [str(log)]}, out=out)
    first, second, *_ = table["run.notebook"]
    spoilt = out / "results" / f"{Path(first).stem}.json"
    spoilt.write_text(spoilt.read_text().replace('"status": "done"', '"status": "gone"'))
    (out / second).unlink()
    sizes = {"batch_size": "1:7", "log": [str(log)]}
    mended = run(notebook, sizes, out=out, jobs=2, append=True, retry_failed=True)
    assert sorted(mended.damaged) == sorted([f"results/{spoilt.name} is damaged", f"{second} is missing"])
    assert (mended.combinations, mended.ran, list(mended.errors)) == (7, 4, [f"batch_size=5, log={log}"])
    assert ended(log) == {"end 1": 2, "end 2": 2, "end 3": 1, "end 4": 1, "end 6": 1, "end 7": 1}
    assert collect(out)["batch_size"].tolist() == [1, 2, 3, 4, 5, 6, 7]

    # Another notebook under the same name.
    write(notebook, PARAMETERS, BODY + "1")
    with pytest.raises(SweepError, match="holds a sweep of the notebook's code as it was before"):
        run(notebook, {"batch_size": "7", "log": [str(log)]}, out=out, append=True)


def test_ctrl_c_stores_what_is_finished_and_the_same_command_goes_on(command, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    script = tmp_path / "script.py"  # of a user's, who has no `if __name__ == "__main__"` in it
    script.write_text("import sys\nfrom everybyte.cli import main\nsys.exit(main(sys.argv[1:]))")
    command = [sys.executable, str(script), *command[3:], "--jobs", "1"]
    group = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=interruptible
    )
    wait_for(lambda: results(out) >= 1)
    os.killpg(group.pid, signal.SIGINT)  # as a terminal does: to all that it started
    _, errors = group.communicate(timeout=60)
    assert group.returncode == 130
    assert errors.splitlines()[-1].startswith("everybyte: interrupted: ")
    assert "Traceback" not in errors
    assert len(pd.read_parquet(out / "results.parquet")) == results(out) < 6
    assert set(ended(log).values()) <= {1}
    with (
        Folder(out).claimed(),
        pytest.raises(SweepError, match="in use by a sweep that runs now"),
        Folder(out).claimed(),
    ):
        pass


def test_on_a_scheduler_of_its_own_a_worker_that_is_killed_is_survived(command, tmp_path):
    out, log, address = tmp_path / "out", tmp_path / "log", tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = subprocess.Popen([*dask, "scheduler", *local, "--port", "0", "--scheduler-file", address], **quiet)
    serving = ["--scheduler-file", address, "--nthreads", "1", "--no-nanny", "--resources", "GPU=1"]
    workers = [subprocess.Popen([*dask, "worker", *serving, *local], **quiet) for _ in range(2)]
    try:
        wait_for(address.exists)
        at = json.loads(address.read_text())["address"]
        asked = [*command[:-3], "batch_size=1:4", *command[-2:]]
        asked += ["--scheduler", at, "--resources", "GPU=1", "--json"]
        sweep = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: results(out) >= 2)
        workers[0].kill()
        answer, errors = sweep.communicate(timeout=90)
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()
    assert sweep.returncode == 0, errors
    assert json.loads(answer) | {"done": 4, "ran": 4, "failed": 0} == json.loads(answer)
    assert ended(log) == {f"end {size}": 1 for size in (1, 2, 3, 4)}
    assert len(pd.read_parquet(out / "results.parquet")) == 4


def test_where_another_cluster_has_dask_s_port_a_sweep_says_nothing_of_it(recwarn):
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", 8787))
            other.listen()
        except OSError as error:  # it has it already
            assert error.errno == errno.EADDRINUSE
        with cluster._connected(None, 1, {}) as client:
            assert client.submit(int, "7").result() == 7
    assert not [str(warning.message) for warning in recwarn if "8787" in str(warning.message)]
