"""Edits that nobody makes: traced with them, a program takes what it really takes with the edit written in."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import everybyte as eb
from everybyte import changes


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(torch.relu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, layers=4, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def loader(batch_size=256):
    return DataLoader(TensorDataset(torch.ones(768, 32), torch.zeros(768, dtype=torch.long)), batch_size=batch_size)


def train(run, change=nullcontext, *, optimizer=None, batches=256, loss=None, late=False, **net):
    """A training program, its possible edits among its arguments, with a change round it."""
    make = optimizer or (lambda parameters: torch.optim.Adam(parameters))
    with run, change():
        model = Net(**net)
        adam, data = make(model.parameters()), iter(loader(batches))
        for _ in run.steps(2):
            x, y = run.to_device(next(data))
            out = (loss or plain_loss)(model, x, y)
            if late:
                adam.zero_grad()
            out.backward()
            adam.step()
            if not late:
                adam.zero_grad()
    return run.timeline.without("scratch")


def plain_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def under_autocast(model, x, y):
    with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
        out = model(x)
    return nn.functional.cross_entropy(out, y)


def fused(parameters):
    return torch.optim.Adam(parameters, fused=True)


EDITS = {
    "mixed precision": (changes.mixed_precision, {"loss": under_autocast}),
    "checkpoints": (changes.checkpointing, {"checkpointed": True}),
    "a fused optimizer": (changes.fused_optimizer, {"optimizer": fused}),
    "another batch size": (lambda: changes.loader_batches(256, 320), {"batches": 320}),
}


@pytest.mark.parametrize("make", [lambda: eb.trace("cpu"), lambda: eb.trace("cuda"), lambda: eb.measure("cpu")])
@pytest.mark.parametrize("edit", EDITS)
def test_a_change_is_the_edit_byte_by_byte(make, edit):
    change, written = EDITS[edit]
    changed, plain, edited = train(make(), change), train(make()), train(make(), **written)
    assert changed.allocations().to_dict() != plain.allocations().to_dict()
    assert changed.peak_bytes == edited.peak_bytes
    assert changed.allocations().to_dict() == edited.allocations().to_dict()


@pytest.mark.parametrize("make", [lambda: eb.trace("cpu"), lambda: eb.measure("cpu")])
def test_gradients_cleared_right_after_the_step_are_not_there_while_the_next_runs(make):
    late = train(make(), late=True)
    soon = train(make(), changes.gradients_cleared, late=True)
    gradients = sum(parameter.numel() * 4 for parameter in Net().parameters())
    assert [as_the_second_step_begins(timeline) for timeline in (late, soon)] == [gradients, 0]


def as_the_second_step_begins(timeline):
    """Bytes of gradients that the first step left to it."""
    first = timeline.frame().query("step == 1").index[0]
    return timeline.by("category", first)["nbytes"].get("gradient", 0)


def test_accumulated_twice_is_two_microbatches_a_step():
    changed, losses = {}, []

    def program(run, halves):
        with run, changes.accumulated(2) if halves else nullcontext():
            torch.manual_seed(0)
            model = Net()
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            for x, y in loader(128 if halves else 256):
                sgd.zero_grad()
                losses.append(plain_loss(model, x, y) / (2 if halves else 1))
                losses[-1].backward()
                sgd.step()
        changed[halves] = model.state_dict()

    program(nullcontext(), halves=False)
    program(nullcontext(), halves=True)
    for name, weight in changed[False].items():
        torch.testing.assert_close(weight, changed[True][name])


def test_a_models_repeated_blocks_are_its_outermost_alike_ones():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    other = deepcopy(inner)
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([Block(2), Block(2)]), inner)
    assert [*changes.repeated(model)] == [*model[1]]
    assert [*changes.repeated(nn.Sequential(nn.Sequential(inner, other), Block(2)))] == [inner, other]


def test_nothing_of_a_change_is_left_behind():
    before = nn.Module.__call__, torch.optim.Optimizer.__init__, DataLoader.__init__, torch.optim.Optimizer.zero_grad
    for change in (changes.checkpointing, changes.fused_optimizer, changes.accumulated, changes.no_graph):
        with pytest.raises(ZeroDivisionError), change():
            raise ZeroDivisionError
    with changes.loader_batches(1, 2):
        pass
    assert before == (
        *(nn.Module.__call__, torch.optim.Optimizer.__init__, DataLoader.__init__, torch.optim.Optimizer.zero_grad),
    )
    assert Net()(torch.ones(1, 32)).requires_grad


def test_a_model_that_evaluates_makes_no_graph_and_one_that_trains_does():
    model = Net()
    with changes.no_graph():
        assert model(torch.ones(1, 32)).requires_grad
        assert not model.eval()(torch.ones(1, 32)).requires_grad


def test_the_first_loader_that_is_read_tells_its_batch_size():
    other, first = loader(3), loader(5)
    with changes.Loaders().watched() as seen:
        next(iter(first)), next(iter(other))
    assert (seen.batch_size, seen.samples) == (5, 768)


def test_only_loaders_of_that_batch_size_change():
    with changes.loader_batches(16, 5):
        sizes = [loader(16).batch_size, loader(3).batch_size, DataLoader(TensorDataset(torch.ones(3))).batch_size]
        positional = DataLoader(TensorDataset(torch.ones(9)), 16, True)
    assert sizes == [5, 3, 1]
    assert positional.batch_size == 5
