"""What lies beside the tensors: expected sizes are PyTorch's defaults, places are those of the recorded runs."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import everybyte as eb
from everybyte import gpus, workspace
from everybyte.units import KiB, MiB

BEFORE_HOPPER = 2 * 4096 * KiB + 8 * 16 * KiB


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpu, version, nbytes",
    [
        ("t4", "2.13.0", BEFORE_HOPPER),
        ("a100-80gb", "2.13.0", BEFORE_HOPPER),
        ("4090", "2.13.0", BEFORE_HOPPER),
        ("h100", "2.1.0", 32 * MiB),
        ("gh200", "2.13.0", 32 * MiB),
        ("b200", "2.11.0", BEFORE_HOPPER),
        ("b200", "2.12.0+cu130", 32 * MiB),
        ("5090", "2.12.0", 32 * MiB),
    ],
)
def test_a_workspace_is_as_large_as_the_architecture_and_the_release_have_it(gpu, version, nbytes):
    assert workspace.cublas_bytes(gpu, version) == workspace.cublas_bytes(gpus.find(gpu), version) == nbytes


def test_a_workspace_is_as_large_as_the_environment_says(monkeypatch):
    h100 = gpus.find("h100")
    assert workspace.cublas_bytes(h100, config=":4096:8") == 32 * MiB
    assert workspace.cublas_bytes(h100, config=":16:8") == 128 * KiB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert workspace.cublas_bytes(h100) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "none of it")  # PyTorch warns and takes the default
    assert workspace.cublas_bytes(h100) == 32 * MiB


def test_cublaslt_has_a_workspace_of_its_own_up_to_2_11(monkeypatch):
    sizes = {version: workspace.cublaslt_bytes(version) for version in ("2.1.0", "2.11.0", "2.12.0", "2.13.0+cpu")}
    assert sizes == {"2.1.0": MiB, "2.11.0": MiB, "2.12.0": 0, "2.13.0+cpu": 0}
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert workspace.cublaslt_bytes("2.11.0") == 4 * MiB


# -- where they come ---------------------------------------------------------------------------------------------------


def events(timeline):
    frame = timeline.frame()
    return list(zip(frame["op"], frame["action"], frame["nbytes"], strict=True))


def test_each_thread_takes_its_workspace_after_the_result_and_the_copies_of_its_first_product():
    with eb.trace(rules="cuda") as run:
        weight = torch.empty(64, 8, requires_grad=True)
        rows = torch.empty(1, 64).expand(16, 64)  # cuBLAS reads a copy of it
        out = rows @ weight
        out.sum().backward()
    forward, backward = run.workspaces
    assert (forward.thread, forward.op, forward.nbytes) == ("forward", "mm", 8_519_680)
    assert (backward.thread, backward.op) == ("backward", "mm")
    assert "test_workspace.py:" in forward.line
    stream = events(run.timeline.with_workspaces())
    at = stream.index(("cuBLAS (forward)", "alloc", 8_519_680))
    assert stream[at - 2 : at + 2] == [
        ("mm", "alloc", 16 * 8 * 4),
        ("mm", "alloc", 16 * 64 * 4),
        ("cuBLAS (forward)", "alloc", 8_519_680),
        ("mm", "free", 16 * 64 * 4),
    ]
    at = stream.index(("cuBLAS (backward)", "alloc", 8_519_680))
    assert ("mm", "alloc", 64 * 8 * 4) in stream[at - 3 : at]


def test_workspaces_are_in_no_timeline_that_was_not_asked_to_have_them():
    with eb.trace(rules="cuda", gpu="h100") as run:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        x = torch.empty(4, 8)
        for _ in run.steps(2):
            model(x).sum().backward()
    t = run.timeline
    both = t.with_workspaces()
    lt = MiB if torch.__version__ < (2, 12) else 0  # cuBLASLt's own, which then shares cuBLAS's
    assert both.peak_bytes == t.peak_bytes + 2 * 32 * MiB + lt
    assert both.start_bytes == t.start_bytes
    assert both.info["end_event"] == len(both) == len(t) + 2 + bool(lt)
    assert events(both.without("workspace")) == events(t)
    assert both.by("category").loc["workspace", "nbytes"] == 2 * 32 * MiB + lt
    assert eb.report.composition(both).loc["workspace", "storages"] == 2 + bool(lt)
    assert len(both.with_workspaces()) == len(both)
    assert both.table["storage"].to_pylist().count(len(t) * 2) == 1  # a number of its own


def test_a_timeline_without_its_scratch_still_knows_where_workspaces_come():
    with eb.trace(rules="cuda") as run:
        weight = torch.empty(64, 8, requires_grad=True)
        (torch.empty(1, 64).expand(16, 64) @ weight).sum().backward()
    less = run.timeline.without("scratch")
    assert len(less) < len(run.timeline)
    assert events(less.with_workspaces()) == events(run.timeline.with_workspaces().without("scratch"))
    assert less.rounded(512).with_workspaces().peak_bytes % 512 == 0


def threads(step):
    with eb.trace(rules="cuda") as run:
        step()
    return [taken.thread for taken in run.workspaces]


def test_only_a_thread_that_multiplies_takes_a_workspace():
    square = lambda: torch.empty(8, 8, requires_grad=True)  # noqa: E731
    assert threads(lambda: (square() * square()).sum().backward()) == []
    assert threads(lambda: torch.empty(0, 8) @ square()) == []  # nothing to multiply
    assert threads(lambda: square() @ square()) == ["forward"]
    assert threads(lambda: torch.empty(8) @ torch.empty(8)) == ["forward"]
    assert threads(lambda: (square() @ square()).sum().backward()) == ["forward", "backward"]


def test_where_cublaslt_has_its_own_a_layer_with_a_bias_takes_both(monkeypatch):
    monkeypatch.setattr(workspace, "cublaslt_bytes", lambda: MiB)  # as in 2.11
    bias, thin, plain = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 8, bias=False)
    for layer, libraries in ((bias, ["cuBLAS", "cuBLASLt"]), (thin, ["cuBLAS"]), (plain, ["cuBLAS"])):
        with eb.trace(rules="cuda") as run, torch.no_grad():
            run.to_device(layer)(torch.empty(4, 8))
        assert [taken.library for taken in run.workspaces] == libraries
        assert len({taken.event for taken in run.workspaces}) == 1
        assert len(run.timeline.with_workspaces()) == len(run.timeline) + len(libraries)


def test_what_is_recomputed_is_multiplied_by_autograd_s_thread():
    class Recomputed(torch.autograd.Function):
        """Multiplies in its backward pass only."""

        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            return x @ gradient

    assert threads(lambda: Recomputed.apply(torch.empty(8, 8, requires_grad=True)).sum().backward()) == ["backward"]
    layer = lambda x: torch.tanh(x @ x)  # noqa: E731
    with eb.trace(rules="cuda") as run:
        checkpoint(layer, torch.empty(8, 8, requires_grad=True), use_reentrant=False).sum().backward()
    forward, backward = run.workspaces
    assert (forward.thread, backward.thread) == ("forward", "backward")
    assert run.timeline.frame()["op"][backward.event - 1] == "mm"


def test_a_cpu_has_none():
    with eb.trace(rules="cpu") as run:
        torch.empty(8, 8) @ torch.empty(8, 8)
    assert run.workspaces == ()
    assert events(run.timeline.with_workspaces()) == events(run.timeline)


# -- in words ----------------------------------------------------------------------------------------------------------


def test_what_remains_when_the_model_is_gone_is_named_and_is_no_leak():
    with eb.trace(rules="cuda", gpu="t4") as run, torch.no_grad():
        model = nn.Linear(256, 256, bias=False)
        x = model(torch.empty(4, 256))
        del model, x
    replay = eb.Allocator(gpu="t4").replay(run.timeline.with_workspaces())
    assert replay.allocated[-1] == 8_519_680
    said = replay.explain()
    assert "1 x 8,519,680 B" in said and "cuBLAS's workspace (:4096:2:16:8, the default before Hopper)" in said
    assert "no leak" in said and "_cuda_clearCublasWorkspaces" in said
    live = run.timeline.with_workspaces().live(-1)
    assert live[["op", "category", "nbytes"]].values.tolist() == [["cuBLAS (forward)", "workspace", 8_519_680]]
    (taken,) = run.workspaces
    assert str(taken).startswith("8,519,680 B (8.520 MB, 8.125 MiB): cuBLAS's workspace (:4096:2:16:8")


def test_a_block_of_another_size_is_not_taken_for_a_workspace():
    assert workspace.named(8_519_680 - 512) is None
    assert "Hopper and Blackwell" in workspace.named(32 * MiB)
    with eb.trace(rules="cuda") as run:
        kept = torch.empty(8_519_680 - 512, dtype=torch.uint8)
    assert "workspace" not in eb.Allocator().replay(run.timeline).explain()
    del kept


def test_what_nvidia_smi_shows_beyond_a_tensor_is_the_context_and_no_tensor_s():
    with eb.trace(rules="cuda", gpu="v100-16gb") as run:
        kept = torch.empty(6)  # 24 bytes
    assert eb.Allocator().replay(run.timeline).peak_reserved == 2 * MiB
    said = workspace.beside("v100-16gb")
    assert workspace.beside(run.gpu) == said
    least, most = run.gpu.context
    assert f"{least:,} to {most:,} B are reported on Tesla V100-SXM2-16GB" in said
    assert "nvidia-smi counts them" in said and "no tensor holds them" in said
    del kept


def test_a_workspace_of_a_size_that_was_set_is_told_without_a_default_s_name():
    taken = workspace.Workspace("cuBLAS", "backward", 128 * KiB, 7, "bmm", "step.py:3")
    assert str(taken) == (
        "131,072 B (131.072 KB, 128.000 KiB): cuBLAS's workspace, kept by autograd's thread since its first, bmm"
    )
