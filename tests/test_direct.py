"""Calls of optimizers that go to the trace directly: what happens is what happens on the way through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import everybyte as eb
from everybyte.direct import Direct


class Updates(torch.optim.Optimizer):
    """An optimizer whose step is a function of a parameter, its gradient and a state of the parameter's shape."""

    def __init__(self, parameters: Any, update: Callable[..., None]) -> None:
        super().__init__(parameters, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            self.update(parameter, parameter.grad, state["mean"])


def adam_like(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    m.lerp_(g, 0.1)
    p.addcdiv_(m, (g * g).sqrt().add_(1e-8), value=-0.01)


def weight_of_no_dimensions(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    for weight in (0.5, torch.rand(()), torch.rand(p.shape), torch.full((), 0.5)):
        m.lerp_(g, weight)
        p.mul_(weight).clamp_(min=weight)


def scaled_and_masked(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    p.add_(g, alpha=-0.1).add_(g, alpha=1).sub_(g, alpha=2)
    m.copy_(g).masked_fill_(g > 0, 0.0)
    p.add_(m.sum(0)).sub_(m.sum(0, keepdim=True)).mul_(m.mean().item() + 1)


def shapes_that_numbers_decide(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    for dim in (0, 1, 0):
        p.add_(g.cumsum(dim).roll(1, dim)).add_(g.sum(dim, True))
    for diagonal in (0, 1, -1):
        m.add_(torch.tril(g, diagonal)).add_(torch.diag(torch.diag(g, diagonal), diagonal)[:4, :4])


def negated_in_its_bit(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    z = torch.complex(g, m)
    for part in (z.imag, z.conj().imag, z.imag):  # the second is negated where it is read
        m.add_(part).mul_(0.5)
        part.mul_(0.5)
        part.sqrt()


def other_dtypes(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        step = m.to(dtype).div(3)
        p.add_(step)
        torch.set_default_dtype(torch.float64)
        p.add_(m.to(torch.int64).div(3))
        torch.set_default_dtype(torch.float32)


def under_autocast(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    for enabled in (False, True, False):
        with torch.autocast(p.device.type, torch.bfloat16, enabled):
            p.add_(torch.mm(p, g)).add_(g.pow(2.0)).add_(torch.addcmul(p, g, g))


def with_gradients(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            loss = m.mul(p).sqrt().sum()
        if enabled:
            m.add_(torch.autograd.grad(loss, p)[0])


def counted_on_the_host(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    count = torch.zeros(3, device="cpu")
    for _ in range(3):
        count.add_(1).mul_(2.0)
    assert count.tolist() == [14.0] * 3
    p.add_(g, alpha=-count[0].sqrt().item())


def mapped(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    m.copy_(g.sqrt().mul(g))
    p.add_(torch.func.vmap(lambda row: row.sqrt().mul(row))(g))


UPDATES = [
    *(adam_like, weight_of_no_dimensions, scaled_and_masked, shapes_that_numbers_decide, negated_in_its_bit),
    *(other_dtypes, under_autocast, with_gradients, counted_on_the_host, mapped),
]


def _traced(update: Callable[..., None], rules: str) -> eb.Timeline:
    with eb.trace(rules=rules) as run:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizer = Updates(model.parameters(), update)
        x = torch.rand(3, 4)
        for _ in run.steps(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.timeline


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_a_call_that_goes_directly_is_the_events_that_it_is_through_the_dispatcher(update, rules, monkeypatch) -> None:
    directly = _traced(update, rules)
    monkeypatch.setattr(Direct, "kind", lambda *call: None)
    assert directly.table.equals(_traced(update, rules).table)


def test_an_optimizer_s_loop_does_go_directly() -> None:
    """Otherwise nothing above is tested: of seven calls for each of two parameters in three steps, seven teach."""
    went = []
    with pytest.MonkeyPatch.context() as patch:
        run = type(eb.trace())
        directly = run._directly
        patch.setattr(run, "_directly", lambda run, known, *call: went.append(known) or directly(run, known, *call))
        _traced(adam_like, "cpu")
    names = [known.op.name for known in went]
    assert {name: names.count(name) for name in names} == dict.fromkeys(["lerp_", "mul", "sqrt", "add_", "addcdiv_"], 5)


def test_a_write_that_goes_directly_is_noticed_by_a_graph_that_kept_what_it_wrote() -> None:
    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
        p.mul_(0.5)

    with eb.trace() as run:
        layer = nn.Linear(2, 2, bias=False)
        optimizer = Updates(layer.parameters(), step)
        x = torch.rand(3, 2, requires_grad=True)
        for number in run.steps(3):
            layer(x).sum().backward()
            if number == 2:
                loss = layer(x).sum()
                optimizer.step()
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            optimizer.step()
