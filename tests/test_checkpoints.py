"""What traced code loads and saves: shapes without reading, and what was saved comes back."""

from __future__ import annotations

import os
import zipfile
from collections import Counter

import pytest
import torch
from torch import nn

import everybyte as eb
from everybyte.host import resident_bytes
from everybyte.script import Program

MIB = 2**20


@pytest.fixture
def huge(tmp_path):
    """A checkpoint of 1 GiB in one weight, and a small one; the file has a hole where the large one's values were."""
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save({"weight": torch.empty(2**28), "epoch": 3, "bias": torch.ones(5)}, path)
    return path


def loaded(run, op="load"):
    frame = run.timeline.frame().query("action == 'alloc' and op == @op")
    return sorted(frame["nbytes"].tolist())


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("where", ["cpu", "cuda", None, {"cpu": "cuda:0"}, lambda storage, saved: storage])
def test_a_large_file_gives_shapes_and_is_not_read(huge, rules, where, opened):
    on_gpu = "cuda" in str(where)
    if on_gpu and rules == "cpu":
        pytest.skip("there is no GPU under the CPU's rules")
    with eb.trace(rules=rules):
        torch.ones(3) + 1
    before = resident_bytes()
    with eb.trace(rules=rules) as run:
        if opened:
            with open(huge, "rb") as file:
                checkpoint = torch.load(file, map_location=where)
        else:
            checkpoint = torch.load(huge, map_location=where)
        assert checkpoint["weight"].shape == (2**28,) and checkpoint["epoch"] == 3
        assert {t.device.type for t in (checkpoint["weight"], checkpoint["bias"])} == {"cuda" if on_gpu else "cpu"}
    assert loaded(run) == ([20, 2**30] if on_gpu or rules == "cpu" else [])
    assert resident_bytes() - before < 64 * MIB


def test_small_values_of_a_file_are_known(tmp_path):
    torch.save({"lengths": torch.tensor([3, 1]), "flag": torch.tensor(True)}, tmp_path / "small.pt")
    for rules, where in (("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda")):
        with eb.trace(rules=rules) as run:
            small = torch.load(tmp_path / "small.pt", where)
            assert small["flag"] and small["lengths"].tolist() == [3, 1]
        assert not run.unknown_reads


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    model.append(nn.Linear(4, 4))
    model[-1].bias = model[2].bias  # a tied parameter
    return model, torch.optim.AdamW(model.parameters())


def _step(model, optimizer, device="cpu"):
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_resumes_alike(traced, measured, path):
    """Holds peaks and sizes, but those of the records in which a file says what is in it, read and given back."""
    with zipfile.ZipFile(path) as file:
        records = Counter(part.file_size for part in file.infolist() if "/data/" not in part.filename)
    traced, measured = (timeline.without("scratch") for timeline in (traced, measured))
    assert traced.peak_bytes == measured.peak_bytes and traced.peak_above_start == measured.peak_above_start
    more = Counter(dict(measured.allocations(1)))
    more.subtract(dict(traced.allocations(1)))
    loads = more[next(size for size in records if size > 1000)]
    assert loads > 0 and {size: n for size, n in more.items() if n} == {size: loads * n for size, n in records.items()}


def _resume(path, weights_only):
    def body(run):
        for _ in run.steps(2):
            checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
            model, optimizer = _model()
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            del checkpoint
            _step(model, optimizer)

    return body


@pytest.mark.parametrize("weights_only", [False, True])
def test_training_that_resumes_from_a_file_allocates_what_it_really_does(tmp_path, weights_only):
    model, optimizer = _model()
    _step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    body = _resume(tmp_path / "last.pt", weights_only)
    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    assert_resumes_alike(traced.timeline, measured.timeline, tmp_path / "last.pt")


def test_a_whole_model_is_loaded_as_it_is_really(tmp_path):
    torch.save(_model()[0], tmp_path / "model.pt")

    def body(run):
        for _ in run.steps(1):
            model = torch.load(tmp_path / "model.pt", weights_only=False)
            _step(model, torch.optim.SGD(model.parameters(), 0.1))

    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    assert_resumes_alike(traced.timeline, measured.timeline, tmp_path / "model.pt")


TRAINING = """
import os, sys, torch
from torch import nn
device, path = sys.argv[1:]
def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 4)).to(device)
    model[-1].bias = model[2].bias
    return model, torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model, optimizer = make()
step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
if os.path.exists(path):
    checkpoint = torch.load(path, map_location=device)
    assert checkpoint["epoch"] == 1
    model, optimizer = make()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert optimizer.state_dict()["state"][0]["step"] == 1
    kept = checkpoint["model"]["2.bias"].data_ptr() == checkpoint["model"]["3.bias"].data_ptr()
    assert kept
    del checkpoint
    step()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)

    def made(device):
        return Program("train.py", (device, f"{device}.pt"), steps=4)

    return made


def test_what_was_saved_in_the_trace_loads_back_as_on_the_cpu(program, tmp_path):
    traced = program("cpu").trace(rules="cpu")
    assert not os.path.exists(tmp_path / "cpu.pt") and not traced.run.conditional
    measured = program("cpu").measure()
    assert os.path.exists(tmp_path / "cpu.pt")
    assert_resumes_alike(traced.run.timeline, measured.run.timeline, tmp_path / "cpu.pt")


def test_what_was_saved_in_the_trace_loads_back_onto_the_gpu(program, tmp_path):
    ran = program("cuda").trace(rules="cuda")
    weights = [4 * n for n in (8 * 32, 32, 32 * 4, 4, 4 * 4)]
    counters = 5 * [4]  # of steps, where `map_location` puts them
    assert loaded(ran.run) == sorted([*3 * weights, *counters])  # with both moments
    assert not os.path.exists(tmp_path / "cuda.pt") and not ran.run.conditional


def test_what_is_really_written_later_is_what_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "torch.save(torch.ones(3, device='cuda'), 'a.pt')\n"
        "assert torch.load('a.pt').is_cuda\n"
        "torch.save({'epoch': 3}, 'a.pt')\n"
        "assert torch.load('a.pt') == {'epoch': 3}\n"
    )
    assert Program("train.py", ()).trace("t4").ended == "the script's end"


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_a_file_of_safetensors_gives_shapes_too(tmp_path, rules):
    safetensors = pytest.importorskip("safetensors.torch", reason="it needs safetensors: pip install safetensors")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"weight": torch.zeros(2**23), "bias": torch.tensor([1.0, 2.0])}, path)
    where = "cpu" if rules == "cpu" else "cuda"
    with eb.trace(rules=rules) as run:
        tensors = safetensors.load_file(path, device=where)
        assert tensors["weight"].shape == (2**23,) and tensors["bias"].tolist() == [1.0, 2.0]
        assert {tensor.device.type for tensor in tensors.values()} == {where}
    assert loaded(run) == [8, 2**25]
