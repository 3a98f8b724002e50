"""Processes that traced code starts: those that work on the GPU leave no verdict, and all others are left alone."""

import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everybyte as eb
from everybyte import gpus
from everybyte.processes import _Followed, may_work_on_the_gpu
from everybyte.script import Failed, Program

FORK = multiprocessing.get_context("fork")


def on_the_gpu(answers=None):
    made = torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu")
    if answers is not None:
        answers.put(made.sum().item())


def on_the_host(answers=None):
    if answers is not None:
        answers.put(torch.ones(8).sum().item())


def started(work, run, *args):
    process = FORK.Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0
    return run


def test_a_process_that_works_on_the_gpu_is_not_covered_and_named_with_both_lines():
    with eb.trace(rules="cuda", default="cpu") as run:
        answers = FORK.SimpleQueue()
        started(on_the_gpu, run, answers)
        assert isinstance(answers.get(), (int, float))  # who waits for it is not left waiting
    (said,) = run.not_covered
    here = r"\S*test_processes\.py:\d+"
    assert re.fullmatch(f"what the process that is started at {here} does on the GPU, at {here}", said)
    assert not len(run.timeline) and not run.remarks


def test_a_process_that_leaves_the_gpu_alone_is_a_remark():
    with eb.trace(rules="cuda", default="cpu") as run:
        answers = FORK.SimpleQueue()
        for _ in range(2):
            started(on_the_host, run, answers)
            assert answers.get() == 8
    (said,) = run.remarks
    assert re.match(r"\S*test_processes\.py:\d+: another process is started, which asks the GPU for nothing", said)
    assert not run.not_covered


def test_what_the_code_forks_itself_is_followed_and_may_end_itself():
    for work, counted in ((on_the_host, 0), (on_the_gpu, 1)):
        with eb.trace(rules="cuda", default="cpu") as run:
            child = os.fork()
            if child == 0:
                work()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(run.not_covered) == counted


def test_a_process_that_is_killed_while_it_works_on_the_gpu_has_said_so():
    with eb.trace(rules="cuda", default="cpu") as run:
        answers = FORK.SimpleQueue()
        process = FORK.Process(target=lambda: (on_the_gpu(answers), FORK.Event().wait()), daemon=True)
        process.start()
        answers.get()
        process.kill()
        process.join()
    assert run.not_covered


@pytest.mark.parametrize(("work", "counted"), [(on_the_gpu, 2), (on_the_host, 1)])
def test_a_process_that_begins_anew_has_a_trace_of_its_own(work, counted, tmp_path):
    followed = _Followed(work, tmp_path / "notes", gpus.find("t4"))
    pickle.loads(pickle.dumps(followed))()  # as it is sent there
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[0] == "begun" and len(notes) == counted
    assert all("test_processes.py:" in note for note in notes[1:])


PYTHON = sys.executable


@pytest.mark.parametrize(
    "command",
    [
        f"{PYTHON} train.py --lr 1",
        "python3.11 -u train.py",
        "python -W ignore train.py",
        "python indirect.py",
        "python -m train",
        "python -m torch.distributed.run train.py",
        "python there_is_none.py",
        "python -c 'import torch'",
        "python -c '__import__(chr(116))'",
        "python",
        "torchrun --nproc_per_node 2 train.py",
        "accelerate launch train.py",
        "CUDA_VISIBLE_DEVICES=0 nohup python train.py &",
        "cd somewhere && python train.py",
        "mpirun -np 2 python train.py",
        "bash -c 'python train.py'",
        "bash run.sh",
        "./run.sh",
        "env OMP_NUM_THREADS=1 ./run.sh",
        "unclosed 'quote",
    ],
)
def test_a_command_that_may_start_work_on_the_gpu_is_seen_to(command, folder):
    assert may_work_on_the_gpu(command, folder)


@pytest.mark.parametrize(
    "command",
    [
        "git rev-parse HEAD",
        "git commit -m 'python train.py'",
        "nvidia-smi --query-gpu=name --format=csv",
        f"{PYTHON} -m pip install torch",
        "pip install accelerate",
        f"{PYTHON} --version",
        "python -c 'import json; print(json.dumps(3))'",
        "python prepare.py --out data",
        "python through.py",
        "bash harmless.sh",
        "cp train.py elsewhere.py",
        "tar xf data.tar | wc -l",
        "",
    ],
)
def test_a_command_that_leaves_the_gpu_alone_is_let_go(command, folder):
    assert not may_work_on_the_gpu(command, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    for name, text in {
        "train.py": "import torch",
        "indirect.py": "import json\nfrom train import main",
        "prepare.py": "import os, json\nimport numpy as np\nfrom pandas import DataFrame",
        "through.py": "import through, prepare",
        "run.sh": "#!/bin/sh\n# trains\nset -e\npython train.py",
        "harmless.sh": "#!/bin/sh\n# python train.py\ngit pull",
    }.items():
        (folder / name).write_text(text)
    (folder / "run.sh").chmod(0o755)
    return folder


STARTS = """\
import os, subprocess, sys
import torch
torch.ones(8, device="cuda")
{}
"""


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run([sys.executable, 'train.py'], check=True)",
        "os.system('python train.py')",
        "subprocess.Popen('python train.py', shell=True)",
        "subprocess.check_output(['python', os.fsencode('train.py')])",
    ],
)
def test_a_script_that_starts_another_that_may_work_on_the_gpu_gets_no_verdict(call, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "start.py").write_text(STARTS.format(call))
    with pytest.raises(
        Failed, match=r"start\.py:4: a trace sees nothing of what the command 'python\S* train\.py'"
    ) as failed:
        Program(str(tmp_path / "start.py")).trace("t4")
    assert failed.value.cannot_say and failed.value.run.not_covered  # as well where the script catches it


def test_other_commands_run_and_are_remarked(tmp_path):
    call = "assert subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True).stdout == b'3\\n'"
    (tmp_path / "start.py").write_text(STARTS.format(call))
    run = Program(str(tmp_path / "start.py")).trace("t4").run
    (said,) = run.remarks
    name = Path(sys.executable).name
    assert said.endswith(f"start.py:4: {name} is started; what it may take of the GPU is not in these figures")


def test_after_the_trace_processes_are_what_they_were():
    with eb.trace(rules="cuda"):
        pass
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
    assert FORK.Process.start.__qualname__ == "BaseProcess.start" and os.fork.__module__ == "posix"
