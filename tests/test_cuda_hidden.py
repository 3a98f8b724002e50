"""What CUDA kernels take beside their results where they sort, select, draw, or are made of other ops.

Expected bytes are arithmetic on PyTorch's source, or those of a run on the CPU where one function serves every device.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import everybyte as eb

N = 400_000  # bytes of 100 rows of 1,000 numbers


def allocated(run):
    frame = run.timeline.frame()
    return frame[frame["action"] == "alloc"]["nbytes"].tolist()


def taken(function, *shape, **options):
    """Bytes of all that a call on a tensor allocates on a GPU, and the trace."""
    with eb.trace(rules="cuda") as run:
        x = torch.ones(*shape, **options)
        before = len(allocated(run))
        function(x)
        made = allocated(run)[before:]
    return made, run


ALIKE = [
    lambda x: F.mse_loss(x, x.detach()).backward(),
    lambda x: F.mse_loss(x, x.detach(), reduction="sum").backward(),
    lambda x: F.mse_loss(x, x.detach(), reduction="none").mean().backward(),
    lambda x: F.smooth_l1_loss(x, x.detach()),
    lambda x: F.huber_loss(x, x.detach()).backward(),
    lambda x: x.logsumexp(-1).sum().backward(),
    lambda x: x.logsumexp((0, 1), keepdim=True).backward(),
    lambda x: torch.dist(x, x),
    lambda x: x.isinf().any(),
    lambda x: torch.multinomial(x.detach(), 1),
    lambda x: torch.multinomial(x.detach(), 3),
]


@pytest.mark.parametrize("body", ALIKE)
def test_what_one_function_serves_on_every_device_takes_on_cuda_what_it_takes_on_the_cpu(body):
    large = []
    for run in (eb.measure(device="cpu"), eb.trace(rules="cuda")):
        with run:
            body(torch.ones(100, 1000, requires_grad=True))
        large.append(Counter(nbytes for nbytes in allocated(run) if nbytes >= 100_000))
    assert large[0] == large[1]


def test_a_log_sigmoid_has_no_buffer_on_cuda_and_neither_has_the_loss_that_is_made_of_it():
    """`ATen/native/cuda/Activation.cpp`; `ATen/native/Loss.cpp`: the log sigmoid, and 1 - target, to be the loss."""
    forward, _ = taken(lambda x: F.logsigmoid(x), 100, 1000)
    assert forward == [N]
    loss, _ = taken(lambda x: F.binary_cross_entropy_with_logits(x, x), 100, 1000)
    assert sorted(loss, reverse=True)[:3] == [N, N, 4]


@pytest.mark.parametrize(
    "shape, dim, hidden",
    [
        ((100, 1000), -1, [8 * 1000]),  # places in a row, for a moment
        ((1000, 100), 0, [8 * 1000]),
        ((1, 100_000), -1, [8 * 100_000]),
        ((100, 5000), -1, [8 * 500_000, 8 * 500_000, 4 * 500_000]),  # places twice, and the sorted numbers
        ((200, 5000), -1, [8 * 1_000_000]),
        ((5000, 200), 0, [4_000_000, 4_000_000, 8_000_000, 8_000_000]),  # first brought into rows
    ],
)
def test_a_sort_takes_places_and_for_long_rows_copies(shape, dim, hidden):
    made, run = taken(lambda x: x.sort(dim), *shape)
    numbers = shape[0] * shape[1]
    assert made == [4 * numbers, 8 * numbers, *hidden]
    assert bool(run.left_out) == (shape[dim] > 4096)


def test_a_selection_takes_nothing_unless_it_is_long_or_its_row_is():
    assert taken(lambda x: x.topk(5), 100, 1000)[0] == [4 * 500, 8 * 500]
    assert taken(lambda x: x.topk(5), 100, 1000)[1].left_out == set()
    made, run = taken(lambda x: x.topk(5, 0), 20_000, 1)
    assert (made, len(run.left_out)) == ([4 * 5, 8 * 5], 1)
    made, _ = taken(lambda x: x.t().topk(5_000), 10_000, 2)
    places, numbers = 8 * 10_000, 4 * 10_000
    sort = [places, places, numbers]
    assert made == [numbers, places, 4 * 20_000, places, numbers, *sort, places]


def test_a_median_of_all_sorts_all():
    made, _ = taken(lambda x: x.median(), 100, 30)
    assert made == [4 * 3000, 8 * 3000, 8 * 3000, 4]


def test_what_cub_or_a_mask_takes_is_named():
    for call, name in (
        (lambda x: x[x > 0], "where a mask is true"),
        (lambda x: x[0].cumsum(0), "one row"),
        (lambda x: x.masked_scatter_(x > 0, x), "masked_scatter()"),
        (lambda x: torch.randperm(1000), "randperm()"),
        (lambda x: torch.bincount(torch.arange(4), minlength=9), "bincount()"),
        (lambda x: (x > 0).nonzero(), "nonzero()"),
    ):
        _, run = taken(call, 4, 4)
        assert len(run.left_out) == 1 and name in next(iter(run.left_out))
    _, run = taken(lambda x: (x.cumsum(1), x[torch.tensor([1, 2])], x.sort()), 4, 4)
    assert run.left_out == set()


def test_sequences_are_packed_by_way_of_copies_of_their_parts():
    """`ATen/native/PackedSequence.cpp`: two steps of three sequences and one of two, then these together."""

    def body(run):
        padded = run.to_device(np.ones((3, 3, 8), "float32"))
        before = len(allocated(run))
        torch.nn.utils.rnn.pack_padded_sequence(padded, [3, 3, 2], batch_first=True)
        return allocated(run)[before:]

    with eb.trace(rules="cuda") as run:
        made = body(run)
    assert made == [4 * 8 * 6, 4 * 8 * 2, 4 * 8 * 8]
