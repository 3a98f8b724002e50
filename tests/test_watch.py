"""Watching a GPU while a program runs: it ends as it would have, and what it leaves says where memory went.

No GPU is here: what PyTorch says of one is faked at its boundary, and the histories are recordings.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_run import MESSAGE, RecordedGPU
from streams import timeline
from test_page import check

from everybyte import plain_pickle, watch
from everybyte.allocator import Allocator
from everybyte.cli import main
from everybyte.timeline import Recorder
from everybyte.units import MiB
from everybyte.watch import Watch, when_imported

TESTS = Path(__file__).parent
FILES = {f"{kind}.{suffix}" for kind in ("out-of-memory", "end") for suffix in ("pickle", "html", "txt", "json")}


@pytest.fixture
def ran_out(tmp_path):
    """A recording of a card of 100 MiB that could not give 30 MiB more, asked for in train.py, line 4."""
    path = tmp_path / "recording.pickle"
    timeline(30 * MiB, 60 * MiB, 30 * MiB).to_snapshot(path, Allocator(total=100 * MiB))
    data, _ = plain_pickle.load(path)
    for entry in data["device_traces"][0]:
        entry["frames"] = [{"name": "forward", "filename": "train.py", "line": 4}]
    path.write_bytes(pickle.dumps(data, 4))
    return path


@pytest.fixture
def watching(monkeypatch, ran_out, tmp_path):
    """A fake GPU and a watch that has begun on it."""

    def watching(recording=ran_out, initialized=True, **how):
        gpu = RecordedGPU(monkeypatch, recording, initialized)
        made.append(Watch(tmp_path / "out", **how))
        made[-1].begin()
        return gpu, made[-1]

    made = []
    yield watching
    for watched in made:
        atexit.unregister(watched._at_exit)


def written(watched):
    return {path.name for path in watched.folder.iterdir()}


def answer_of(watched, kind):
    answer = json.loads((watched.folder / f"{kind}.json").read_text())
    check(answer, "snapshot")
    return answer


# -- what a watch asks of PyTorch and writes ---------------------------------------------------------------------------


def test_the_history_is_bounded_has_stacks_of_python_and_begins_when_cuda_does(watching):
    gpu, watched = watching(initialized=False, events=1234)
    assert gpu.log == []
    assert watched.finish() == ["the program did not use a GPU: there is nothing to report"]
    assert written(watched) == set()
    gpu.initialize()
    assert gpu.log == [("history", "all", ("context", "alloc"), ("max_entries", 1234), ("stacks", "python"))]


def test_a_run_that_ends_leaves_a_snapshot_and_its_reports(watching):
    gpu, watched = watching()
    gpu.peak, gpu.reserved = 90 * MiB, 92 * MiB
    (line,) = watched.finish(script="train.py", arguments=["--lr", "1"])
    end = watched.folder / "end.html"
    assert line == f"out of memory, demand: 31.5 MB asked for by train.py:4, 94.4 MB of 105 MB allocated: {end}"
    assert written(watched) == {name for name in FILES if name.startswith("end.")}
    answer = answer_of(watched, "end")
    assert answer["run"] | {"seconds": 0} == {
        "script": "train.py",
        "arguments": ["--lr", "1"],
        "ended": "without an error",
        "failures": 0,
        "most_events": watch.EVENTS,
        "whole": True,
        "torch": torch.__version__,
        "gpus": [
            {"name": "NVIDIA RTX A4000", "total": 16 * 10**9, "peak_allocated": 90 * MiB, "peak_reserved": 92 * MiB}
        ],
        "seconds": 0,
    }
    assert answer["run"]["seconds"] > 0
    assert watched.finish() == []


def test_running_out_leaves_the_snapshot_of_that_moment_and_says_who_asked(watching):
    gpu, watched = watching()
    gpu.fail()
    assert written(watched) == {"out-of-memory.pickle"}  # at once: who knows what comes
    (line,) = watched.finish(torch.cuda.OutOfMemoryError(MESSAGE))
    assert line.startswith("out of memory, demand: 31.5 MB asked for by train.py:4")
    assert line.endswith(f": {watched.folder / 'out-of-memory.html'}")
    assert written(watched) == {name for name in FILES if name.startswith("out-of-memory.")}
    answer = answer_of(watched, "out-of-memory")
    (failed,) = answer["out_of_memory"]
    assert (failed["requested"], failed["line"], failed["cause"]) == (30 * MiB, "train.py:4", "demand")
    assert answer["run"]["ended"] == f"OutOfMemoryError: {MESSAGE}"
    text = (watched.folder / "out-of-memory.txt").read_text()
    assert "asked for by forward at train.py:4, but" in text
    assert "ran out of memory" in (watched.folder / "out-of-memory.html").read_text()


def test_in_a_notebook_a_cell_that_runs_out_of_memory_is_reported_as_it_ends(watching, monkeypatch):
    cells = []
    shell = SimpleNamespace(events=SimpleNamespace(register=lambda event, call: cells.append((event, call))))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    gpu, watched = watching()
    ((event, call),) = cells
    assert event == "post_run_cell"
    for harmless in (None, NameError("a slip")):
        call(SimpleNamespace(error_in_exec=harmless))
    assert written(watched) == set()
    gpu.fail()
    call(SimpleNamespace(error_in_exec=torch.cuda.OutOfMemoryError(MESSAGE)))
    assert written(watched) == {name for name in FILES if name.startswith("out-of-memory.")}


def test_of_several_gpus_the_one_that_ran_out_is_reported(watching, tmp_path):
    recorder = Recorder()
    for device, sizes in {"cuda:0": [MiB] * 9, "cuda:1": [30 * MiB, 60 * MiB, 30 * MiB]}.items():
        for size in sizes:
            recorder.alloc(size, device=device)
    path = tmp_path / "two.pickle"
    recorder.finish({}).to_snapshot(path, Allocator(total=100 * MiB))
    gpu, watched = watching(path)
    gpu.fail(device=1)
    watched.finish()
    assert (answer_of(watched, "out-of-memory")["device"], answer_of(watched, "end")["device"]) == (1, 0)


def test_a_failure_that_the_program_catches_is_reported_beside_the_end(watching):
    gpu, watched = watching()
    gpu.fail()
    assert len(watched.finish()) == 2
    assert written(watched) == FILES
    assert answer_of(watched, "end")["run"]["failures"] == 1


def test_a_program_that_lives_with_failures_is_not_held_up(watching):
    gpu, watched = watching()
    for _ in range(100):
        gpu.fail()
    assert watched.failures == 100
    assert gpu.snapshots == 1, "one is made each time, though the last took a while"


def test_what_fails_in_watching_is_said_and_nothing_else_is_lost(watching, monkeypatch):
    gpu, watched = watching()
    gpu.fail()

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    report, trouble = watched.finish()
    assert report.startswith("out of memory, demand")
    assert trouble == "watching met RuntimeError: an illegal memory access was encountered"


def test_a_pytorch_that_keeps_no_such_history_is_a_trouble_and_no_error(monkeypatch, ran_out, tmp_path):
    gpu = RecordedGPU(monkeypatch, ran_out)

    def older(enabled, record_context=True, trace_alloc_max_entries=1):  # PyTorch 2.0
        raise AssertionError

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", older)
    watched = Watch(tmp_path / "out")
    watched.begin()
    assert watched.troubles[0].startswith("watching met TypeError")
    assert gpu.observers == []
    watched.finish()


def test_files_of_an_earlier_watch_are_removed_and_no_others(tmp_path):
    for name in ("out-of-memory.html", "mine.txt"):
        (tmp_path / name).write_text("")
    Watch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt"}


def test_a_forked_child_writes_nothing(watching, monkeypatch):
    gpu, watched = watching()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    gpu.fail()
    assert watched.finish() == []
    assert written(watched) == set()
    monkeypatch.undo()
    watched.finish()


def test_a_recorded_run_is_reported_with_its_recorded_peak(watching, snapshots):
    _, watched = watching(snapshots / "attention-small.pickle", events=97)
    watched.finish()
    answer = answer_of(watched, "end")
    assert answer["recorded"]["peak_allocated"] == 3_249_144_832  # the folder's README
    assert answer["run"]["whole"] is False  # as many as are kept: earlier ones may be lost


def test_a_package_is_noticed_when_it_is_imported_and_not_imported_for_it(tmp_path, monkeypatch):
    (tmp_path / "a_toolkit.py").write_text("made = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    when_imported("a_toolkit", lambda: calls.append(sys.modules["a_toolkit"].made))
    assert "a_toolkit" not in sys.modules
    import a_toolkit

    assert calls == [a_toolkit.made]
    when_imported("a_toolkit", lambda: calls.append(1))
    assert calls == [a_toolkit.made, 1]
    del sys.modules["a_toolkit"]


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "its last line": "print('out'); import sys; print('err', file=sys.stderr)",
    "what it sees": "import sys\nprint(__name__, __file__, sys.argv, sys.path[0])\n"
    "print(vars(sys.modules['__main__']) is globals(), __builtins__ is sys.modules['builtins'])",
    "an exit code": "import sys; sys.exit(3)",
    "an exit": "import sys; sys.exit()",
    "a message": "import sys; sys.exit('no data')",
    "an error": "def f():\n    return 1 / 0\n"
    "try:\n    f()\nexcept ZeroDivisionError as error:\n    raise ValueError('half\\nway') from error\n",
    "a library's error": "import json\njson.loads('{')\n",
    "a syntax error": "def f(:\n",
    "a hook of its own": "import sys\nsys.excepthook = lambda *what: print('mine', what[0])\n1 / 0\n",
    "an interrupt": "raise KeyboardInterrupt\n",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n",
    "at exit": "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nraise SystemExit(4)\n",
    "a future": "from __future__ import annotations\ndef f(x: nothing): return f.__annotations__\nprint(f(1))\n",
    "a pickle": "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))).__module__)\n",
}
ALONE = "import sys; from everybyte import watch; watch.unavailable = lambda: None; "
ALONE += "from everybyte.cli import main; sys.exit(main(['run', *sys.argv[1:]]))"


@pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_ends_and_prints_as_it_does_without_us(tmp_path, source):
    (tmp_path / "train.py").write_text(source)

    def ended(*before):
        command = [sys.executable, *before, "train.py", "--json", "--out", "x"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    code, out, err = ended()
    ours = ended("-c", ALONE, "--out", "reports")
    said = "" if code == -signal.SIGTERM else "everybyte: the program did not use a GPU: there is nothing to report\n"
    if "SystemExit" in source or "sys.exit" in source:  # the interpreter writes its message last
        assert ours == (code, out, said + err)
    else:
        assert ours == (code, out, err + said)


@pytest.mark.parametrize("name", ["pkg.train", "pkg", "pkg.broken", "pkg.fails"])
def test_a_module_runs_as_python_s_own_m_runs_it(tmp_path, name):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("value = 7\n")
    seen = "print(__name__, __package__, __file__, __spec__.name, sys.argv, sys.path[0])"
    (tmp_path / "pkg" / "train.py").write_text(f"import sys\nfrom . import value\n{seen}\nsys.exit(value)\n")
    (tmp_path / "pkg" / "__main__.py").write_text(f"import sys\n{seen}\n")
    (tmp_path / "pkg" / "broken.py").write_text("def f(:\n")
    (tmp_path / "pkg" / "fails.py").write_text("import not_there\n")
    options = ["-m", name, "--json", "--out", "x", "-m", "y"]
    python, ours = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for command in (
            [sys.executable, *options],
            [sys.executable, "-c", ALONE, "--out", "reports", *options],
        )
    )
    assert (ours.returncode, ours.stdout) == (python.returncode, python.stdout)
    assert ours.stderr.splitlines()[-2:-1] == python.stderr.splitlines()[-1:]


def test_a_module_that_is_not_there_is_refused_in_one_line(tmp_path):
    command = [sys.executable, "-c", ALONE, "-m", "not_there.train"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "No module named 'not_there'" in done.stderr


def test_a_script_that_runs_out_of_memory_leaves_a_report_and_its_own_traceback(tmp_path, ran_out):
    (tmp_path / "train.py").write_text("import torch\n\ndef step():\n    torch.zeros(8, device='cuda')\n\nstep()\n")
    command = [sys.executable, TESTS / "fake_run.py", ran_out, "--out", "reports", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "as_main" not in done.stderr
    assert MESSAGE in done.stderr
    assert last.startswith("everybyte: out of memory, demand: 31.5 MB asked for by train.py:4")
    assert last.endswith(f": {tmp_path / 'reports' / 'out-of-memory.html'}")
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {n for n in FILES if n.startswith("out")}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built with CUDA")
def test_without_a_gpu_it_says_so_in_one_line_and_runs_nothing(tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    assert main(["run", "--out", str(tmp_path / "reports"), str(tmp_path / "train.py")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"everybyte: this PyTorch, {torch.__version__}, is built without CUDA: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "reports").exists()


def test_bad_input_is_refused_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "unavailable", lambda: None)
    (tmp_path / "file").write_text("")
    for args, why in (
        ([tmp_path / "missing.py"], "there is no file"),
        (["--events", "0", tmp_path / "file"], "a positive whole number"),
        (["--out", tmp_path / "file", tmp_path / "file"], "cannot be written"),
    ):
        assert main(["run", *map(str, args)]) == 2
        assert why in capsys.readouterr().err


def test_starting_loads_nothing_that_reads_the_environment_before_the_script_does():
    heavy = "{'torch', 'numpy', 'pandas', 'pyarrow'}"
    code = f"import sys, everybyte.cli, everybyte.commands.run; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"
