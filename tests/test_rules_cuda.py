"""What CUDA kernels keep, on a machine without a GPU: expected bytes are arithmetic on PyTorch's source."""

import dataclasses
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import everybyte as eb
from everybyte import gpus
from everybyte.rules import RULES, cuda_attention
from everybyte.rules.cuda_sort import radix_sort_pairs

BF16 = torch.bfloat16


def kept(function):
    return eb.saved(function, rules="cuda")


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_dropout_keeps_a_mask_of_one_byte_an_element_whatever_the_dtype(dtype):
    rows = kept(lambda: F.dropout(parameter(8, 64, dtype=dtype), 0.1)).rows
    assert [(row["nbytes"], row["dtype"], row["op"]) for row in rows] == [(8 * 64, "bool", "native_dropout")]


@pytest.mark.parametrize(
    "drop, nbytes",
    [
        (lambda x: F.dropout(x, 0.0) * 2, 0),
        (lambda x: F.dropout(x, 1.0), 4),  # times a single zero
        (lambda x: F.dropout(x * 1, 0.1, inplace=True), 4 * 512),  # in place never takes the fused kernel
        (lambda x: F.dropout2d(x.view(8, 64, 1, 1), 0.1), 4 * 512),  # a number for each of 8 x 64 channels
        (lambda x: F.dropout(x, 0.1, training=False) * 2, 0),
    ],
)
def test_dropout_that_cuda_composes_keeps_what_the_composition_keeps(drop, nbytes):
    assert kept(lambda: drop(parameter(8, 64))).total_bytes == nbytes


# -- normalisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, statistic", [(BF16, 4), (torch.float16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_layer_norm_keeps_its_input_and_two_statistics_in_the_type_it_sums_in(dtype, statistic):
    def forward():
        return nn.LayerNorm(64, dtype=dtype)(torch.empty(4, 8, 64, dtype=dtype))

    assert [row["nbytes"] for row in kept(forward).rows] == [2048 * dtype.itemsize, 32 * statistic, 32 * statistic]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rms_norm_keeps_its_input_and_one_statistic_in_single_precision(dtype):
    forward = lambda: nn.RMSNorm(64, dtype=dtype)(torch.empty(4, 8, 64, dtype=dtype))  # noqa: E731
    assert [row["nbytes"] for row in kept(forward).rows] == [2048 * dtype.itemsize, 32 * 4]


def test_rms_norm_of_two_dtypes_is_composed_and_keeps_copies_in_single_precision():
    forward = lambda: nn.RMSNorm(64)(parameter(4, 8, 64, dtype=BF16))  # noqa: E731
    # The input in fp32, its reciprocal norm for each row, and the normed input, which the weight's gradient needs.
    assert sorted(row["nbytes"] for row in kept(forward).rows) == [32 * 4, 2048 * 4, 2048 * 4]


def test_group_norm_keeps_statistics_in_the_input_s_type_and_batch_norm_in_single_precision():
    x = lambda: parameter(3, 4, 5, 5, dtype=torch.float16)  # noqa: E731
    group = kept(lambda: nn.GroupNorm(2, 4, dtype=torch.float16)(x()))
    assert [row["nbytes"] for row in group.rows] == [3 * 2 * 2, 3 * 2 * 2]
    batch = kept(lambda: nn.BatchNorm2d(4)(x()))
    assert [row["nbytes"] for row in batch.rows if row["role"] != "buffer"] == [4 * 4, 4 * 4]
    cudnn = kept(lambda: nn.BatchNorm2d(4).eval()(parameter(3, 4, 5, 5)))
    assert [row["nbytes"] for row in cudnn.rows if row["role"] not in ("buffer", "input")] == []
    flat = kept(lambda: nn.BatchNorm1d(4).eval()(parameter(3, 4)))
    assert [row["nbytes"] for row in flat.rows if row["role"] not in ("buffer", "input")] == [4 * 4, 4 * 4]
    flat = kept(lambda: nn.BatchNorm1d(4, dtype=torch.float16).eval()(parameter(3, 4, dtype=torch.float16)))
    assert [row["nbytes"] for row in flat.rows if row["role"] != "buffer"] == [4 * 4, 4 * 4]


def test_kernels_that_read_contiguous_memory_copy_what_is_not():
    n = 4 * 8 * 64
    across = lambda: parameter(64, 8).T  # noqa: E731
    with eb.trace(rules="cuda") as run:
        F.layer_norm(across(), (64,)).backward(torch.empty(64, 8).T)
        F.softmax(across(), -1)
        F.log_softmax(parameter(8, 64), -1).backward(torch.empty(64, 8).T)
    frame = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")
    assert frame.groupby("op")["nbytes"].apply(list).to_dict() == {
        "native_layer_norm": [n],
        "native_layer_norm_backward": [n, n],  # input and gradient
        "_softmax": [n],
        "_log_softmax_backward_data": [n],  # the gradient
    }


# -- products ----------------------------------------------------------------------------------------------------------


def test_a_product_copies_what_cublas_cannot_read():
    whole, n = torch.Tensor.contiguous, 4 * 8 * 16  # bytes of an [8, 16] operand
    layouts = {
        "as it is": (lambda x: x, 0),
        "transposed": (lambda x: whole(x.mT).mT, 0),
        "a part of longer rows": (lambda x: torch.empty(8, 48)[:, :16], 0),
        "one row for all": (lambda x: x[:1].expand(8, 16), n),
        "one number for all": (lambda x: x[:1, :1].expand(8, 16), n),
        "every other column": (lambda x: torch.empty(8, 32)[:, ::2], n),
    }
    for name, (laid_out, copied) in layouts.items():
        for batch in ((), (3,)):
            with eb.trace(rules="cuda") as run:
                x = laid_out(torch.empty(8, 16))
                x.expand(*batch, 8, 16) @ torch.empty(*batch, 16, 4)
            scratch = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")["nbytes"].sum()
            assert scratch == copied * math.prod(batch), name


# -- reductions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reduce, partial",
    [
        # Results fill the GPU or there is little to sum: none.
        (lambda: torch.ones(512, 1024).sum(0), []),
        (lambda: torch.ones(4096, 10_000).sum(-1), []),
        # All of 2**19 numbers by 512 threads, 1,024 each, four at once: 64 blocks leave 16 to each thread.
        (lambda: torch.ones(8, 4096, 16).sum(), [4 * 64, 4]),
        (lambda: torch.ones(8, 4096, 16).double().mean(), [8 * 64, 4]),
        (lambda: torch.ones(8, 4096, 16).amax(), [4 * 64, 4]),
        (lambda: torch.ones(8, 4096, 16).flatten().max(0), [16 * 64, 4]),  # pairs with a place
        # Columns of 4,096: blocks of 32 by 4 threads, four columns a thread, 1,024 numbers each: 64 blocks a column.
        (lambda: torch.ones(4, 1024, 1024).sum((0, 1)), [4 * 1024 * 64 * 32 * 4, 4 * 1024 // (32 * 4)]),
        (lambda: torch.ones(4, 1024, 1024, dtype=BF16).sum((0, 1)), [4 * 1024 * 64 * 32 * 4, 4 * 1024 // (32 * 4)]),
        (lambda: torch.ones(1024, 4096).T.sum(0), []),  # rows after all: each by one block
        # What is counted is first made whole numbers of 8 bytes.
        (lambda: torch.ones(1000, dtype=torch.bool).sum(), [8 * 1000]),
        (lambda: torch.ones(1000, dtype=BF16).sum(dtype=torch.float32), []),
        # 2**32 halves are summed in quarters, to one number in single precision between them.
        (lambda: torch.empty(2**32, dtype=BF16).sum(), [4, *4 * [4 * 2**30 // 512 // 256, 4]]),
    ],
)
def test_a_reduction_by_several_blocks_makes_a_partial_result_for_each(reduce, partial):
    with eb.trace(rules="cuda") as run:
        reduce()
    frame = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")
    assert frame["nbytes"].tolist() == partial


@pytest.mark.parametrize("gpu, blocks", [("3050ti", 20 * (1536 // 128) // 8), ("3060", 512 // 16)])
def test_a_small_gpu_is_filled_by_fewer_blocks_than_there_are_numbers_for(gpu, blocks):
    # 2,048 rows, 8 groups of 128 columns, blocks of 128 threads, four of them to a column: 512 numbers for each. There
    # are blocks as long as they have 16, or until the multiprocessors are full: 20 of 1,536 threads, or 28.
    with eb.trace(rules="cuda", gpu=gpu) as run:
        torch.empty(4, 512, 1024).sum((0, 1))
    frame = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")
    assert frame["nbytes"].tolist() == [4 * 1024 * 128 * blocks, 4 * 8]


# -- softmax and losses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax, torch.softmax])
@pytest.mark.parametrize("dtype, copied", [(torch.float16, False), (BF16, True)])
def test_a_softmax_in_single_precision_copies_a_bf16_input_but_not_an_fp16_one(softmax, dtype, copied):
    with eb.trace(rules="cuda") as run:
        softmax(parameter(8, 64, dtype=dtype), dim=-1, dtype=torch.float32).sum().backward()
    frame = run.timeline.frame()
    copies = frame.query("op == '_to_copy' and action == 'alloc'")["nbytes"].tolist()
    assert copies == ([8 * 64 * 4, 8 * 64 * 2] if copied else [])  # there, and back in backward


def test_the_gradient_of_a_softmax_needs_a_product_as_large_as_its_output():
    with eb.trace(rules="cuda") as run:
        (parameter(8, 64).softmax(-1) * torch.empty(8, 64)).sum().backward()
    made = run.timeline.frame().query("op == '_softmax_backward_data' and action == 'alloc'")
    assert list(zip(made["nbytes"], made["category"] == "scratch", strict=True)) == [(2048, False), (2048, True)]


def test_cross_entropy_keeps_the_log_softmax_in_the_logits_type_and_two_numbers():
    saved = kept(lambda: F.cross_entropy(parameter(8, 64, dtype=BF16), torch.zeros(8, dtype=torch.int64)))
    assert sorted(row["nbytes"] for row in saved.rows) == [2, 8 * 8, 8 * 64 * 2]  # total weight, targets, log-softmax


@pytest.mark.parametrize("chunks, per_logit, gib", [(1, 12, 12.72), (8, 7, 7.83)])
def test_the_loss_head_of_an_8b_model_peaks_as_was_counted_in_the_field(chunks, per_logit, gib):
    """Upcast chunk by chunk, the logits themselves stay, asked of torchtitan's developers.

    In one piece: log-softmax, its gradient and the logits' gradient, in fp32. In chunks: all logits in bf16, every
    chunk's log-softmax, and one chunk's two gradients.
    """
    n, h, v = 8192, 4096, 128_256
    with eb.trace(rules="cuda") as run:
        weight, x = parameter(v, h, dtype=BF16), parameter(n, h, dtype=BF16)
        targets = torch.zeros(n, dtype=torch.int64)
        for _ in run.steps(1):
            logits = x @ weight.T
            parts = zip(logits.chunk(chunks), targets.chunk(chunks), strict=True)
            losses = [F.cross_entropy(part.float(), target, reduction="sum") for part, target in parts]
            if chunks == 1:
                del logits, parts
            (sum(losses) / n).backward()
    peak = run.timeline.live(run.timeline.peak)
    assert peak[(peak["step"] == 0) & (peak["nbytes"] > 8)]["nbytes"].sum() == per_logit * n * v
    assert round((per_logit * n * v + 2 * v * h) / 2**30, 2) == gib


# -- indices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, sorted_ones", [(3072, 0), (3073, 3)])
def test_the_gradient_of_an_embedding_sorts_more_than_3072_tokens(tokens, sorted_ones):
    with eb.trace(rules="cuda") as run:
        (
            F.embedding(torch.zeros(tokens, dtype=torch.int64), parameter(50, 4)) * torch.empty(tokens, 4)
        ).sum().backward()
    frame = run.timeline.frame().query("op == 'embedding_dense_backward' and category == 'scratch'")
    highest = np.cumsum(np.where(frame["action"] == "alloc", frame["nbytes"], -frame["nbytes"])).max(initial=0)
    # Eight passes over 64 bits: offsets for 8 x 256 digits, one block's look-back, keys and values twice, 8 counters.
    of_the_sort = 8 * 256 * 8 + 256 * 4 + 2 * -(-8 * tokens // 256) * 256 + 256 + 255
    assert highest == (sorted_ones * 8 * tokens + of_the_sort if sorted_ones else 0)


@pytest.mark.parametrize(
    ("layer", "numbers", "states"), [(nn.LSTM, (6, 5, 10), 2), (nn.GRU, (5, 4, 8), 1), (nn.RNN, (1, 1, 2), 1)]
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_layer_is_one_call_whose_reserve_is_an_estimate_with_its_range(layer, numbers, states, batch_first):
    s, b, width, h, layers, directions = 7, 3, 5, 16, 2, 2
    with eb.trace(rules="cuda") as run:
        model = layer(width, h, num_layers=layers, bidirectional=True, batch_first=batch_first)
        x = torch.empty((b, s, width) if batch_first else (s, b, width), requires_grad=True)
        for _ in run.steps(1):
            model(x)[0].sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for p in model.parameters())
    frame = run.timeline.frame().query("action == 'alloc' and category != 'scratch'")
    state, unit = 4 * layers * directions * b * h, 4 * layers * directions * s * b * h
    made = frame.query("op == '_cudnn_rnn'")["nbytes"].tolist()
    assert made == [n for n in (4 * s * b * directions * h, *states * [state], numbers[0] * unit)]
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert frame.query("op == '_cudnn_rnn_backward'")["nbytes"].tolist() == [
        4 * s * b * width,
        *states * [state],
        weights,
    ]
    (said,) = run.not_covered
    assert f"an estimate, {numbers[0]} numbers" in said
    assert f"at least {numbers[1]} and at most {numbers[2]}" in said
    (remark,) = run.remarks
    assert f"keeps about {numbers[0] * unit:,} B" in remark
    assert f"between {numbers[1] * unit:,} B" in remark
    assert "workspace of cuDNN's recurrent layers, and the state of their dropout" in run.left_out


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_runs_a_recurrent_layer_in_float16_on_a_flat_copy_of_its_weights(half):
    s, b, width, h = 7, 3, 5, 16
    with eb.trace(rules="cuda") as run:
        model, x = nn.LSTM(width, h), torch.empty(s, b, width, requires_grad=True)
        for _ in run.steps(1):
            with torch.autocast("cuda", half):
                output, _ = model(x)
            assert output.dtype == torch.float16
            output.float().sum().backward()
        assert {x.grad.dtype, *(p.grad.dtype for p in model.parameters())} == {torch.float32}
    frame = run.timeline.frame().query("step == 0 and action == 'alloc'")
    weights = [p.numel() for p in model.parameters()]
    forward = frame.query("phase == 'forward' and category != 'scratch' and op != 'zeros'")  # without the first state
    assert forward["nbytes"].tolist()[:8] == [
        *(2 * sum(weights), 2 * b * h, 2 * b * h, 2 * s * b * width),  # the copy, the states, the input
        *(2 * s * b * h, 2 * b * h, 2 * b * h, 2 * 6 * s * b * h),  # the output, the states, the reserve
    ]
    gradients = frame.query("phase == 'backward' and category == 'gradient' and dtype == 'float32'")["nbytes"]
    assert sorted(gradients) == sorted(4 * n for n in weights)
    assert f"keeps about {2 * 6 * s * b * h:,} B" in run.remarks[0]


def test_without_a_backward_pass_a_recurrent_layer_keeps_nothing():
    with eb.trace(rules="cuda") as run:
        nn.LSTM(4, 8).eval()(torch.empty(3, 2, 4))
    made = run.timeline.frame().query("op == '_cudnn_rnn' and action == 'alloc'")["nbytes"].tolist()
    assert [n for n in made if n] == [4 * 3 * 2 * 8, 4 * 2 * 8, 4 * 2 * 8]
    assert run.remarks == []


@pytest.mark.parametrize("cell, name", [(nn.LSTMCell, "the fused LSTM cell"), (nn.GRUCell, "the fused GRU cell")])
def test_a_recurrent_cell_is_said_to_be_one_kernel_on_a_gpu(cell, name):
    saved = kept(lambda: cell(4, 8)(torch.empty(2, 4)))
    assert saved.not_covered == (name,)
    assert name in repr(saved)


def test_memory_that_no_rule_derives_is_named():
    with eb.trace(rules="cuda") as run:
        nn.Conv2d(4, 4, 1)(torch.empty(2, 4, 4, 4))
    assert run.left_out == {"workspace of cuDNN's convolution"}
    assert run.timeline.info["left_out"] == sorted(run.left_out)


def test_the_gradient_of_indexing_sorts_the_places():
    n = 8 * 6  # bytes of six places
    with eb.trace(rules="cuda") as run:
        rows, columns = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        parameter(5, 7, 3)[rows, columns].sum().backward()
    frame = run.timeline.frame().query("op == 'index_put'")
    assert (frame["category"] == "scratch").all()
    live = np.cumsum(np.where(frame["action"] == "alloc", frame["nbytes"], -frame["nbytes"]))
    values = 6 * 3 * 4  # a sum's gradient is one number, read many times: there is a copy of it for each
    assert live.max() == 4 * n + values + 1  # a number for each place, sorted too, where each was and is; CUB's byte
    assert frame[frame["action"] == "alloc"]["nbytes"].tolist() == [*4 * [n], values, *3 * [n], 1]


@pytest.mark.parametrize(
    ("gpu", "n", "itemsize", "bits", "nbytes"),
    [
        ("a100-80gb", 2304, 8, 14, 1),  # 256 threads, 19 x 4 / 8 pairs each
        ("a100-80gb", 2305, 8, 14, 2 * 256 * 8 + 1 * 1024 + 2 * 18_688 + 256 + 255),
        ("a100-80gb", 4096, 8, 14, 2 * 256 * 8 + 2 * 1024 + 2 * 32_768 + 256 + 255),  # blocks of 384 x 10
        ("h100", 4096, 8, 14, 2 * 256 * 8 + 1 * 1024 + 2 * 32_768 + 256 + 255),  # of 384 x 12
        ("t4", 4096, 8, 14, 2 * 256 * 8 + 2 * 1024 + 2 * 32_768 + 256 + 255),  # of 256 x 11
        ("a100-80gb", 4096, 8, 8, 1 * 256 * 8 + 2 * 1024 + 256 + 255),  # one pass needs no second copy
        ("a100-80gb", 4864, 4, 32, 1),
        ("a100-80gb", 10_000, 4, 32, 4 * 256 * 8 + 2 * 1024 + 2 * 40_192 + 256 + 255),  # of 384 x 17
    ],
)
def test_a_sort_takes_what_cub_lays_side_by_side(gpu, n, itemsize, bits, nbytes):
    with gpus.following(gpus.find(gpu)):
        assert radix_sort_pairs(n, itemsize, bits) == nbytes


# -- attention ---------------------------------------------------------------------------------------------------------


def qkv(*shape, kv_heads=None, dtype=BF16):
    """Query, key and value [b, a, s, d] that learn."""
    b, a, s, d = shape
    return tuple(parameter(b, heads, s, d, dtype=dtype) for heads in (a, kv_heads or a, kv_heads or a))


def backends(call):
    """The attention ops that a call ran."""
    with eb.trace(rules="cuda") as run:
        call()
    ops = set(run.timeline.frame()["op"])
    return {op for op in ops if op.startswith("_scaled") or op == "_safe_softmax"}, run


@pytest.mark.parametrize(
    "call, op",
    [
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16)), "flash"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16), dropout_p=0.1, is_causal=True), "flash"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, kv_heads=2), enable_gqa=True), "flash"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, dtype=torch.float32)), "efficient"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16), torch.ones(8, 8, dtype=torch.bool)), "efficient"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 264)), "efficient"),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 260)), None),  # no multiple of 8
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, dtype=torch.float64)), None),
        (lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 6, dtype=torch.float32)), None),
    ],
)
def test_attention_takes_the_kernel_that_a_gpu_takes(call, op):
    ran, run = backends(call)
    assert ran == ({f"_scaled_dot_product_{op}_attention"} if op else {"_safe_softmax"})
    assert bool(run.remarks) == (op is None)


@pytest.mark.parametrize("from_2_14", [False, True])
def test_which_kernels_share_heads_depends_on_the_version(from_2_14, monkeypatch):
    monkeypatch.setattr(cuda_attention, "_SHARED", from_2_14)
    mask = {"attn_mask": torch.ones(8, 8, dtype=torch.bool, device="meta")}
    for heads, options, op in [
        (2, {"enable_gqa": True} | mask, "efficient"),
        (1, mask, "efficient"),
        (1, {}, "flash"),
    ]:
        ran, _ = backends(lambda h=heads, o=options: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, kv_heads=h), **o))
        assert ran == ({f"_scaled_dot_product_{op}_attention"} if from_2_14 else {"_safe_softmax"})


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("backend, nbytes", [(None, 1_052_672), (SDPBackend.MATH, 1_835_008)])
def test_attention_without_a_fused_kernel_keeps_its_scores(rules, backend, nbytes):
    b, a, s, d = 1, 4, 256, 64
    one, scores = 4 * b * a * s * d, 4 * b * a * s * s
    # Fused: query, key, value, output and the log-sum-exp. Composed: query and key scaled, value, and the softmax.
    assert nbytes == (4 * one + 4 * b * a * s if backend is None else 3 * one + scores)

    def forward():
        q, k, v = (torch.empty(b, a, s, d, requires_grad=True) for _ in range(3))
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return F.scaled_dot_product_attention(q, k, v)

    assert eb.saved(forward, rules=rules).total_bytes == nbytes


def test_attention_that_makes_its_scores_says_how_large_they_are_and_why():
    call = lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16), torch.ones(8, 8), enable_gqa=True)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        _, run = backends(call)
    (remark,) = run.remarks
    assert "test_rules_cuda.py:" in remark
    assert f"[2, 4, 8, 8], {2 * 4 * 8 * 8 * 4:,} B" in remark  # in fp32
    assert "flash: switched off; memory-efficient: switched off" in remark


def test_what_a_trace_remarks_is_told_with_what_is_kept():
    saved = kept(lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, dtype=torch.float64)))
    (remark,) = saved.remarks
    assert "makes the scores" in remark


def test_a_choice_of_kernels_that_none_fits_fails_as_on_a_gpu():
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"No available kernel.*not .*float32"),
    ):
        backends(lambda: F.scaled_dot_product_attention(*qkv(2, 4, 8, 16, dtype=torch.float32)))


def test_flash_attention_keeps_its_operands_its_output_a_log_sum_exp_and_the_generator_s_state():
    b, s, h, a = 1, 4096, 8192, 32

    def forward():
        project, back = (nn.Linear(h, n, bias=False, dtype=BF16) for n in (3 * h, h))
        x = torch.empty(b, s, h, dtype=BF16)
        q, k, v = (part.view(b, s, a, h // a).transpose(1, 2) for part in project(x).chunk(3, dim=-1))
        return back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))

    saved = kept(forward)
    by_operand = {row["operand"]: row["nbytes"] for row in saved.rows}
    assert by_operand["rng_state"] == 2 * 8 and by_operand["unused"] == 8
    assert by_operand["logsumexp"] == 4 * b * s * a
    without_state = saved.total_bytes - 24
    assert without_state == 2 * s * b * h + 6 * s * b * h + 2 * s * b * h + 4 * s * b * a == 336_068_608
    assert without_state + saved.output.unsaved_bytes == 403_177_472


def test_the_memory_efficient_kernel_pads_its_log_sum_exp_and_keeps_its_seed_on_the_host():
    b, a, s, d = 2, 4, 33, 16
    saved = kept(lambda: F.scaled_dot_product_attention(*qkv(b, a, s, d, dtype=torch.float32), dropout_p=0.1))
    assert sorted(row["nbytes"] for row in saved.rows) == sorted([4 * b * a * s * d, 4 * b * a * 64])


def test_flash_attention_splits_the_keys_where_there_are_too_few_queries_to_fill_the_gpu():
    b, a, s, t, d = 1, 4, 1, 4096, 128
    # 4 blocks of queries for 2 x 108 places, 32 blocks of 128 keys. Splitting n ways fills 4n/216 of the places; the
    # fewest parts that fill 85 % as many as the best number, 32, does are 32 (next lower with other blocks a part: 16).
    with eb.trace(rules="cuda") as run:
        query, key, value = (torch.empty(b, a, length, d, dtype=BF16) for length in (s, t, t))
        F.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(*qkv(4, 16, 256, d))  # 4 x 16 x 4 blocks of 64 queries fill it as they are
    scratch = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")["nbytes"].tolist()
    assert scratch == [4 * 32 * b * a * s, 4 * 32 * b * a * s * d]


def test_flash_attention_s_backward_sums_in_single_precision_beside_its_gradients():
    b, a, s, d = 2, 4, 130, 40
    with eb.trace(rules="cuda") as run:
        q, k, v = qkv(b, a, s, d)
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    frame = run.timeline.frame().query("op == '_scaled_dot_product_flash_attention_backward' and action == 'alloc'")
    scratch = frame[frame["category"] == "scratch"]["nbytes"].tolist()
    copies = 2 * [2 * b * a * s * d]  # gradient and output, into the order [b, s, a, d]
    assert scratch == [*copies, 4 * b * a * 256, 4 * b * 256 * a * 64]  # s up to a multiple of 128, d of 32
    assert frame[frame["category"] != "scratch"]["nbytes"].tolist() == 3 * [2 * b * a * s * d]


def scratch_of(run, op):
    """Bytes that a kernel took for itself, in order."""
    return run.timeline.frame().query("op == @op and category == 'scratch' and action == 'alloc'")["nbytes"].tolist()


def test_flash_attention_s_backward_of_grouped_heads_has_gradients_for_every_head_first():
    b, a, s, d = 2, 4, 130, 40
    with eb.trace(rules="cuda") as run:
        q, k, v = qkv(b, a, s, d, kv_heads=2)
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    expanded = 2 * [2 * b * a * s * d]  # of key and value, in bf16, before they are summed over each group
    assert scratch_of(run, "_scaled_dot_product_flash_attention_backward")[-2:] == expanded


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="the memory-efficient kernel takes groups from 2.14 on")
def test_the_memory_efficient_backward_of_grouped_heads_has_gradients_for_every_head_first():
    b, a, s, d = 2, 4, 130, 40
    with eb.trace(rules="cuda") as run:
        q, k, v = qkv(b, a, s, d, kv_heads=2)
        mask = torch.ones(s, s, dtype=torch.bool)
        F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).sum().backward()
        assert k.grad.shape == v.grad.shape == (b, 2, s, d)
    copy = [2 * b * a * s * d]  # of the gradient, which is a number expanded
    expanded = 2 * [2 * b * a * s * d]  # of key and value, in bf16, before they are summed over each group
    assert scratch_of(run, "_scaled_dot_product_efficient_attention_backward") == [*copy, *expanded, 4 * b * a * s]


def test_the_memory_efficient_kernel_sums_wide_heads_of_halves_outside_of_registers():
    b, a, s, d = 2, 4, 8, 264
    with eb.trace(rules="cuda") as run:
        for dtype, width in ((BF16, d), (torch.float32, d), (BF16, 128)):
            q, k, v = qkv(b, a, s, width, dtype=dtype)
            F.scaled_dot_product_attention(q, k, v, torch.ones(s, s, dtype=torch.bool))
    assert scratch_of(run, "_scaled_dot_product_efficient_attention") == [4 * b * a * s * d]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_memory_efficient_backward_sums_rows_by_way_of_a_product_where_its_kernel_does_not(dtype):
    b, a, s, d = 2, 4, 8, 16
    with eb.trace(rules="cuda") as run:
        out = F.scaled_dot_product_attention(*qkv(b, a, s, d, dtype=dtype), torch.ones(s, s, dtype=torch.bool))
        out.backward(torch.empty(b, s, a, d, dtype=dtype).transpose(1, 2))
    rows = 4 * b * a * s
    expected = [rows] if dtype == BF16 else [rows * d, rows, rows]
    assert scratch_of(run, "_scaled_dot_product_efficient_attention_backward") == expected


def test_cudnn_s_attention_makes_a_log_sum_exp_only_for_a_backward_pass():
    b, a, s, d = 2, 4, 8, 16
    made = {}
    for learns in (True, False):
        with eb.trace(rules="cuda") as run, sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.set_grad_enabled(learns):
            F.scaled_dot_product_attention(*qkv(b, a, s, d))
        frame = run.timeline.frame().query("op == '_scaled_dot_product_cudnn_attention' and action == 'alloc'")
        made[learns] = frame["nbytes"].tolist()
    out, lse = 2 * b * a * s * d, 4 * b * a * s
    assert made[True][:2] == [out, lse]
    assert lse not in made[False] and made[False][0] == out


def test_a_softmax_that_minds_rows_without_a_score_takes_what_it_is_composed_of():
    b, a, s, d = 2, 4, 8, 16
    with eb.trace(rules="cuda") as run, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*qkv(b, a, s, d, dtype=torch.float32))
    scores = b * a * s * s
    # The plain softmax, -inf, where a score is -inf, which rows are so throughout, and 0.
    assert scratch_of(run, "_safe_softmax") == [4 * scores, 4, scores, b * a * s, 4]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    "causal, mask, grouped", [(True, None, 4), (False, "bool", 4), (False, "number", 2), (True, None, 1)]
)
def test_attention_with_scores_allocates_what_pytorch_s_own_composition_does(dtype, causal, mask, grouped, monkeypatch):
    def step():
        q, k, v = qkv(2, 4, 16, 8, kv_heads=grouped, dtype=dtype)
        m = torch.empty(16, 16, dtype=torch.bool if mask == "bool" else dtype) if mask else None
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, m, is_causal=causal, enable_gqa=grouped < 4)
        out.sum().backward()

    def allocations(rules):
        monkeypatch.setitem(RULES, "cuda", rules)
        with eb.trace(rules="cuda") as run:
            step()
        frame = run.timeline.frame()
        live = run.timeline.live_bytes[(frame["action"] == "alloc").to_numpy()]
        return list(zip(frame[frame["action"] == "alloc"]["op"], live.tolist(), strict=True))

    cuda = RULES["cuda"]
    left_to_pytorch = {f: rule for f, rule in cuda.functions.items() if f is not F.scaled_dot_product_attention}
    assert allocations(cuda) == allocations(dataclasses.replace(cuda, functions=left_to_pytorch))


# -- one layer of a decoder --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm: [b, s, h] -> [b, s, h], in bf16."""

    def __init__(self, s, h, a, dropout, attention):
        super().__init__()
        self.a, self.attention, self.p = a, attention, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(h, dtype=BF16) for _ in range(2))
        self.qkv, self.proj = nn.Linear(h, 3 * h, dtype=BF16), nn.Linear(h, h, dtype=BF16)
        self.up, self.down = nn.Linear(h, 4 * h, dtype=BF16), nn.Linear(4 * h, h, dtype=BF16)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(s, s, dtype=torch.bool).triu(1))

    def attend(self, x):
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.a, h // self.a).transpose(1, 2) for part in self.qkv(x).split(h, dim=-1))
        if self.attention == "flash":
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(h // self.a)
            if self.attention == "causal":
                scores = scores.masked_fill(self.future, -math.inf)
            out = self.dropout(scores.softmax(-1)) @ v
        return self.proj(out.transpose(1, 2).reshape(b, s, h))

    def forward(self, x):
        x = x + self.dropout(self.attend(self.norms[0](x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


sizes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))  # b, s, a, d / 8


@settings(max_examples=25)
@given(sizes, st.sampled_from(["plain", "causal"]), st.booleans())
def test_a_layer_with_eager_attention_keeps_the_textbook_s_bytes_and_the_statistics(shape, attention, drops):
    b, s, a, d = shape
    h = 8 * a * d

    def forward():
        return Layer(s, h, a, 0.1 if drops else 0.0, attention)(torch.empty(b, s, h, dtype=BF16))

    textbook = 34 * s * b * h + 5 * a * s**2 * b if drops else 32 * s * b * h + 2 * a * s**2 * b
    mask = s**2 if attention == "causal" else 0
    assert kept(forward).total_bytes == textbook + 16 * s * b + mask


@settings(max_examples=25)
@given(sizes, st.booleans())
def test_a_layer_with_flash_attention_keeps_no_scores(shape, drops):
    b, s, a, d = shape
    h = 8 * a * d

    def forward():
        return Layer(s, h, a, 0.1 if drops else 0.0, "flash")(torch.empty(b, s, h, dtype=BF16))

    saved = kept(forward)
    state = [row["nbytes"] for row in saved.rows if row["operand"] in ("rng_state", "unused")]
    assert state == [16, 8]
    assert saved.total_bytes == (34 if drops else 32) * s * b * h + 4 * b * a * s + 16 * s * b + 24


# -- two devices -------------------------------------------------------------------------------------------------------


def test_new_tensors_are_on_the_gpu_and_say_so():
    with eb.trace(rules="cuda"):
        made = [
            torch.zeros(2),
            torch.tensor([1.0]),
            nn.Linear(2, 2).weight,
            torch.ones(2, device="cuda:0"),
            torch.ones(2).cuda(),
        ]
        for tensor in made:
            assert tensor.device == torch.device("cuda:0")
            assert (tensor.is_cuda, tensor.is_cpu, tensor.is_meta, tensor.get_device()) == (True, False, False, 0)


def test_code_that_asks_for_a_device_or_a_type_hears_of_the_gpu():
    with eb.trace(rules="cuda"):
        assert torch.get_default_device() == torch.device("cuda:0")
        with torch.device("cpu"):
            assert torch.get_default_device() == torch.device("cpu")
            assert nn.Linear(2, 2).weight.is_cpu
        assert torch.zeros(2).half().type() == "torch.cuda.HalfTensor"
        assert torch.zeros(2, device="cpu").pin_memory().to("cuda", non_blocking=True).is_cuda
    assert torch.get_default_device() == torch.device("cpu")


def test_code_that_asks_whether_there_is_a_gpu_takes_its_branch_for_one():
    with eb.trace(rules="cuda") as run:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        assert device == torch.accelerator.current_accelerator() and torch.accelerator.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.is_bf16_supported()) == (1, 0, True)
        nn.Linear(4, 4, device="cpu").to(device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    assert run.timeline.peak_bytes == 4 * (4 * 4 + 4)


def test_a_device_may_be_named_by_its_number():
    with eb.trace(rules="cuda"):
        for moved in (torch.ones(2, device=0), torch.ones(2, device="cpu").cuda(0), torch.ones(2, device="cpu").to(0)):
            assert moved.is_cuda
        for module in (nn.Linear(2, 2, device="cpu").cuda(0), nn.Linear(2, 2, device="cpu").to(0)):
            assert module.weight.is_cuda
        with pytest.raises(ValueError, match="device="):
            torch.ones(2, device=1)


def test_what_is_put_on_the_host_is_really_there_and_takes_no_memory_of_the_gpu():
    with eb.trace(rules="cuda") as run:
        host = torch.arange(6.0, device="cpu").view(2, 3) * 2
        assert host.is_cpu and host.tolist() == [[0, 2, 4], [6, 8, 10]]
        assert host.numpy().sum() == 30
        assert len(run.timeline) == 0
        for placed in (host.to("cuda"), host.cuda(), run.to_device(host), torch.zeros(2, 3).copy_(host)):
            assert placed.is_cuda and placed.shape == (2, 3)
    made = run.timeline.frame().query("action == 'alloc'")
    assert made["nbytes"].tolist() == 4 * [6 * 4]
    assert set(made["device"]) == {"cuda:0"}


def test_a_value_that_comes_back_to_the_host_is_zero_and_recorded_unless_it_is_known():
    with eb.trace(rules="cuda") as run:
        known = torch.tensor([1.0, 2.0])
        unknown = torch.randn(2)
        assert known.cpu().tolist() == [1.0, 2.0] and known.cpu().is_cpu
        assert not run.unknown_reads
        assert unknown.to("cpu", torch.float64).dtype == torch.float64
        assert unknown.detach().cpu().numpy().tolist() == [0.0, 0.0]
        assert len(run.unknown_reads) == 1  # where the values are asked for, not where they are copied
        with pytest.raises(TypeError, match="to copy the tensor to host memory"):
            unknown.numpy()


def test_tensors_of_two_devices_do_not_meet_but_a_single_number_may_come_from_the_host():
    with eb.trace(rules="cuda") as run:
        here = torch.randn(4, 4)
        there = torch.ones(4, 4, device="cpu")
        assert (here * torch.tensor(2.0, device="cpu")).is_cuda
        with pytest.raises(RuntimeError, match=r"test_rules_cuda.py:\d+: mul: Expected all tensors.*run.to_device"):
            here * there
        assert here[torch.tensor([0, 2], device="cpu")].shape == (2, 4)  # indices may come from the host
    assert run.timeline.frame().query("op == 'index'")["nbytes"].iloc[0] == 2 * 4 * 4


def test_a_device_that_is_not_there_is_refused():
    with eb.trace(rules="cuda"):
        with pytest.raises(ValueError, match=r"device=.cuda:1. in a trace by CUDA rules; use .cuda."):
            torch.zeros(2, device="cuda:1")
        with pytest.raises(ValueError, match="device='mps'"):
            torch.zeros(2).to("mps")


def test_batches_of_a_data_loader_stay_on_the_host_until_they_are_moved():
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.tensor([float(i) ** 2])

    with eb.trace(rules="cuda") as run:
        batches = list(torch.utils.data.DataLoader(Squares(), batch_size=4, shuffle=True))
        assert sorted(torch.cat(batches).flatten().tolist()) == [0, 1, 4, 9, 16, 25, 36, 49]
        assert len(run.timeline) == 0
        assert batches[0].to("cuda").is_cuda


def test_a_number_beside_a_tensor_is_the_host_s():
    with eb.trace(rules="cuda") as run:
        (parameter(16) * 0.5).sum().backward()
    assert run.timeline.frame().query("nbytes == 8").empty


def test_a_checkpointed_layer_keeps_its_input_and_no_state_of_a_generator_on_the_gpu():
    def forward():
        x = torch.empty(2, 16, 64, dtype=BF16, requires_grad=True)
        return checkpoint(Layer(16, 64, 4, 0.1, "causal"), x, use_reentrant=False)

    assert kept(forward).total_bytes == 2 * 16 * 64 * 2


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach, copies_at_peak", [(None, 5.0), (True, 5.0), (False, 4 + 3 / 16)])
def test_adam_takes_foreach_on_cuda_and_then_peaks_a_copy_of_the_parameters_higher(optimizer, foreach, copies_at_peak):
    with eb.trace(rules="cuda") as run:
        parameters = [parameter(256, 1024) for _ in range(16)]
        step = optimizer(parameters, foreach=foreach)
        for _ in run.steps(2):
            for p in parameters:
                p.grad = torch.empty_like(p)
            step.step()
            step.zero_grad()
    one_copy = 16 * 256 * 1024 * 4
    assert run.timeline.peak_bytes == copies_at_peak * one_copy


def test_an_optimizer_counts_its_steps_on_the_host():
    with eb.trace(rules="cuda") as run:
        parameters = [parameter(8)]
        adam = torch.optim.Adam(parameters)
        for _ in run.steps(3):
            parameters[0].sum().backward()
            adam.step()
        step = adam.state[parameters[0]]["step"]
    assert step.is_cpu and step.item() == 3.0
    state = run.timeline.frame().query("category == 'optimizer state' and action == 'alloc'")
    assert state["nbytes"].tolist() == [32, 32]
