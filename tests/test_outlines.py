"""A model that is built on the host and moved: traced by its outlines, it costs nothing, and its GPU sees the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everybyte as eb
from everybyte import outlines
from everybyte.host import resident_bytes

MiB = 2**20


@pytest.fixture
def run():
    with eb.trace(rules="cuda", gpu="a4000", default="cpu") as run:
        yield run


def large(*shape, **kwargs):
    made = torch.randn(*shape or (1024, 1024), **kwargs)
    assert made.untyped_storage().nbytes() > outlines.LIMIT
    return made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((16,), 0.5))
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[3].weight, std=0.02)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x)) * self.scale)


def trained(run):
    """As scripts have it: built on the host, copied there, cast there, moved; data through a loader."""
    torch.manual_seed(0)
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False).to("cuda")
    best = copy.deepcopy(model.state_dict())
    assert best["embedding.weight"].data_ptr() == best["head.weight"].data_ptr() and not best["scale"].is_cuda
    model.load_state_dict(best)
    model.to(torch.float64).float().to("cuda")
    data = TensorDataset(torch.randn(12, 5), torch.randint(0, 40, (12, 5)))
    optimizer = torch.optim.AdamW(model.parameters())
    for weights, tokens in DataLoader(data, batch_size=4, shuffle=True):
        weights, tokens = weights.cuda(), tokens.cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
        (loss * weights.flatten()).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        kept = {name: value.cpu() for name, value in model.state_dict().items()}
        average.load_state_dict(kept)


def test_a_gpu_sees_the_same_whether_the_host_s_tensors_are_real_or_outlines(monkeypatch):
    with eb.trace(rules="cuda", default="cpu") as real:
        trained(real)
    monkeypatch.setattr(outlines, "LIMIT", 0)
    with eb.trace(rules="cuda", default="cpu") as outlined:
        trained(outlined)
    assert real.timeline.table.equals(outlined.timeline.table)
    assert not outlined.conditional


def test_a_model_of_seven_billion_parameters_is_built_on_the_host_in_no_memory(run):
    before = resident_bytes()
    hidden, inner = 4096, 11008
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner)] * 3
    blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes) for _ in range(32))
    parameters = 32 * (4 * hidden**2 + 3 * hidden * inner)
    assert sum(p.numel() for p in blocks.parameters()) == parameters
    blocks.to(torch.bfloat16)
    assert run.timeline.peak_bytes == 0
    blocks.to("cuda")
    assert run.timeline.peak_bytes == 2 * parameters  # 12.95 GB
    assert resident_bytes() - before < 64 * MiB


def test_an_outline_says_it_is_on_the_host(run):
    x = large()
    assert x.device == torch.device("cpu") and x.is_cpu and not x.is_cuda and not x.is_meta
    for made in (x.t(), x[:2].clone(), x @ x, torch.zeros_like(x), x.new_zeros(3), x.float(), x.to("cpu"), x.sum()):
        assert made.device.type == "cpu" and made.get_device() == -1
    assert x.to("cpu") is x
    for made in (x.to("cuda"), x.cuda(), x.to(torch.zeros(1, device="cuda")), torch.empty_like(x, device="cuda")):
        assert made.is_cuda and made.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert run.timeline.frame()["nbytes"].unique().tolist() == [4 * MiB, 4]


def test_an_outline_does_not_meet_a_tensor_on_the_gpu(run):
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        large() + torch.ones(1024, device="cuda")
    on_gpu = torch.zeros(1024, 1024, device="cuda")
    on_gpu.copy_(large())
    large().copy_(on_gpu)


def test_what_is_made_by_its_data_or_is_small_is_really_there(run):
    assert torch.ones(100).sum().item() == 100
    tokens = torch.randint(3, 4, (512, 1024))  # 4 MiB
    assert tokens.sum().item() == 3 * 512 * 1024
    data = torch.from_numpy(tokens.numpy().astype("float32"))
    assert data.mean().item() == 3 and (data * 2).max().item() == 6
    assert not run.unknown_reads


ASKING = [
    lambda x: 1 if x.mean() > 0 else 2,
    lambda x: 1 if x.sum().item() > 0 else 2,
    lambda x: 1 if float(x[0, 0]) > 0 else 2,
    lambda x: 1 if (x > 0).any() else 2,
    lambda x: 1 if x.numpy()[0, 0] > 0 else 2,
    lambda x: 1 if x.cuda().sum().cpu() > 0 else 2,
    lambda x: 1 if x.cuda().sum().cpu().item() > 0 else 2,
    lambda x: 1 if x.cuda().sum().cpu().numpy() > 0 else 2,
]


@pytest.mark.parametrize("ask", ASKING)
def test_a_branch_on_a_value_that_only_an_outline_has_makes_a_condition(run, ask):
    ask(large())
    assert len(run.conditional) == 1 and "test_outlines.py:" in run.conditional[0]


def test_real_memory_that_is_filled_from_an_outline_is_not_known_after_it(run):
    sums = torch.zeros(4)
    sums[0] = large().sum()
    assert [read.op for read in run.unknown_reads] == ["copy_"]


def test_the_code_s_own_meta_tensors_are_on_the_meta_device_and_take_nothing(run):
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    assert model.weight.is_meta and model.weight.device == torch.device("meta") and not model.weight.is_cuda
    assert torch.zeros_like(model.weight).is_meta and large().to("meta").is_meta
    assert torch.ones(3, device="cuda").to("meta").is_meta and torch.empty_like(large(), device="meta").is_meta
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor; no data!"):
        model.weight.detach().to("cuda")
    assert run.timeline.peak_bytes == 12
    model.to_empty(device="cuda")
    assert model.weight.is_cuda and model.weight.requires_grad
    assert run.timeline.by("category")["nbytes"].sum() == 4 * 1001 * 1000


def test_what_comes_back_from_the_gpu_can_be_computed_with_on_the_host(run):
    scores = torch.randn(512, 1000, device="cuda")
    kept = torch.cat([scores.cpu(), scores.cpu()])
    assert kept.is_cpu and kept.argmax(1).shape == (1024,)
    assert kept.numpy().shape == (1024, 1000) and len(kept.sum(1).tolist()) == 1024
    del kept
    assert run.timeline.peak_bytes == 4 * 512 * 1000


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="up to 2.11 trunc_normal_ draws once, in place")
def test_drawing_anew_what_is_out_of_bounds_is_no_branch_and_takes_its_most_memory_from_the_second_time_on(run):
    nn.init.trunc_normal_(large())
    assert not run.timeline.peak_bytes
    weight = torch.empty(1000, device="cuda")
    for _ in range(2):
        nn.init.trunc_normal_(weight)
        # The weight, the numbers so far, those drawn anew, what is made of both, and the mask that says where.
        assert run.timeline.peak_bytes == 4 * 4000 + 1000 and not run.conditional
    events = len(run.timeline)
    nn.init.trunc_normal_(weight, std=0.02)  # whose bounds are a hundred times that away: none is drawn anew
    frame = run.timeline.frame()[events:]
    assert (frame["action"] == "alloc").sum() == 4  # what is below, above, either, and whether any is
    nn.init.trunc_normal_(weight, a=2.0, b=3.0)  # far from the middle: drawn between the bounds, accepted or not
    # The weight, two buffers, the numbers so far, those after this turn, and the mask.
    assert run.timeline.peak_bytes == 5 * 4000 + 1000 and not run.conditional
