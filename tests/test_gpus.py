"""GPUs by name, and what kernels do otherwise from one to the next: expected values are arithmetic on the sources."""

import re
from pathlib import Path

import made
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import everybyte as eb
from everybyte import gpus
from everybyte.units import GiB, MiB

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, key",
    [
        ("a4000", "a4000"),
        ("RTX A4000", "a4000"),
        ("NVIDIA RTX A4000", "a4000"),
        ("rtx-3050-ti", "3050ti"),
        ("RTX 3050 Ti Laptop GPU", "3050ti"),
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100 PCIe 40GB", "a100-40gb"),
        ("A10G", "a10g"),
        ("A10", "a10"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(name, key):
    assert gpus.find(name).key == key


def test_every_row_is_found_by_its_key_and_by_its_name_and_names_its_source():
    for row in gpus.TABLE:
        assert gpus.find(row.key) is row and gpus.find(row.name) is row and gpus.find(row) is row
        assert row.source
        assert row.precision == 0 or "MiB" in row.source or "inferred" in row.source


@pytest.mark.parametrize(
    "name, message",
    [
        ("a100", "say which, a100-40gb or a100-80gb"),
        ("v100", "say which, v100-16gb or v100-32gb"),
        ("h10", "is not in the table; it has .*h100-80gb"),
        ("rx7900", "is not in the table; it has p100, v100-16gb"),
        ("", "is not in the table"),
    ],
)
def test_a_name_of_none_or_of_several_is_refused_with_names_near_it(name, message):
    with pytest.raises(ValueError, match=f"gpu='{name}'.*{message}"):
        eb.trace(rules="cuda", gpu=name)


def test_a_gpu_that_cannot_be_is_refused():
    known = {"key": "x", "name": "x", "total": GiB, "capability": (8, 6), "processors": 20, "l2": 0, "source": "here"}
    assert gpus.GPU(**known).usable == (GiB - 614 * MiB, GiB - 112 * MiB)
    for field, wrong in (("total", 0), ("processors", 2.5), ("capability", (8, 5)), ("context", (2, 1))):
        with pytest.raises(ValueError, match=field):
            gpus.GPU(**{**known, field: wrong})
    with pytest.raises(TypeError, match="named or described"):
        gpus.find(86)


def test_the_memory_of_a_gpu_is_less_than_its_maker_says_and_not_much_less():
    makers = {"t4": 16, "p100": 16, "a4000": 16, "3050ti": 4, "2080ti": 11, "4090": 24, "5090": 32, "l40s": 48}
    for key, gigabytes in makers.items():
        assert 0.9 < gpus.find(key).total / (gigabytes * GiB) < 1


def test_an_allocator_has_of_a_gpu_what_the_largest_context_leaves():
    a4000 = gpus.find("a4000")
    assert eb.Allocator(gpu="a4000").device().total == a4000.total - a4000.context[1]
    assert eb.Allocator(gpu=a4000, per_process_memory_fraction=0.5).device().allowed == a4000.total // 2
    with pytest.raises(ValueError, match="say one of them"):
        eb.Allocator("16 GB", gpu="a4000")
    with pytest.raises(ValueError, match="is not in the table"):
        eb.Allocator(gpu="a400")


# -- what a trace follows ----------------------------------------------------------------------------------------------


def test_a_trace_says_which_gpu_it_follows():
    assert eb.trace(rules="cuda").gpu.key == "a100-80gb"
    with eb.trace(rules="cuda", gpu="RTX A4000") as run:
        assert run.gpu.key == gpus.followed().key == "a4000"
    assert run.timeline.info["gpu"] == "NVIDIA RTX A4000"
    assert gpus.followed().key == "a100-80gb"
    assert eb.trace(rules="cpu").gpu is None
    with pytest.raises(ValueError, match="gpu='a4000' has no meaning under rules='cpu'"):
        eb.trace(rules="cpu", gpu="a4000")


def attention(gpu, dtype=FP16, d=16, *, learns=True, dropout=0.0, mask=None):
    """The attention ops of a call on a GPU, and the run."""
    with eb.trace(rules="cuda", gpu=gpu) as run:
        q, k, v = (torch.empty(2, 4, 8, d, dtype=dtype, requires_grad=learns) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, mask, dropout)
    ops = set(run.timeline.frame()["op"])
    ran = {op.removeprefix("_scaled_dot_product_").removesuffix("_attention") for op in ops if op.startswith("_s")}
    return ran, run


@pytest.mark.parametrize(
    "gpu, call, kernel",
    [
        ("a100-80gb", {}, "flash"),
        ("t4", {}, "efficient"),  # flash from 8.0 on
        ("p100", {}, "efficient"),
        ("v100-16gb", {"dtype": BF16}, None),  # bf16 from 8.0 on
        ("t4", {"dtype": BF16}, None),
        ("a100-80gb", {"dtype": FP32, "d": 6}, None),  # 128 bits for tensor cores: 4 numbers of fp32
        ("t4", {"dtype": FP32, "d": 6}, "efficient"),  # which have none of fp32 there
        ("t4", {"d": 6}, None),  # 8 halves
        ("p100", {"d": 6}, "efficient"),  # no tensor cores
        ("a100-80gb", {"d": 208}, "flash"),
        ("a4000", {"d": 192}, "flash"),
        ("a4000", {"d": 208}, "efficient"),  # too little shared memory to train
        ("4090", {"d": 208}, "efficient"),
        ("5090", {"d": 208}, "efficient"),
        ("a4000", {"d": 208, "learns": False}, "flash"),
        ("a4000", {"d": 256}, "flash"),
        ("a4000", {"d": 256, "dropout": 0.1}, "efficient"),
        ("h100", {}, "cudnn"),
        ("b200", {}, "cudnn"),
        ("5090", {}, "flash"),
        ("h100", {"dropout": 0.1}, "flash"),  # not in sixteenths
        ("h100", {"dtype": FP32}, "efficient"),
    ],
)
def test_attention_takes_the_kernel_that_the_gpu_has(gpu, call, kernel):
    ran, run = attention(gpu, **call)
    assert ran == ({kernel} if kernel else {"_safe_softmax"})
    assert bool(run.remarks) == (kernel is None)


def test_where_a_gpu_is_too_old_for_a_dtype_the_bytes_of_the_scores_are_named_and_the_reason():
    _, run = attention("t4", BF16)
    (remark,) = run.remarks
    assert f"[2, 4, 8, 8], {2 * 4 * 8 * 8 * 4:,} B" in remark  # in fp32
    assert "flash: it needs compute capability 8.0, and this GPU has 7.5" in remark
    assert "memory-efficient: it takes bf16 from compute capability 8.0 on, and this GPU has 7.5" in remark


def test_an_order_of_attention_kernels_that_was_asked_for_is_kept_on_hopper():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert attention("h100")[0] == {"efficient"}


def scratch(run, op):
    frame = run.timeline.frame().query("op == @op and category == 'scratch' and action == 'alloc'")
    return frame["nbytes"].tolist()


@pytest.mark.parametrize("d, upcast", [(128, False), (136, True)])
def test_on_volta_the_memory_efficient_backward_of_wide_heads_has_its_row_sums_made_before_it(d, upcast):
    b, a, s = 2, 4, 8
    for gpu in ("v100-16gb", "t4"):
        with eb.trace(rules="cuda", gpu=gpu) as run:
            q, k, v = (torch.empty(b, a, s, d, dtype=FP16, requires_grad=True) for _ in range(3))
            out = F.scaled_dot_product_attention(q, k, v)
            out.backward(torch.empty(b, s, a, d, dtype=FP16).transpose(1, 2))
        rows = 4 * b * a * s
        expected = [rows * d, rows * d, rows * d, rows, rows] if upcast and gpu == "v100-16gb" else [rows]
        assert scratch(run, "_scaled_dot_product_efficient_attention_backward") == expected


@pytest.mark.parametrize(
    "gpu, blocks",
    [
        ("a100-80gb", 108 * 2048 // 512),  # as many blocks of 512 threads as are on the GPU at once
        ("h100", 132 * 2048 // 512),
        ("a4000", 48 * 1536 // 512),
        ("t4", 128),  # 80 are, but each thread takes 256 of the 2**24 / 512 numbers at most
    ],
)
def test_a_sum_leaves_a_partial_result_for_each_block_that_is_on_the_gpu_at_once(gpu, blocks):
    with eb.trace(rules="cuda", gpu=gpu) as run:
        torch.empty(2**24).sum()
    assert scratch(run, "sum") == [4 * blocks, 4]


@pytest.mark.parametrize("norm, learning", [(torch.nn.LayerNorm, 2), (torch.nn.RMSNorm, 1)])
def test_the_gradient_of_many_short_normed_rows_is_summed_by_blocks_where_they_do_not_fill_the_gpu(norm, learning):
    rows, columns = 65_537, 53 * 32  # 53 blocks of columns, fewer than half of an A100's 108 processors
    made = {}
    for gpu in ("a100-80gb", "a4000"):
        with eb.trace(rules="cuda", gpu=gpu) as run:
            norm(columns)(torch.empty(rows, columns)).sum().backward()
        op = "native_layer_norm_backward" if learning == 2 else "_fused_rms_norm_backward"
        made[gpu] = scratch(run, op)
    copy = [4 * rows * columns]  # of the gradient, which a sum gives expanded
    blocks = 32 * 1024 // 53  # in the other direction
    sums = learning * [4 * blocks * columns] + learning * [4 * columns]
    assert made == {"a100-80gb": copy + sums, "a4000": copy}


@pytest.mark.parametrize(
    "gpu, parts",
    [
        # 4 rows of blocks where 2 x 108 run at once: 32 parts fill 128/216 of a wave, 16 less than 0.85 of that
        ("a100-80gb", 32),
        # where 2 x 20 do: 8, 16 and 32 parts fill 0.8 of their waves, and 7 the first that is 0.85 of that
        ("3050ti", 7),
    ],
)
def test_flash_attention_splits_a_long_sequence_of_keys_to_fill_the_gpu(gpu, parts):
    b, a, d = 1, 4, 64
    with eb.trace(rules="cuda", gpu=gpu) as run, torch.no_grad():
        q, k, v = (torch.empty(b, a, length, d, dtype=FP16) for length in (1, 8192, 8192))
        F.scaled_dot_product_attention(q, k, v)
    assert scratch(run, "_scaled_dot_product_flash_attention") == [4 * parts * a, 4 * parts * a * d]


# -- the book's page ---------------------------------------------------------------------------------------------------


def test_the_page_on_hardware_has_each_gpu_with_what_is_left_of_its_memory_and_who_says_so():
    page = (Path(__file__).resolve().parent.parent / "book" / "hardware.md").read_text(encoding="utf-8")
    least, most = (nbytes // MiB for nbytes in gpus.CONTEXT)
    assert f"from {least} to {most} MiB" in page
    rows, sources = made.gpu_table().splitlines()[2:], made.gpu_sources()
    assert "[facebookresearch/tribev2 issue 28](https://github.com/facebookresearch/tribev2/issues/28)" in sources
    sources = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", sources)
    for gpu, row in zip(gpus.TABLE, rows, strict=True):
        assert f"| {gpu.name} | `{gpu.key}` |" in row
        assert f" {gpu.total:,} | {gpu.usable[0] / GiB:.2f} to {gpu.usable[1] / GiB:.2f} |" in row
        assert f"`{gpu.key}`\n: {gpu.source}" in sources
