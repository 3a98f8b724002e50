"""A program traced again with other sizes and edits: the largest batch that fits, and what each lever really saves."""

import json
from concurrent.futures import BrokenExecutor
from dataclasses import replace

import pytest
from in_order import InOrder

import everybyte as eb
from everybyte import changes, trials
from everybyte.cli import main
from everybyte.largest import largest
from everybyte.script import Program
from everybyte.trials import Trial, Trials, tried
from everybyte.units import MiB

TRAIN = """\
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--seq-len", type=int, default=8)
parser.add_argument("--checkpoint", action="store_true")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            if args.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.mean()

model = Net().to(device)
adam = torch.optim.Adam(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.zeros(1500, args.seq_len, 64)), batch_size=args.batch_size):
    loss = model(x.to(device))
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
GPU = replace(eb.gpus.find("a4000"), total=160 * MiB, context=(16 * MiB, 16 * MiB))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("trials") / "train.py"
    path.write_text(TRAIN)
    return str(path)


@pytest.fixture(scope="module")
def advice(script):
    program = Program(script, ("--seq-len", "8"), steps=2)
    plain = tried(program, GPU)
    with Trials(program, GPU) as trying:
        return plain, trying.advice(plain)


def test_the_largest_batch_fits_and_one_more_does_not(script, advice):
    plain, found = advice
    batch = found.largest["batch_size"]
    assert (plain.batch_size, plain.samples, batch.now) == (512, 1500, 512)
    for size, fits in ((batch.size, True), (batch.size + 1, False)):
        trial = tried(Program(script, ("--batch-size", str(size)), steps=2), GPU)
        assert trial.fits is fits
        assert trial.nbytes == (batch.nbytes if fits else batch.next_nbytes)


def test_the_longest_sequence_fits_and_one_more_does_not(script, advice):
    longest = advice[1].largest["sequence"]
    assert longest.now == 8
    trial = [tried(Program(script, ("--seq-len", str(longest.size + more)), steps=2), GPU) for more in (0, 1)]
    assert [each.fits for each in trial] == [True, False]


def test_a_lever_saves_what_the_edit_written_in_saves(script, advice):
    plain, found = advice
    pulled = {each.lever.name: each.trial for each in found.levers}
    for name, arguments in {
        "half the batch, two microbatches a step": ("--batch-size", "256"),
        "checkpoints round the repeated blocks": ("--checkpoint",),
    }.items():
        written = tried(Program(script, arguments, steps=2), GPU)
        assert pulled[name].nbytes == written.nbytes < plain.nbytes
    assert [*pulled.values()] == sorted(pulled.values(), key=lambda trial: trial.nbytes)
    assert all(trial.nbytes < plain.nbytes for trial in pulled.values())


def test_a_program_that_fails_at_another_size_does_not_fit_there(tmp_path):
    path = tmp_path / "limited.py"
    path.write_text(TRAIN + "assert args.batch_size < 600\n")
    trial = tried(Program(str(path), ("--batch-size", "700"), steps=50), GPU)
    assert not trial.fits
    assert (trial.word, trial.nbytes) == ("cannot say", 0)
    assert "AssertionError" in trial.why


def test_on_the_host_the_largest_batch_holds_a_limit_that_a_real_run_meets(script):
    limit = 50 * MiB

    def peak(how, size):
        loaders = changes.loader_batches(512, size)
        ran = getattr(Program(script, steps=2), how)(changes=[loaders], **({"rules": "cpu"} if how == "trace" else {}))
        return ran.run.timeline.without("scratch").peak_bytes

    found = largest(lambda size: Trial("fits" if (at := peak("trace", size)) <= limit else "no", at), 512, limit, 700)
    assert peak("measure", found.size) == found.nbytes <= limit
    assert peak("measure", found.size + 1) == found.next_nbytes > limit


@pytest.fixture
def in_order(monkeypatch):
    """Trials come one after another, in this process, and pull no lever."""
    monkeypatch.setattr(trials.Trials, "trial", lambda self, program, edits=(): tried(program, self._gpu, edits))
    monkeypatch.setattr(trials.Trials, "__enter__", lambda self: self)
    monkeypatch.setattr(trials.Trials, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(trials, "ThreadPoolExecutor", InOrder)
    return monkeypatch


def test_the_command_says_what_fits_and_what_to_write(script, capsys, in_order):
    assert main(["trace", "--gpu", "3050ti", "--steps", "2", "--json", script, "--batch-size", "1000"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "batch_size" not in answer["largest"] or answer["largest"]["batch_size"]["fits"] <= 1500
    assert "sequence" not in answer["largest"]
    first = answer["levers"][0]
    assert first["saves"] == answer["peak_reserved"] - first["peak_reserved"] > 0
    assert first["edit"]["torch"]


def test_a_trial_that_dies_leaves_the_verdict(script, capsys, in_order):
    def killed(self, plain):
        raise BrokenExecutor

    in_order.setattr(trials.Trials, "advice", killed)
    assert main(["trace", "--gpu", "3050ti", "--steps", "1", "--json", script]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["largest"], answer["levers"]) == ("fits", {}, [])
    assert any("a trial's process was killed" in remark for remark in answer["remarks"])


LOADING = """\
import sys
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

batch = int(sys.argv[2]) if len(sys.argv) > 2 else 8
data = TensorDataset(torch.zeros(20, 2**20))
model = torch.nn.Linear(2**20, 1).cuda()
sgd = torch.optim.SGD(model.parameters())
for (x,) in {loader}:
    model(x.cuda()).mean().backward()
    sgd.step()
"""


class Theirs:
    """A sampler of batches that keeps its own size."""

    text = "type('Theirs', (), {'batch_size': 8, '__iter__': lambda self: iter([[*range(8)]])})()"


@pytest.mark.parametrize(
    ("loader", "arguments", "fits"),
    [
        ("DataLoader(data, batch)", (), 14),
        ("DataLoader(data, batch)", ("--batch-size", "8"), 14),
        ("DataLoader(data, batch_sampler=BatchSampler(range(20), batch, False))", (), 14),
        (f"DataLoader(data, batch_sampler={Theirs.text})", (), None),
        ("DataLoader(data, 8)", ("--batch-size", "8"), None),  # nobody reads the argument
        ("DataLoader(data, 4)", ("--batch-size", "8"), None),
        ("DataLoader([torch.zeros(8, 2**20)], batch_size=None)", (), None),
        ("[(torch.zeros(batch, 2**20),)]", ("--batch-size", "8"), 14),
        ("DataLoader(torch.utils.data.Subset(data, range(12)), batch, drop_last=True)", ("--batch-size", "8"), 12),
        ("DataLoader(data, 7, drop_last=True) if batch == 8 else [][:0]", ("--batch-size", "8"), 8),
    ],
)
def test_a_batch_is_the_largest_only_if_the_program_reads_it(loader, arguments, fits, tmp_path, in_order):
    path = tmp_path / "loading.py"
    path.write_text(LOADING.replace("{loader}", loader))
    in_order.setattr(trials, "LEVERS", ())
    program = Program(str(path), arguments, steps=2)
    plain = tried(program, GPU)
    of_eight = tried(Program(str(path), ("--batch-size", "8"), steps=2), GPU).nbytes if fits == 14 else plain.nbytes
    gpu = replace(GPU, total=GPU.context[0] + of_eight + (14 - 8) * 4 * MiB)  # 4 MiB a sample
    with Trials(program, gpu) as trying:
        found = trying.advice(plain).largest
    assert {kind: one.size for kind, one in found.items()} == ({} if fits is None else {"batch_size": fits})


def test_why_one_more_does_not_run_is_said(tmp_path, capsys, in_order):
    path = tmp_path / "limited.py"
    path.write_text(LOADING.replace("{loader}", "[(torch.zeros(batch, 2**20),)]") + "assert batch < 10, 'too many'\n")
    in_order.setattr(trials, "LEVERS", ())
    assert main(["trace", "--gpu", "a4000", str(path), "--batch-size", "8"]) == 0
    assert "that fits: 9 (now 8; 10 cannot be traced: " in (said := capsys.readouterr().out)
    assert "too many" in said and "smaller" not in said
