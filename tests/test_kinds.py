"""Tensors that are more, or less, than a stretch of memory: traced as they run, or refused in one line."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agree
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import everybyte as eb


class Wrapper(torch.Tensor):
    """A tensor round another one, whose class computes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapper, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


OTHERS = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(3)]),
    "Wrapper": lambda: Wrapper(torch.ones(4, 4)),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.ones(4, 4)),
}


RUNS = (eb.trace, lambda: eb.trace(rules="cuda"), eb.measure)


@pytest.mark.parametrize("begin", RUNS)
def test_no_run_takes_what_is_no_plain_tensor(begin):
    others = {kind: make() for kind, make in OTHERS.items()}
    with begin() as run:
        for kind, other in others.items():
            holder = nn.Module()
            holder.register_buffer("table", other)
            for given in (other, holder):
                with pytest.raises(TypeError, match=f"plain dense tensors, not .*{kind}"):
                    run.to_device(given)


@pytest.mark.parametrize("begin", RUNS[:2])
def test_what_is_no_plain_tensor_and_was_made_before_meets_no_traced_one(begin):
    others = {kind: make() for kind, make in OTHERS.items()}
    with begin() as run:
        traced = run.to_device(torch.ones(4, 4))
        for kind, other in others.items():
            with pytest.raises(NotImplementedError, match=rf"test_kinds.py:\d+: .*{kind}.* cannot be traced"):
                torch.add(traced, other)


@pytest.mark.parametrize("begin", RUNS[:2])
def test_what_is_no_plain_tensor_cannot_be_made_in_a_trace(begin):
    with begin():
        for kind in OTHERS.keys() - {"Wrapper"}:
            with pytest.raises(NotImplementedError, match=r"test_kinds.py:\d+: "):
                OTHERS[kind]()


def wrapped(run):
    x = Wrapper(torch.randn(4, 4))
    for _ in run.steps(2):
        x = (x @ torch.randn(4, 4)).sin() * 2.0


def jagged(run):
    x, layer = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged), nn.Linear(4, 3)
    layer(x).values().sum().backward()


def without_shapes(run):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), torch.randn(3, 8)
    model(x).sum().backward()


def per_sample(run):
    weight, x = torch.randn(8, 4), torch.randn(3, 8)
    torch.vmap(torch.func.grad(lambda w, row: (row @ w).sin().sum()), (None, 0))(weight, x)


@pytest.mark.parametrize("body", [wrapped, jagged, without_shapes, per_sample])
def test_a_tensor_round_others_is_traced_as_it_runs(body):
    assert_agree(body)


def test_what_bytes_of_a_sparse_tensor_are_kept_cannot_be_said():
    weight = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="cannot be said of a tensor of layout"):
        eb.saved(lambda: torch.ones(4, 4).to_sparse() * weight)


def test_forward_mode_differentiation_is_said_not_to_be_covered():
    for rules in ("cpu", "cuda"):
        with eb.trace(rules=rules) as run:
            torch.func.jvp(torch.sin, (torch.ones(3),), (torch.ones(3),))
        assert run.timeline.info["not_covered"] == ["forward-mode differentiation"]
