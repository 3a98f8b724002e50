"""Edits that nobody makes: traced with them, a program takes what it really takes with the edit written in."""

from contextlib import nullcontext
from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

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
        return plain_loss(model, x, y)


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


@pytest.mark.parametrize("closure", [False, True], ids=["plain", "in a closure"])
def test_accumulated_twice_is_two_microbatches_a_step(closure):
    changed = {}

    def program(halves):
        with changes.accumulated(2) if halves else nullcontext():
            torch.manual_seed(0)
            nets = [Net(), Net()]  # two optimizers, each of which counts its own steps
            sgds = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
            for sgd in sgds:
                torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)  # puts a step() of its own in place of the optimizer's
            for x, y in loader(128 if halves else 256):
                for net, sgd in zip(nets, sgds, strict=True):

                    def compute(net=net, sgd=sgd, x=x, y=y):
                        sgd.zero_grad()
                        loss = plain_loss(net, x, y) / (2 if halves else 1)
                        loss.backward()
                        return loss

                    if closure:
                        assert sgd.step(compute) > 0
                    else:
                        compute()
                        sgd.step()
        changed[halves] = [net.state_dict() for net in nets]

    program(halves=False)
    program(halves=True)
    for whole, halved in zip(changed[False], changed[True], strict=True):
        for name, weight in whole.items():
            torch.testing.assert_close(weight, halved[name])


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


def test_the_loader_that_feeds_the_first_step_tells_its_batch_size():
    checked, first, after = loader(3), loader(5), loader(7)
    with changes.Loaders().watched() as seen:
        next(iter(checked)), next(iter(first))
        torch.optim.SGD(Net().parameters(), 0.1).step()
        next(iter(after))
    assert (seen.batch_size, seen.samples) == (5, 768)
    with changes.Loaders().watched() as seen:
        next(iter(DataLoader(TensorDataset(torch.ones(9)), batch_size=None)))
    assert (seen.batch_size, seen.samples) == (None, 9)


def test_only_loaders_of_that_batch_size_change():
    data = TensorDataset(torch.ones(9))
    with changes.loader_batches(16, 5):
        sizes = [loader(16).batch_size, loader(3).batch_size, DataLoader(data).batch_size]
        positional = DataLoader(data, 16, True)
        sampled = [*DataLoader(data, batch_sampler=BatchSampler(range(9), 16, False))]
        alone = DataLoader(data, batch_size=None)
    assert sizes == [5, 3, 1]
    assert positional.batch_size == 5
    assert [len(x) for (x,) in sampled] == [5, 4]
    assert alone.batch_size is None


def test_a_program_with_mixed_precision_of_its_own_keeps_it():
    def dtypes(own):
        net, seen = Net(), []
        handle = net.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        with changes.mixed_precision():
            with own:
                loss = net(torch.ones(1, 32)).sum()
            loss.backward()
            with torch.no_grad():
                net(torch.ones(1, 32))
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        handle.remove()
        return seen

    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    assert dtypes(torch.autocast("cpu", half)) == [half, bf16, full]
    assert dtypes(nullcontext()) == [bf16, bf16, full]


def test_a_model_that_checkpoints_by_itself_does_so_inside_of_another():
    class Own(nn.Module):
        supports_gradient_checkpointing, asked = True, None

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block(32) for _ in range(2))

        def gradient_checkpointing_enable(self, options):
            self.asked = options

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    inner = Own()
    with mock.patch("everybyte.changes.checkpoint") as generic, changes.checkpointing():
        nn.Sequential(inner, nn.Linear(32, 2))(torch.ones(1, 32))
    assert inner.asked == {"use_reentrant": False}
    generic.assert_not_called()
