"""The command line: what it answers, what it refuses in one line, and that no file can make it do anything else."""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from streams import timeline

from everybyte import plain_pickle
from everybyte.allocator import Allocator
from everybyte.cli import main
from everybyte.timeline import Recorder, Timeline
from everybyte.units import MiB

TRACE = ("trace", "--quick")  # without the trials, of which `test_trials` knows


@pytest.fixture
def run(capsys):
    """A function from arguments to exit code, stdout and stderr."""

    def run(*args):
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def answer(run):
    """A function from arguments to the JSON of a run that went well."""

    def answer(*args):
        code, out, err = run(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return answer


def refused(result, why, code=2):
    assert result[0] == code
    assert result[1] == ""
    assert result[2].startswith("everybyte: ")
    assert result[2].count("\n") == 1
    assert result[2].endswith("\n")
    assert why in result[2]


@pytest.fixture
def written(tmp_path):
    """A function that writes events as a snapshot, changes what was written, and returns the file."""

    def written(*events, total=None, change=lambda data: None):
        path = tmp_path / "snapshot.pickle"
        timeline(*events).to_snapshot(path, Allocator(total=total))
        data, _ = plain_pickle.load(path)
        change(data)
        path.write_bytes(pickle.dumps(data, 4))
        return path

    return written


# -- trace: what it answers --------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"

def build():
    print("building on", device)
    model = nn.Linear(256, 128, bias=False, device=device)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.zeros(64, 256, device=device)
    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def alone():
    build()()

def large():
    return lambda kept=torch.empty(20 * 10**9, dtype=torch.uint8): None

def hoards():
    kept = []
    return lambda: kept.append(torch.empty(2**20, dtype=torch.uint8))

def hoards_little():
    kept = []
    return lambda: kept.append(torch.empty(64, dtype=torch.uint8))

def between():
    return lambda kept=torch.empty(16_756_244_480 - 220_000_000, dtype=torch.uint8): None

def scattered():
    return lambda kept=[torch.empty(6 * 2**20, dtype=torch.uint8) for _ in range(2600)]: None

def fails():
    torch.zeros(3, 4) @ torch.zeros(5, 6)

def fails_in_a_library():
    import json
    json.loads("{")

def leaves():
    raise SystemExit("no data")

def unwritten():
    raise NotImplementedError("the user's own\\nmessage")

def lstm():
    layer = nn.LSTM(8, 8)
    return lambda: layer(torch.zeros(2, 3, 8))[0].sum().backward()

def solves():
    return lambda: torch.linalg.svd(torch.randn(8, 8))

def transforms():
    return lambda: torch.fft.rfft(torch.randn(8, 8))

def branches():
    weight = torch.randn(8)
    return lambda: weight.mul_(2) if weight.sum().item() > 0 else None

def shaped():
    return lambda: torch.randn(8).nonzero()

def compiled():
    model = torch.compile(nn.Linear(8, 8))
    return lambda: model(torch.zeros(2, 8))

def on_host():
    return lambda: torch.zeros(8, device="cpu")

def model():
    return nn.Linear(8, 8)

def takes(argument):
    pass

number = 3
"""


def at(code):
    """The place of a piece of the script."""
    return f"training_script.py:{SCRIPT[: SCRIPT.index(code)].count(chr(10)) + 1}"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training_script.py").write_text(SCRIPT)
    yield "training_script"
    sys.modules.pop("training_script", None)


def test_a_step_is_traced_to_the_byte_and_told_by_module_op_and_category(script, run):
    code, out, err = run(*TRACE, f"{script}:build", "--gpu", "a4000", "--json")
    assert (code, err) == (0, "building on cuda\n")
    found = json.loads(out)
    weight, inputs, outputs = 4 * 256 * 128, 4 * 64 * 256, 4 * 64 * 128
    # In backward: weight and input, the loss and its gradient of 4 B, the weight's gradient, and the gradient of the
    # output, which a sum gives expanded and the product wants whole.
    assert found["peak_requested"] == 2 * weight + inputs + outputs + 8
    assert found["peak_rounded"] == 2 * weight + inputs + outputs + 2 * 512
    # Beside the tensors, of which no request is rounded to more: a workspace of cuBLAS for forward and for backward.
    taken = [(workspace["thread"], workspace["nbytes"]) for workspace in found["workspaces"]]
    assert taken == [("forward", 8_519_680), ("backward", 8_519_680)]
    assert found["peak_allocated"] == found["peak_rounded"] + 2 * 8_519_680
    assert found["peak_reserved"] == (2 + 20) * MiB
    assert (found["verdict"], found["steps"], found["gpu"]["key"]) == ("fits", 3, "a4000")
    rows = {row["category"]: row["bytes"] for row in found["by_category"]}
    assert rows["parameter"] == rows["gradient"] == weight
    for key in ("category", "module", "op"):
        assert sum(row["bytes"] for row in found[f"by_{key}"]) == found["peak_requested"]
    text = run(*TRACE, f"{script}:build", "--gpu", "a4000")[1]
    assert text.startswith(f"{script}:build on NVIDIA RTX A4000, the first 3 steps: fits\n")
    assert "131,072 B (131.072 KB, 128.000 KiB)   36.4%        1 ×  parameter" in text
    assert text.count("8,519,680 B (8.520 MB, 8.125 MiB): cuBLAS's workspace") == 2


def test_the_timeline_is_written_for_pytorchs_viewer_and_as_a_table(script, run, answer):
    code, *_ = run(*TRACE, f"{script}:build", "--steps", 2, "--snapshot", "t.pickle", "--parquet", "t.parquet")
    assert code == 0
    t = Timeline.from_parquet("t.parquet")
    assert t.info["steps"] == 2
    assert answer("snapshot", "t.pickle")["recorded"]["peak_requested"] == t.peak_bytes + 2 * 8_519_680
    assert run(*TRACE, f"{script}:build", "--figure", "t.svg")[0] == 0
    assert "peak" in (drawing := Path("t.svg").read_text()) and "<svg" in drawing
    refused(run(*TRACE, f"{script}:build", "--figure", "t.txt"), "let it end in .png, .svg or .pdf")
    refused(run(*TRACE, f"{script}:build", "--parquet", "no/t.parquet"), "cannot be written: there is no folder no")
    refused(run(*TRACE, f"{script}:build", "--snapshot", "."), "cannot be written: it is a folder")


def test_what_each_step_leaves_behind_makes_no_yes_for_a_longer_run(script, run):
    code, out, err = run("trace", f"{script}:hoards", "--quick", "--gpu", "a4000")
    assert code == 3 and "left" in out
    more = (16_756_244_480 - 235_929_600 - 2 * 2**21) // 2**20  # three of a mebibyte lie in two small segments
    assert f"each step leaves 1,048,576 B (1.049 MB, 1.000 MiB) behind, and about {more:,} more fill the GPU" in err
    assert run("trace", f"{script}:hoards_little", "--quick", "--gpu", "a4000")[0] == 0
    assert run("trace", f"{script}:hoards", "--quick", "--gpu", "a4000", "--steps", "2")[0] == 0


def test_a_file_is_traced_as_a_module_is_and_a_function_may_run_everything_itself(script, run):
    code, out, _ = run(*TRACE, f"{script}.py:alone", "--steps", 7, "--json")
    found = json.loads(out)
    assert (code, found["steps"], found["assumed"], found["gpu"]["key"]) == (0, 0, True, "a100-80gb")
    assert found["peak_requested"] == 4 * (2 * 256 * 128 + 64 * 256 + 64 * 128) + 8
    assert found["remarks"][0] == f"--steps 7 was not used: {script}.py:alone returned no step to repeat"


def test_after_a_script_come_its_own_arguments_and_after_a_function_more_options(script, run):
    Path("alone.py").write_text(
        "import sys, torch\n"
        "if __name__ == '__main__':\n"
        "    x = torch.zeros(len(sys.argv), device='cuda')\n"
        "    print(torch.cuda.get_device_name(), sys.argv[1:])\n"
    )
    code, out, err = run(*TRACE, "--gpu", "t4", "--json", "alone.py", "--json", "--gpu", "none", "x:y")
    found = json.loads(out)
    assert (code, found["peak_requested"], found["ended"]) == (0, 4 * 5, "the script's end")
    assert err == "Tesla T4 ['--json', '--gpu', 'none', 'x:y']\n"
    assert (found["function"], found["arguments"]) == ("alone.py", ["--json", "--gpu", "none", "x:y"])
    for stray in (["--gpu", "t4", "x"], ["x", "--gpu", "t4"], ["--gpu", "t4", "alone.py"]):
        refused(run(*TRACE, f"{script}:build", *stray), "unrecognized arguments: ")


def test_a_module_is_traced_in_the_place_of_a_script_with_its_own_arguments(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_module.py").write_text("import sys, torch\nx = torch.ones(int(sys.argv[2]), device='cuda')\n")
    code, out, err = run(*TRACE, "--gpu", "t4", "--json", "-m", "a_module", "--gpu", "1000", "-m")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["function"], found["arguments"]) == ("-m a_module", ["--gpu", "1000", "-m"])
    assert (found["peak_requested"], found["peak"]["line"]) == (4000, "a_module.py:2")
    refused(run(*TRACE, "-m"), "-m needs the name of a module")
    refused(run(*TRACE, "-m", "not_there"), "No module named not_there: run in the folder")


def test_what_is_larger_than_the_gpu_does_not_fit_and_what_would_help_is_said(script, run):
    code, out, err = run(*TRACE, f"{script}:large", "--gpu", "a4000", "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["out_of_memory"]["cause"]) == (1, "does not fit", "demand")
    assert found["peak_allocated"] >= found["peak_requested"] == 20 * 10**9
    place = at("return lambda kept=torch.empty(20 * 10**9")
    asked = f"20,000,000,000 B (20.000 GB, 18.626 GiB) asked for by empty at {place}, but 0 B"
    assert err.splitlines()[-1].startswith(f"everybyte: does not fit on NVIDIA RTX A4000: out of memory: {asked}")
    assert run(*TRACE, f"{script}:large", "--gpu", "a100-80gb")[0] == 0


def test_what_fits_only_in_segments_that_grow_is_told_the_setting(script, run):
    # Three of 6 MiB share a segment of 20: 2,600 need 867 of them, 17,340 MiB; one that grows takes 15,600 of 15,755.
    code, out, err = run(*TRACE, f"{script}:scattered", "--gpu", "a4000", "--steps", 1, "--json")
    found = json.loads(out)
    assert (code, found["out_of_memory"]["cause"], found["peak_reserved"]) == (1, "fragmentation", 867 * 20 * MiB)
    assert err.endswith("with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits\n")


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("between", "it does if the CUDA context takes 203,423,744 B"),
        ("lstm", "no rule covers cuDNN's LSTM"),
        ("solves", "no rule covers _linalg_svd by cuSOLVER"),
        ("transforms", "no rule covers _fft_r2c by cuFFT"),
        ("branches", f"at {at('weight.mul_')} a value that no trace knows decides the way"),
    ],
)
def test_a_figure_that_is_not_certain_makes_no_verdict(script, run, function, why):
    code, out, err = run(*TRACE, f"{script}:{function}", "--gpu", "a4000", "--json")
    assert (code, json.loads(out)["verdict"]) == (3, "cannot say")
    assert err.splitlines()[-1].startswith("everybyte: cannot say whether it fits")
    assert why in err.splitlines()[-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("shaped", f"{at('nonzero')}: the result of nonzero depends on values"),
        ("compiled", "torch.compile is not covered"),
    ],
)
def test_what_cannot_be_traced_is_no_error_of_the_user(script, run, function, why):
    refused(run(*TRACE, f"{script}:{function}"), why, code=3)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("training_script:fails", f"{at('@ torch')}: RuntimeError: "),
        ("training_script:fails_in_a_library", "JSONDecodeError: Expecting property name"),
        ("training_script:leaves", f"{at('raise SystemExit')}: SystemExit: no data"),
        ("training_script:unwritten", f"{at('raise Not')}: NotImplementedError: the user's own\\nmessage"),
        ("training_script:takes", "everybyte: takes() missing 1 required positional argument"),
        ("training_script:number", "everybyte: 'int' object is not callable"),
        ("lazy.py:cancelled", "lazy.py:3: CancelledError: by hand"),
        ("training_script:on_host", "put nothing on the GPU: does it ask for device='cpu'?"),
        ("training_script:bild", "training_script has no function bild; did you mean build?"),
        ("training_script:main", "no function main; what runs as __main__ is traced as a script: everybyte trace"),
        ("needs_data.py:build", "needs_data.py:2: the code ended itself with exit code 2; it gets no arguments"),
        ("lazy.py:build", "the step of lazy.py:build is a generator or a coroutine, of which nothing has run"),
        ("lazy.py:steps", "lazy.py:steps is a generator or a coroutine, of which nothing has run"),
        (".:build", "there is no module .: run in its folder"),
        ("training_script", "write script.py ARGS, -m MODULE ARGS, MODULE:FUNCTION or file.py:FUNCTION"),
        ("missing.py", "there is no file missing.py"),
        ("training_skript:build", "there is no module training_skript: run in its folder"),
        ("missing.py:build", "there is no file missing.py"),
        ("needs_more.py:build", "needs_more.py:1: ModuleNotFoundError: No module named 'not_there'"),
        ("broken.py:build", "broken.py:2: SyntaxError: "),
    ],
)
def test_an_error_of_the_users_code_is_one_line_with_its_place(script, run, target, why):
    Path("needs_more.py").write_text("import not_there\n")
    Path("broken.py").write_text("x = 1\ndef build(:\n")
    Path("needs_data.py").write_text("import argparse\nargparse.ArgumentParser().error('no data given')\n")
    Path("lazy.py").write_text(
        "async def steps(): pass\ndef build(): return steps\n"
        "def cancelled(): import asyncio; raise asyncio.CancelledError('by hand')\n"
    )
    code, out, err = run(*TRACE, target)
    refused((code, out, err.splitlines(keepends=True)[-1]), why)


def test_a_script_may_end_itself_and_whatever_it_prints_spoils_no_answer(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys, torch\n"
        "def main():\n"
        "    kept = torch.zeros(1000, device='cuda')\n"
        "    print('printed'); os.write(1, b'written'); os.system('echo spoken')\n"
        "    sys.exit(0)\n"
    )
    command = [sys.executable, "-m", "everybyte", "trace", "--quick", "script.py:main", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, json.loads(done.stdout)["peak_requested"]) == (0, 4000)
    assert all(said in done.stderr for said in ("printed", "written", "spoken"))


def test_an_error_behind_a_branch_that_nobody_knows_is_no_error_of_the_user(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(
        "import torch\n"
        "def train():\n"
        "    left = [] if torch.randn(4).sum() > 0 else [1]\n"
        "    left.remove(1)\n    left.remove(1)\n"
    )
    refused(run(*TRACE, f"{path}:train"), "ValueError: list.remove(x): x not in list The trace took a branch", code=3)


def test_no_program_is_overwritten_and_what_cannot_be_written_is_said(script, run, tmp_path):
    program = tmp_path / "other.py"
    program.write_text("x = 1")
    refused(run(*TRACE, f"{script}:build", "--snapshot", program), "other.py cannot be written: it is a program")
    assert program.read_text() == "x = 1"
    twice = ("--snapshot", tmp_path / "out", "--parquet", tmp_path / "out")
    refused(run(*TRACE, f"{script}:build", *twice), "both name")
    full = Path("/dev/full")
    if full.exists():
        for option in ("--snapshot", "--parquet"):
            code, _, err = run(*TRACE, f"{script}:build", option, full)
            assert (code, err.splitlines()[-1]) == (2, f"everybyte: {full} cannot be written: No space left on device")
        assert full.is_char_device()


def test_files_are_written_where_the_command_was_called_wherever_the_code_goes(tmp_path, monkeypatch, run):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "script.py").write_text("import os, torch\ndef f(): os.chdir('elsewhere'); torch.zeros(4)\n")
    monkeypatch.chdir(tmp_path)
    assert run(*TRACE, "script.py:f", "--parquet", "out.parquet")[0] == 0
    assert Timeline.from_parquet(tmp_path / "out.parquet").peak_bytes == 16
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("nbytes", "output", "code"),
    [
        (2**40, "closed pipe", 1),  # it does not fit, whether or not all of the reasons are read
        (2**10, "closed pipe", 0),
        (2**10, "/dev/full", 2),
    ],
)
def test_an_answer_that_cannot_all_be_written_keeps_its_exit_code_or_says_so(tmp_path, nbytes, output, code):
    (tmp_path / "script.py").write_text(f"import torch\ndef f(): torch.empty({nbytes}, dtype=torch.uint8)\n")
    reader, writer = os.pipe()
    os.close(reader)
    if output == "/dev/full":
        os.close(writer)
        if not Path(output).exists():
            pytest.skip("no /dev/full here")
        writer = os.open(output, os.O_WRONLY)
    command = [sys.executable, "-m", "everybyte", "trace", "--quick", "script.py:f", "--gpu", "t4", "--json"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == (code != 0)
    assert code != 2 or done.stderr == "everybyte: the answer cannot be written: No space left on device\n"


def test_the_whole_error_is_shown_if_asked_for_and_options_are_checked_first(script, run):
    code, out, err = run(*TRACE, f"{script}:fails", "--traceback")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    refused(run(*TRACE, f"{script}:build", "--gpu", "a400"), "gpu='a400' is not in the table; it has")
    refused(run(*TRACE, f"{script}:build", "--gpu", ""), "gpu='' is not in the table; it has")
    refused(run(*TRACE, f"{script}:build", "--steps", "0"), "the number of steps is a positive whole number, not '0'")


# -- snapshot: what it answers -----------------------------------------------------------------------------------------

PEAKS = {"peak_allocated", "peak_rounded", "peak_requested", "peak_reserved", "segment_events"}


def test_the_json_holds_the_peaks_recorded_and_modelled_each_under_its_own_name(written, answer):
    found = answer("snapshot", written(f"a={19 * MiB}", 300, 3 * MiB, "-a"))
    # 19 MiB take a segment of 20, whose last MiB is too small to be split off; 300 B round to 512; 3 MiB are of 20.
    expected = {
        "peak_allocated": 20 * MiB + 512 + 3 * MiB,
        "peak_rounded": 19 * MiB + 512 + 3 * MiB,
        "peak_requested": 19 * MiB + 300 + 3 * MiB,
        "peak_reserved": 42 * MiB,
        "segment_events": 3,
    }
    assert found["recorded"] == found["modelled"] == expected
    assert (found["allocations"], found["address_mismatches"], found["schema"]) == (3, 0, 1)
    assert found["fragmentation"] == {
        "event": 5,  # segment_alloc and alloc, three times
        "reserved": 42 * MiB,
        "requested": 22 * MiB + 300,
        "rounding": 212,
        "unsplit": MiB,
        "inactive_split": 19 * MiB - 512,
        "releasable": 0,
    }


def test_the_peak_is_told_by_function_and_line_and_what_has_no_stack_by_size(tmp_path, answer, run):
    recorder = Recorder()
    for nbytes, op, line in ((4096, "mul", "net.py:3"), (1024, "", ""), (8192, "mul", "net.py:3"), (1024, "", "")):
        recorder.alloc(nbytes, op=op, line=line, device="cuda:0")
    path = tmp_path / "snapshot.pickle"
    recorder.finish({}).to_snapshot(path)
    data, _ = plain_pickle.load(path)
    for entry in data["device_traces"][0]:
        if entry.get("size") == 1024:
            del entry["frames"]
    path.write_bytes(pickle.dumps(data))
    assert answer("snapshot", path)["live_at_peak"] == [
        {"op": "mul", "line": "net.py:3", "own": "net.py:3", "bytes": 12_288, "allocations": 2},
        {"op": "", "line": "", "own": "", "bytes": 2_048, "allocations": 2},
    ]
    text = run("snapshot", path)[1]
    assert "12,288 B (12.288 KB, 12.000 KiB)   85.7%        2 ×  net.py:3 mul" in text
    assert "2 ×  no stack recorded, 1,024 B each" in text


def test_a_workspace_that_was_taken_before_the_stacks_were_recorded_is_named_by_its_size(tmp_path, run):
    path = tmp_path / "snapshot.pickle"
    recorder = Recorder()
    for nbytes in (8_519_680, 8_519_680, 32 * MiB):  # the last may be any tensor
        recorder.alloc(nbytes, device="cuda:0")
    recorder.finish({}).to_snapshot(path)
    data, _ = plain_pickle.load(path)
    for entry in data["device_traces"][0]:
        entry.pop("frames", None)
    path.write_bytes(pickle.dumps(data))
    text = run("snapshot", path)[1]
    assert "2 ×  no stack recorded, 8,519,680 B each, the size of cuBLAS's workspace\n" in text
    assert "1 ×  no stack recorded, 33,554,432 B each\n" in text


def test_other_settings_are_replayed_each_beside_the_recordings_own(written, answer, run):
    path = written(*[15 * MiB] * 4)  # segments of 16 MiB each, or three pages of 20
    found = answer("snapshot", path, "--what-if", "expandable_segments=1", "--what-if", "roundup_power2_divisions:2")
    assert found["recorded"]["peak_reserved"] == found["replayed"]["peak_reserved"] == 64 * MiB
    growing, rounding = found["what_if"]
    assert growing["settings"] == {"expandable_segments": True}
    assert growing["peak_reserved"] == 60 * MiB
    assert (rounding["peak_allocated"], rounding["peak_reserved"]) == (64 * MiB, 64 * MiB)  # 15 MiB become 16
    assert answer("snapshot", path)["what_if"][0]["settings"] == {"expandable_segments": True}
    small = answer("snapshot", path, "--what-if", "total=50MiB,max_split_size_mb=32")["what_if"][0]
    assert (small["out_of_memory"]["event"], small["out_of_memory"]["cause"]) == (3, "demand")
    assert "expandable_segments=True: 62,914,560 B (62.915 MB, 60.000 MiB) reserved" in run("snapshot", path)[1]


def test_divisions_are_read_as_pytorch_writes_them(written, answer):
    text = "roundup_power2_divisions:[1:4,>:8],garbage_collection_threshold:0.8"
    found = answer("snapshot", written(512), "--what-if", text)["what_if"][0]["settings"]
    assert found == {"roundup_power2_divisions": {"1": 4, ">": 8}, "garbage_collection_threshold": 0.8}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("expandable=1", "no setting 'expandable'; there are expandable_segments, max_split_size_mb"),
        ("expandable_segments=maybe", "expandable_segments cannot be 'maybe'"),
        ("max_split_size_mb=5", "max_split_size_mb must be at least 20, not 5"),
        ("max_split_size_mb", "max_split_size_mb cannot be ''"),
        ("total=0B", "total must be positive"),
        ("total=many", "'many' is not a size"),
        ("roundup_power2_divisions=[1:3]", "must be a power of two"),
        ("roundup_power2_divisions=[1", "roundup_power2_divisions cannot be"),
        ("per_process_memory_fraction=0.5", "say total as well"),
        ("garbage_collection_threshold=nan", "lies between 0 and 1"),
        ("", "no setting ''"),
    ],
)
def test_a_setting_that_pytorch_would_refuse_is_refused_by_name(written, run, setting, why):
    refused(run("snapshot", written(512), "--what-if", setting), why)


def test_a_request_that_failed_is_explained_as_demand_fragmentation_or_a_limit_of_the_process(written, answer, run):
    crowded = written(f"a={30 * MiB}", 40 * MiB, total=64 * MiB)
    (failure,) = answer("snapshot", crowded)["out_of_memory"]
    assert (failure["cause"], failure["requested"], failure["free"]) == ("demand", 40 * MiB, 34 * MiB)
    path = written(f"a={12 * MiB}", f"b={8 * MiB}", "-a", 30 * MiB, total=40 * MiB)  # segments of 12 and of 20
    (failure,) = answer("snapshot", path)["out_of_memory"]
    assert failure["cause"] == "fragmentation"  # 8 MiB are live; the 12 are given back, the 20 cannot be
    assert (failure["free"], failure["largest_free"]) == (20 * MiB, 12 * MiB)
    assert "fragmentation" in run("snapshot", path)[1]

    def driver_has_more(data):
        data["device_traces"][0][-1]["device_free"] = 70 * MiB

    path = written(f"a={30 * MiB}", 40 * MiB, total=64 * MiB, change=driver_has_more)
    (failure,) = answer("snapshot", path)["out_of_memory"]
    assert failure["cause"] == "limit"
    assert "a limit of the process" in run("snapshot", path)[1]


def test_of_several_gpus_the_one_with_events_is_chosen_and_any_can_be(written, answer, run):
    def second_gpu(data):
        others = [dict(segment, device=1) for segment in data["segments"]]
        data["segments"] += others
        data["device_traces"] = [[], data["device_traces"][0]]

    path = written(3 * MiB, 512, change=second_gpu)
    found = answer("snapshot", path)
    assert (found["device"], found["devices"], found["allocations"]) == (1, [0, 1], 2)
    assert answer("snapshot", path, "--device", 0)["allocations"] == 0
    assert answer("snapshot", path, "--device", 0)["recorded"]["peak_allocated"] == 3 * MiB + 512
    assert "It also holds GPU 0: choose with --device." in run("snapshot", path)[1]
    refused(run("snapshot", path, "--device", 7), "no device 7; the recording has 0, 1")


def test_a_file_of_one_event_without_settings_and_times_is_explained(written, answer):
    def old(data):
        del data["allocator_settings"]
        data["device_traces"][0] = [
            {key: data["device_traces"][0][-1][key] for key in ("action", "addr", "size", "stream")}
        ]

    found = answer("snapshot", written(3 * MiB, 512, change=old))
    assert (found["events"], found["allocations"], found["address_mismatches"]) == (1, 1, 0)
    assert found["recorded"]["peak_requested"] == 3 * MiB + 512
    assert sum(row["bytes"] for row in found["live_at_peak"]) == 3 * MiB + 512


def test_a_file_without_any_memory_is_a_run_of_nothing(tmp_path, answer, run):
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    found = answer("snapshot", path)
    assert found["recorded"] == dict.fromkeys(PEAKS, 0)
    assert (found["device"], found["live_at_peak"]) == (None, [])
    assert run("snapshot", path)[0] == 0


@pytest.mark.parametrize(
    "name",
    [
        "attention-small",
        "lm-2.7b-ctx128-forward-fp32",
        "lm-2.7b-ctx128-train-fp32",
        "lm-medium-ctx128-inference",
        "lm-medium-ctx128-train-fp32",
        "lm-medium-ctx1024-train-amp",
    ],
)
def test_recordings_are_explained_to_the_byte(snapshots, answer, name):
    found = answer("snapshot", snapshots / f"{name}.pickle")
    assert found["recorded"] == found["modelled"]
    assert (found["address_mismatches"], found["segment_mismatches"], found["reserved_mismatches"]) == (0, 0, 0)
    assert sum(row["bytes"] for row in found["live_at_peak"]) == found["recorded"]["peak_requested"]
    fragmentation = found["fragmentation"]
    assert fragmentation["reserved"] == found["recorded"]["peak_reserved"]
    parts = ("requested", "rounding", "unsplit", "inactive_split", "releasable")
    assert sum(fragmentation[part] for part in parts) == fragmentation["reserved"]
    assert all(fragmentation[part] >= 0 for part in parts)


# -- snapshot: what it refuses -----------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def files(folder):
    whole = pickle.dumps({"segments": [], "device_traces": [[]]}, 4)
    return {
        "bomb": pickle.dumps({"segments": Bomb(folder / "ran")}, 4),
        "old bomb": pickle.dumps({"segments": Bomb(folder / "ran")}, 0),
        "cut short": whole[:-5],
        "a billion entries": b"\x80\x04}r" + struct.pack("<I", 10**9) + b".",
        "a billion characters": b"\x80\x04\x8d" + struct.pack("<Q", 10**9) + b"x.",
        "empty": b"",
        "no snapshot": pickle.dumps({"weights": [1.0, 2.0]}),
        "gzip": gzip.compress(whole),
        "json": b'{"segments": [], "device_traces": []}',
        "zip": b"PK\x03\x04" + bytes(100),
    }


@pytest.mark.parametrize("name", files(Path()))
def test_what_is_no_snapshot_is_refused_in_one_line_at_once_and_runs_nothing(tmp_path, run, name):
    path = tmp_path / "x.pickle"
    path.write_bytes(files(tmp_path)[name])
    for form in ((), ("--json",)):
        started = time.perf_counter()
        refused(run("snapshot", path, *form), f"{path} is not a ")
        assert time.perf_counter() - started < 1
    assert not (tmp_path / "ran").exists()


def test_a_folder_a_device_and_a_missing_file_are_refused(tmp_path, run):
    refused(run("snapshot", tmp_path), "is a folder, a device or a pipe")
    refused(run("snapshot", "/dev/zero"), "is a folder, a device or a pipe")
    refused(run("snapshot", tmp_path / "missing"), "No such file or directory")
    refused(run("snapshot", "a\0b"), "null")
    refused(run("snapshot"), "the following arguments are required: FILE; everybyte snapshot --help")
    refused(run("snap"), "everybyte --help")


def test_stacks_and_names_that_are_shared_without_end_cost_no_more_than_the_file(written, answer):
    def shared(data):
        event, frames = data["device_traces"][0][-1], [{"name": "n" * 10**6, "filename": "f" * 10**6, "line": 1}]
        stack = frames * 20_000
        rest = [{**event, "action": action, "frames": stack} for action in ("free_requested", "free_completed")]
        data["device_traces"][0] += [*rest, dict(event, frames=stack)] * 2_000

    started = time.perf_counter()
    found = answer("snapshot", written(512, change=shared))
    assert time.perf_counter() - started < 20  # looking at every frame of every entry would take a quarter of an hour
    assert found["allocations"] == 2_001
    assert len(json.dumps(found)) < 10_000


HOSTILE = {
    "escapes": "\x1b[2J\x1b]0;owned\x07",
    "breaks": "a\nb\r\tc",
    "backwards": "\u202egnp.exe",
    "half": "\ud800",
    "wide": "é中",
    "huge": "x" * 10**6,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_in_a_file_cannot_break_the_terminal_or_the_json(written, answer, run, name):
    def rename(data):
        for entry in data["device_traces"][0]:
            entry["frames"] = [{"name": name, "filename": name + ".py", "line": 10**30}, {"name": 3, "filename": None}]

    path = written(512, change=rename)
    code, out, err = run("snapshot", path)
    assert (code, err) == (0, "")
    assert all(character.isprintable() for line in out.split("\n") for character in line)
    assert max(map(len, out.split("\n"))) < 400
    assert 0 < len(answer("snapshot", path)["live_at_peak"][0]["op"]) <= 500


def test_the_console_script_writes_to_any_terminal(written):
    def rename(data):
        for entry in data["device_traces"][0]:
            entry["frames"] = [{"name": "é中", "filename": "net.py", "line": 1}]

    path = written(512, change=rename)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "everybyte", "snapshot", str(path)]
    process = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, b"")
    assert rb"net.py:1 \xe9\u4e2d" in process.stdout
