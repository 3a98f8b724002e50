"""A hand-written attention recorded on a GPU from an empty process, against the same traced without one."""

import math

import pytest
import torch

import everybyte as eb

BATCH, LENGTH, WIDTH = 8, 4096, 16


def softmax(x):
    highest = x.max(-1, keepdim=True).values
    e = torch.exp(x - highest)
    total = e.sum(-1, keepdim=True)
    return e / total


def attention(q, k, v):
    scores = torch.einsum("bqd,bkd->bqk", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    return torch.einsum("bqk,bkd->bqd", softmax(scores), v)


@pytest.fixture(scope="module")
def run():
    with eb.trace(rules="cuda") as run:
        q, k, v = (torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
        out = attention(q, k, v)
        loss = out.sum()
        loss.backward()
    return run


def test_every_allocation_is_there_in_its_place_with_the_workspace_of_each_thread(run, recorded_events):
    frame = run.timeline.with_workspaces().frame()
    traced = frame[frame["action"] == "alloc"]["nbytes"].tolist()
    assert traced == [size for size in recorded_events("attention-small") if size > 0]
    assert [taken.nbytes for taken in run.workspaces] == [8_519_680, 8_519_680]
    assert run.left_out == set()


def test_allocated_and_reserved_peak_where_the_gpu_s_did(run):
    replay = eb.Allocator().replay(run.timeline.with_workspaces())
    assert (replay.peak_allocated, replay.peak_reserved) == (3_249_144_832, 3_781_165_056)
