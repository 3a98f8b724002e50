"""A hand-written attention recorded on a GPU from an empty process, against the same traced without one."""

import math

import torch

import everybyte as eb

BATCH, LENGTH, WIDTH = 8, 4096, 16

WORKSPACE = 8_519_680
"""Bytes of cuBLAS's workspace, which each of the two threads that multiply takes once: the caller's and autograd's."""


def softmax(x):
    highest = x.max(-1, keepdim=True).values
    e = torch.exp(x - highest)
    total = e.sum(-1, keepdim=True)
    return e / total


def attention(q, k, v):
    scores = torch.einsum("bqd,bkd->bqk", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    return torch.einsum("bqk,bkd->bqd", softmax(scores), v)


def test_every_allocation_is_there_in_its_place_but_those_that_the_trace_says_it_leaves_out(recorded_events):
    with eb.trace(rules="cuda") as run:
        q, k, v = (torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
        out = attention(q, k, v)
        loss = out.sum()
        loss.backward()
    frame = run.timeline.frame()
    traced = frame[frame["action"] == "alloc"]["nbytes"].tolist()
    expected = [size for size in recorded_events("attention-small") if size > 0]
    for taken in (WORKSPACE, WORKSPACE):
        expected.remove(taken)
    assert traced == expected
    assert run.left_out == {"workspace of cuBLAS, taken once: 8,519,680 B before Hopper"}
