"""What reads a message or a file works where torch is older than a trace needs, or not there at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from streams import timeline

import everybyte

# None in sys.modules makes an import fail as if the package were not there.
HIDDEN = """
import sys
from importlib import metadata

sys.modules["torch"] = None
version = metadata.version

def hidden(name):
    if name != "torch":
        return version(name)
    if not {torch!r}:
        raise metadata.PackageNotFoundError(name)
    return {torch!r}

metadata.version = hidden
"""


def run(*arguments, torch=None, code="from everybyte.cli import main; sys.exit(main(sys.argv[1:]))"):
    command = [sys.executable, "-c", HIDDEN.format(torch=torch) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("torch", [None, "2.1.2"])
def test_a_snapshot_is_explained(tmp_path, torch):
    path = tmp_path / "snapshot.pickle"
    timeline(4096, 8192, "-0").to_snapshot(path)
    done = run("snapshot", path, torch=torch)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12,288 B" in done.stdout


@pytest.mark.parametrize("torch, why", [(None, "none is installed"), ("2.1.2", "not 2.1.2")])
def test_a_command_that_needs_torch_says_so_in_one_line(torch, why):
    done = run("trace", "train.py:build", torch=torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("everybyte: everybyte trace needs torch 2.11 or later")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    helped = run("--help", torch=torch)
    assert helped.returncode == 0
    assert "trace" in helped.stdout and "snapshot" in helped.stdout


def test_the_names_that_need_no_torch_are_there_without_it():
    done = run(code="import everybyte as eb; print(eb.format_bytes(4096), eb.Timeline, eb.gpus.find('t4').total)")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_name_of_the_package_is_what_its_module_has_whatever_was_imported_first():
    code = "import everybyte.trace, everybyte.saved, everybyte.measure; import everybyte as eb\n"
    code += "print(*(callable(getattr(eb, name)) for name in ('trace', 'saved', 'measure', 'leaks')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True True True True\n", "")
    for name in everybyte.__all__:
        assert getattr(everybyte, name) is not None
    assert set(everybyte.__all__) <= set(dir(everybyte))
    with pytest.raises(AttributeError, match="no attribute 'trance'"):
        _ = everybyte.trance
