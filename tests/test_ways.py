"""Ways to take a step, side by side in one run, must show what each shows alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everybyte as eb
from everybyte.ways import take


def loss(model, batch):
    return model(batch).square().sum()


def whole(model, optimizer, batch, loss):
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_halves(model, optimizer, batch, loss):
    for half in batch.chunk(2):
        loss(model, half).backward()
    optimizer.step()
    optimizer.zero_grad()


def build():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return model, torch.optim.Adam(model.parameters(), fused=True)


@settings(max_examples=10)
@given(st.integers(2, 6))
def test_each_way_keeps_and_needs_what_it_does_by_itself_traced_and_measured(batch):
    x = torch.randn(2 * batch, 32)
    ways = {"first": whole, "whole": whole, "in halves": in_halves}
    (traced, kept), (measured, _) = (take(run, build, x, loss, ways) for run in (eb.trace("cpu"), eb.measure("cpu")))
    assert traced.equals(measured)
    assert [each.total_bytes for each in kept["whole"]] == [4 * 2 * batch * (32 + 64 + 32)]
    assert [each.total_bytes for each in kept["in halves"]] == 2 * [4 * batch * (64 + 32) + 4 * 2 * batch * 32]
    alone, _ = take(eb.measure("cpu"), build, x, loss, {"first": whole, "in halves": in_halves})
    assert alone.loc["in halves"].equals(measured.loc["in halves"])


def test_a_way_that_is_not_watched_takes_the_same_peak():
    x = torch.randn(4, 32)
    ways = {"first": whole, "whole": whole}
    watched, kept = take(eb.trace("cpu"), build, x, loss, ways)
    bare, none = take(eb.trace("cpu"), build, x, loss, ways, watched=())
    assert watched.equals(bare) and kept.keys() == ways.keys() and not none
