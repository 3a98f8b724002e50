"""LoRA: what learns, what is kept, what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import everybyte as eb
from everybyte.models.gpt import GPT, GPTConfig
from everybyte.models.lora import LoRALinear, add_lora
from everybyte.run import Run

SMALL = GPTConfig(vocabulary=96, context=16, layers=2, hidden=48, heads=4, kv_heads=2, dtype="float32", dropout=0.0)
READ = torch.arange(32).view(2, 16)


def learning(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_only_the_path_learns():
    layer = LoRALinear(nn.Linear(40, 24), rank=4)
    assert sum(parameter.numel() for parameter in learning(layer)) == 4 * (40 + 24)
    layer(torch.ones(2, 40)).sum().backward()
    assert layer.base.weight.grad is None and layer.base.bias.grad is None
    assert layer.down.weight.grad is not None and layer.up.weight.grad is not None


def test_at_the_start_nothing_changes_and_then_the_path_is_a_product_of_rank_r():
    base, x = nn.Linear(40, 24), torch.randn(5, 40)
    before = base(x)
    layer = LoRALinear(base, rank=3, alpha=6)
    assert torch.equal(layer(x), before)
    nn.init.normal_(layer.up.weight)
    change = 2 * layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(x), before + x @ change.T)
    assert torch.linalg.matrix_rank(change) == 3


@pytest.mark.parametrize("rules", [None, "cpu"], ids=["real", "traced"])
def test_it_keeps_its_input_and_a_tensor_as_wide_as_the_rank(rules):
    def forward() -> torch.Tensor:
        return LoRALinear(nn.Linear(40, 24), rank=4)(torch.randn(6, 40, requires_grad=True))

    kept = eb.saved(forward, rules=rules)
    assert kept.frame()["nbytes"].tolist() == [4 * 6 * 40, 8, 4 * 6 * 4]  # the 8 bytes are the number that scales


def test_in_a_decoder_gradients_and_state_are_the_paths_alone():
    with eb.measure(device="cpu") as run:
        model = add_lora(GPT(SMALL), rank=2)
        optimizer = torch.optim.AdamW(learning(model), foreach=False)
        for _ in run.steps(1):
            read = run.to_device(READ)
            model(read, read).backward()
            optimizer.step()
    paths = SMALL.layers * 2 * ((48 + 48) + (48 + 24))  # queries, values
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in learning(model)) == paths
    counters = 4 * len(learning(model))
    assert run.timeline.live_bytes[-1] == 4 * whole + (4 + 8) * paths + counters + READ.nbytes


def test_two_traced_steps_are_two_measured_ones():
    def two_steps(run: Run) -> eb.Timeline:
        torch.manual_seed(0)
        with run:
            model = add_lora(GPT(SMALL), rank=2, layers=("q", "k", "v", "out", "up", "down"), alpha=4.0)
            optimizer = torch.optim.AdamW(learning(model), foreach=False)
            for _ in run.steps(2):
                read = run.to_device(READ)
                model(read, read).backward()
                optimizer.step()
                optimizer.zero_grad()
        return run.timeline.without("scratch")

    traced, measured = two_steps(eb.trace(rules="cpu")), two_steps(eb.measure(device="cpu"))
    assert traced.peak_bytes == measured.peak_bytes
    assert traced.allocations(1).equals(measured.allocations(1))


@pytest.mark.parametrize("rank", [0, -1, 25, 2.0, True])
def test_a_rank_that_the_layer_cannot_have_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank!r} is not one of this layer's: give a whole number from 1 to 24"):
        LoRALinear(nn.Linear(40, 24), rank)


def test_a_name_that_no_layer_has_is_refused():
    with pytest.raises(
        ValueError, match=r"no linear layer is called \['query'\]: choose from down, head, k, out, q, up, v"
    ):
        add_lora(GPT(SMALL), 2, ("query", "v"))
