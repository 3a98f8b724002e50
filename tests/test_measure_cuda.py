"""Measuring on a GPU, tried without one: PyTorch's own profiler over a run on the host, and the allocator's history of
that run, or of one that was recorded, at the boundary of `torch.cuda`."""

import gc
import pickle
from dataclasses import asdict, replace

import pytest
import torch
from fake_gpu import FakeGPU, entry
from torch import nn
from torch.utils.checkpoint import checkpoint

import everybyte as eb
from everybyte.snapshot import Snapshot

WORKSPACE = 8_519_680
SEEN = ["step", "phase", "action", "storage", "nbytes", "op", "module", "category"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.hidden, self.leave = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = torch.relu(self.enter(x * self.scale))
        x = checkpoint(lambda y: torch.tanh(self.hidden(y)), x, use_reentrant=False, preserve_rng_state=False)
        return self.leave(x)


def body(run):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = run.to_device(torch.randn(8, 16, device="cpu"))
    for _ in run.steps(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(device):
    with eb.measure(device=device) as run:
        body(run)
    return run


@pytest.fixture(scope="module")
def on_host():
    return measured("cpu").timeline


def test_a_history_and_a_profile_make_the_timeline_that_the_host_s_profile_alone_makes(monkeypatch, on_host):
    FakeGPU(monkeypatch)
    run = measured("cuda")
    frame = run.timeline.frame()
    assert frame[SEEN].equals(on_host.frame()[SEEN])
    assert set(frame["device"]) == {"cuda:0"}
    assert run.unattributed == 0
    assert run.out_of_memory is None
    assert {"start_event", "end_event", "steps"} <= run.timeline.info.keys()
    assert run.timeline.start_bytes == on_host.start_bytes


def test_sizes_streams_and_lines_are_the_history_s(monkeypatch, on_host):
    def edit(trace):
        for event in trace:
            event.update(size=event["size"] + 3, stream=7, frames=frames)

    files = [torch.nn.functional.__file__, eb.run.__file__, f"{__file__[:-3]}_of_the_user.py"]
    frames = [{"filename": file, "line": 5, "name": ""} for file in files]
    FakeGPU(monkeypatch, edit)
    run = measured("cuda")
    frame = run.timeline.frame()
    assert (frame["nbytes"] - on_host.frame()["nbytes"]).unique().tolist() == [3]
    assert frame["stream"].unique().tolist() == [1]  # named by their order: 0 is the default stream
    assert frame["line"].unique().tolist() == ["tests/test_measure_cuda_of_the_user.py:5"]
    assert frame[[c for c in SEEN if c != "nbytes"]].equals(on_host.frame()[[c for c in SEEN if c != "nbytes"]])


def test_what_the_profiler_does_not_report_is_counted_without_an_operation_and_moves_nothing_else(monkeypatch, on_host):
    extra = [entry(action, 2**40, 1000) for action in ("alloc", "free_requested", "free_completed")]

    def edit(trace):
        for at in (len(trace), len(trace) // 2, 0):
            trace[at:at] = extra

    FakeGPU(monkeypatch, edit)
    run = measured("cuda")
    frame = run.timeline.frame()
    others = frame[frame["nbytes"] != 1000]
    assert run.unattributed == 3
    assert len(frame) == len(on_host.frame()) + 6
    columns = [c for c in SEEN if c != "storage"]
    assert others[columns].reset_index(drop=True).equals(on_host.frame()[columns])
    assert set(frame[frame["nbytes"] == 1000]["op"]) == {""}


def test_workspaces_are_known_because_they_alone_are_let_go_at_the_end(monkeypatch, on_host):
    def edit(trace):  # with a size of its own, and one that another allocation had before
        trace[6:6] = [entry("alloc", 2**40, WORKSPACE)]
        trace[9:9] = [entry(action, 2**41, 4) for action in ("alloc", "free_requested", "free_completed")]
        trace[15:15] = [entry("alloc", 2**41, WORKSPACE)]

    gpu = FakeGPU(monkeypatch, edit)
    gpu.workspaces = [2**40, 2**41]
    run = measured("cuda")
    timeline = run.timeline
    assert timeline.by("category", -1)["nbytes"]["workspace"] == 2 * WORKSPACE  # never let go in the run
    assert run.figures.workspace == 2 * WORKSPACE
    assert run.figures.requested == timeline.without("workspace").peak_bytes == on_host.peak_bytes


def test_the_figures_are_each_what_their_own_source_says(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    gpu.peak, gpu.reserved = 123_456, 2**21
    run = measured("cuda")
    said = run.figures
    assert (said.allocated, said.reserved, said.before) == (123_456, 2**21, 0)
    assert said.driver == gpu.context + 2**21
    assert said.context == gpu.context
    assert said.nvml is None or said.nvml > 0
    assert run.timeline.info["figures"] == asdict(said)
    assert run.timeline.info["gpu"] == "NVIDIA RTX A4000"


def test_the_peak_is_reset_before_and_read_after_the_gpu_is_idle_and_the_history_is_off_again(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    measured("cuda")
    on = ("history", "all", ("context", "alloc"), ("stacks", "python"))
    assert gpu.log == [
        *("synchronize", "empty_cache", "reset", on),
        *("synchronize", "synchronize", "empty_cache", ("history", None)),
    ]
    assert not gpu.history_on
    assert not torch.utils._device.CURRENT_DEVICE


@pytest.mark.parametrize("error", [KeyError, torch.cuda.OutOfMemoryError])
def test_after_an_error_that_no_history_explains_everything_is_as_it_was(monkeypatch, error):
    gpu = FakeGPU(monkeypatch)
    with pytest.raises(error), eb.measure(device="cuda"):
        raise error("of the body")
    assert not gpu.history_on
    assert not torch.utils._device.CURRENT_DEVICE
    measured("cuda")  # and another may begin


def test_a_history_that_was_on_stays_on_and_what_was_in_it_is_not_the_run_s(monkeypatch, on_host):
    gpu = FakeGPU(monkeypatch, on=True)
    gpu.before = [entry("alloc", 2**40, 4096)]
    run = measured("cuda")
    assert run.timeline.frame()[SEEN].equals(on_host.frame()[SEEN])
    assert gpu.history_on
    assert not [what for what in gpu.log if what[0] == "history"]


def test_a_history_with_too_little_room_is_an_error_that_says_what_to_do(monkeypatch):
    gpu = FakeGPU(monkeypatch, on=True)
    gpu.before = [entry("alloc", 2**40, 4096)]
    with pytest.raises(RuntimeError, match=r"_record_memory_history\(None\)"), eb.measure(device="cuda"):
        gpu.before = [entry("alloc", 2**41, 8192)]


def test_a_history_that_the_body_turns_off_or_begins_anew_is_an_error_and_no_number(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    with pytest.raises(RuntimeError, match="turned off or begun anew in the block"), eb.measure(device="cuda"):
        torch.cuda.memory._record_memory_history(None)
    gpu.edit = lambda trace: trace.__delitem__(slice(0, len(trace) // 2))  # as PyTorch forgets what came before
    with pytest.raises(RuntimeError, match="turned off or begun anew in the block"):
        measured("cuda")
    assert not gpu.history_on
    assert not torch.utils._device.CURRENT_DEVICE


def test_new_tensors_are_put_on_the_gpu_but_the_optimizer_s_counters_and_what_data_sets_make(monkeypatch):
    FakeGPU(monkeypatch)
    with eb.measure(device="cuda"):
        from everybyte.measure_cuda import _OnGPU  # the mode in place, asked as PyTorch asks it

        (mode,) = (m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, _OnGPU))
        mode.device = torch.device("meta")
        assert torch.empty(2).is_meta
        assert not torch.empty(2, device="cpu").is_meta
        parameter = nn.Parameter(torch.empty(2, device="cpu"))
        parameter.grad = torch.empty(2, device="cpu")
        optimizer = torch.optim.Adam([parameter])
        optimizer.step()
        assert not optimizer.state[parameter]["step"].is_meta
        collated = next(iter(torch.utils.data.DataLoader([1.0, 2.0], batch_size=2)))
        assert not collated.is_meta


@pytest.fixture
def starved():
    """A traced run, and what it is on a GPU whose memory ends in the midst of the second step."""
    with eb.trace(rules="cuda") as run:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        x = run.to_device(torch.zeros(4096, 512))
        for _ in run.steps(2):
            model(x).mean().backward()
    allocator = eb.Allocator(total="64 MiB")
    return run.timeline, allocator, allocator.replay(run.timeline).out_of_memory


def test_out_of_memory_is_a_result_with_the_numbers_of_the_message_and_the_timeline_up_to_there(
    monkeypatch, starved, tmp_path
):
    timeline, allocator, expected = starved
    timeline.to_snapshot(tmp_path / "oom.pickle", allocator)
    recorded = pickle.loads((tmp_path / "oom.pickle").read_bytes())
    gpu = FakeGPU(monkeypatch, recorded=recorded)
    with eb.measure(device="cuda") as run:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
    sizes = timeline.frame()["nbytes"].tolist()
    found = run.out_of_memory
    assert found == replace(expected, needed=found.needed, op=found.op)
    assert found.op.startswith(f"{expected.op} [") and found.line == expected.line != ""
    assert run.timeline.frame()["nbytes"].tolist() == sizes[: expected.event]
    assert expected.requested == sizes[expected.event]
    assert found.needed == timeline.rounded(512).live_bytes[: expected.event + 1].max()  # the request itself counts
    assert run.timeline.info["out_of_memory"]["requested"] == expected.requested
    assert not gpu.history_on


def test_a_failure_that_the_body_catches_is_reported_too(monkeypatch, on_host):
    def edit(trace):
        trace.insert(20, {"action": "oom", "device_free": 2**20, "size": 2**35, "stream": 0, "frames": []})

    FakeGPU(monkeypatch, edit)
    run = measured("cuda")
    assert run.timeline.frame()[SEEN].equals(on_host.frame()[SEEN])
    assert (run.out_of_memory.requested, run.out_of_memory.free) == (2**35, 2**20)


def read(snapshots, name):
    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"{module}.{name}")

    with open(snapshots / f"{name}.pickle", "rb") as file:
        return Plain(file).load()


@pytest.mark.parametrize("name", ["attention-small", "lm-medium-ctx128-inference", "lm-medium-ctx128-train-fp32"])
def test_of_a_recorded_history_the_timeline_has_each_event(monkeypatch, snapshots, name):
    FakeGPU(monkeypatch, recorded=read(snapshots, name))
    with eb.measure(device="cuda") as run:
        pass
    frame, known = run.timeline.frame(), Snapshot.read(snapshots / f"{name}.pickle").timeline
    events = known.frame()[known.info["start_event"] :]
    own = events[events["storage"].isin(events.query("action == 'alloc'")["storage"])]  # not what was there before
    assert frame[["action", "nbytes"]].to_dict("list") == own[["action", "nbytes"]].to_dict("list")
    assert run.unattributed == (frame["action"] == "alloc").sum()


def test_without_a_gpu_cuda_is_one_clear_error_and_auto_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch finds no GPU; use device='cpu'"):
        eb.measure(device="cuda")
    with pytest.raises(ValueError, match="'cpu', 'cuda' or 'auto'"):
        eb.measure(device="tpu")
    assert eb.measure(device="auto").device == "cpu"


@pytest.mark.parametrize("off", ["cudaMallocAsync", "no caching"])
def test_an_allocator_that_keeps_no_history_is_refused_in_one_line(monkeypatch, off):
    FakeGPU(monkeypatch)
    if off == "no caching":
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    else:
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: off)
    with pytest.raises(ValueError, match="caching allocator, which keeps a history, is off"):
        eb.measure(device="cuda")


def test_the_collector_lets_nothing_go_while_the_workspaces_are_told_from_the_rest(monkeypatch):
    gpu, collects = FakeGPU(monkeypatch), []
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: collects.append(gc.isenabled()) or gpu.snapshot()["segments"]
    )
    measured("cuda")
    assert collects == [False]
    assert gc.isenabled()


def test_auto_is_the_gpu_where_there_is_one(monkeypatch):
    FakeGPU(monkeypatch)
    assert eb.measure(device="auto").device == "cuda:0"
