"""`torch.cuda` while a trace runs: a script written for a GPU takes its way for one, and hears what one would say."""

from __future__ import annotations

import io
import os
import queue
import re
import runpy
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everybyte as eb
from everybyte.formulas import transformer
from everybyte.formulas.terms import integer
from everybyte.memory_stats import MemoryStats
from everybyte.timeline import Recorder
from everybyte.units import round_up

SCRIPT = str(Path(__file__).parent / "scripts" / "train_gpt.py")


@pytest.fixture
def run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with eb.trace(rules="cuda", gpu="a4000") as run:
            yield run


def on_host(*shape, **kwargs):
    return torch.ones(*shape, device="cpu", **kwargs)


# -- a whole script ----------------------------------------------------------------------------------------------------


@cache
def run_script(*settings):
    """The script as its authors run it: its default device is the host. What it leaves behind, and what it prints."""
    printed = io.StringIO()
    with warnings.catch_warnings(), mock.patch.object(sys, "argv", [SCRIPT, *settings]), redirect_stdout(printed):
        warnings.simplefilter("error")
        with eb.trace(rules="cuda") as run:
            torch.set_default_device("cpu")
            left = runpy.run_path(SCRIPT)
    return run, left, printed.getvalue()


def explicitly(GPT, dtype):
    """What the script comes to on a GPU, with every choice written out."""
    with eb.trace(rules="cuda") as run:
        with torch.device("cpu"):
            model = GPT()
        model.to("cuda:0")
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)

        def batch():
            x, y = (torch.zeros(4, 32, dtype=torch.int64, device="cpu") for _ in "xy")
            x, y = x.to("cuda:0"), y.to("cuda:0")
            return x, y

        def evaluate():
            model.eval()
            for _ in range(4):
                x, y = batch()
                with torch.autocast("cuda", dtype):
                    _logits, loss = model(x, y)
                loss.item()
            model.train()

        x, y = batch()
        for step in range(3):
            if step % 2 == 0:
                with torch.no_grad():
                    evaluate()
            for _ in range(2):
                with torch.autocast("cuda", dtype):
                    _logits, loss = model(x, y)
                    loss = loss / 2
                x, y = batch()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_unedited_script_traces_as_the_same_run_with_every_choice_written_out(dtype):
    run, left, _ = run_script(*([] if dtype is torch.bfloat16 else ["--dtype=float16"]))
    assert (left["device"], left["ptdtype"]) == ("cuda", dtype)
    assert all(group["fused"] for group in left["optimizer"].param_groups)
    assert left["scaler"].is_enabled() == (dtype is torch.float16)
    columns = ["action", "nbytes", "op", "module", "shape", "dtype", "category", "device", "stream"]
    script = run.timeline.frame()[columns]
    assert script.equals(explicitly(left["GPT"], dtype).timeline.frame()[columns])
    assert {"float16", "bfloat16"} & set(script["dtype"]) == {str(dtype).removeprefix("torch.")}
    assert not run.conditional


def test_a_script_prints_the_peaks_that_the_allocator_finds_in_its_timeline():
    run, left, printed = run_script()
    replay = eb.Allocator().replay(run.timeline.with_workspaces())
    assert max(left["peaks"]) == replay.peak_allocated
    assert f"peak {replay.peak_allocated / 1e6:.2f} MB" in printed


def test_a_script_s_state_is_sixteen_bytes_a_parameter():
    """Weights, gradients and two moments in single precision, and a fused step counter of 4 B for each tensor."""
    run, left, _ = run_script()
    h, layers, vocabulary, s = 64, 2, 96, 32
    parameters = vocabulary * h + s * h + layers * (12 * h**2 + 13 * h) + 2 * h
    live = run.timeline.live(run.timeline.peak).groupby("category")["nbytes"].sum()
    tensors = len(list(left["model"].parameters()))
    assert live["parameter"] == live["gradient"] == 4 * parameters
    assert live["optimizer state"] == 8 * parameters + 4 * tensors


def test_what_a_layer_keeps_is_its_closed_form_in_whole_blocks(run):
    config = eb.models.GPTConfig(hidden=128, heads=4, context=64, dropout=0.0)
    with torch.device("cpu"):
        block = eb.models.Block(config)
    block.to("cuda")
    x = on_host(2, 64, 128, dtype=torch.bfloat16).pin_memory().to("cuda", non_blocking=True).requires_grad_()
    block(x)  # the first products take their workspace
    before = torch.cuda.memory_allocated()
    y = block(x)
    sizes = transformer.sizes(2, 64, 128, 4, layers=1, vocabulary=64)
    kept = integer(transformer.layer(dropout=False), sizes) - x.nbytes  # its input was there before
    assert kept % 512 == 0
    assert torch.cuda.memory_allocated() - before == kept + y.nbytes


# -- is there a GPU? ---------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_a_gpu_finds_it(run):
    assert torch.cuda.is_available() and torch.backends.cuda.is_built() and torch.backends.cudnn.is_available()
    assert torch.cuda.is_initialized() and torch.version.cuda
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator(True).type == "cuda"
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 1
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 0
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
    assert not torch.backends.mps.is_available()
    assert torch.amp.is_autocast_available("cuda") and torch.backends.cudnn.version() > 8000
    assert torch.device(0) == torch.device("cuda", 0)


def test_a_name_imported_before_the_trace_answers_as_well():
    from torch.cuda import Event, is_available, memory_allocated

    with eb.trace(rules="cuda"):
        kept = torch.empty(128)
        assert is_available() and memory_allocated() == 512
        Event().record()
        del kept


def test_the_gpu_is_the_one_that_was_asked_for(run):
    properties = torch.cuda.get_device_properties("cuda")
    assert (properties.name, properties.major, properties.minor) == ("NVIDIA RTX A4000", 8, 6)
    assert properties.total_memory == run.gpu.total
    assert properties.multi_processor_count == run.gpu.processors
    assert torch.cuda.get_device_name() == properties.name
    assert torch.cuda.get_device_capability(0) == (8, 6)
    assert torch.cuda.get_arch_list() == ["sm_86"]
    assert not hasattr(properties, "uuid")


@pytest.mark.parametrize(("gpu", "natively"), [("t4", False), ("a4000", True)])
def test_half_precision_is_what_the_gpu_has(gpu, natively):
    with eb.trace(rules="cuda", gpu=gpu) as run:
        assert torch.cuda.is_bf16_supported()  # by emulation at least
        assert torch.cuda.is_bf16_supported(including_emulation=False) is natively
    assert len(run.timeline) == 0


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.device(1).__enter__(),
        lambda: torch.zeros(2).cuda(1),
        lambda: torch.cuda.memory_allocated(1),
        lambda: torch.cuda.mem_get_info("cuda:1"),
    ],
)
def test_a_second_gpu_is_refused_at_the_user_s_line(run, choose):
    with pytest.raises((RuntimeError, ValueError), match=r"^test_torch_cuda\.py:\d+|^tests/test_torch_cuda\.py:\d+"):
        choose()


def test_the_default_device_goes_where_it_is_set_and_back_after_the_block():
    with eb.trace(rules="cuda"):
        torch.set_default_device("cuda")
        assert torch.zeros(2).is_cuda and torch.get_default_device() == torch.device("cuda:0")
        torch.set_default_device("cpu")
        assert torch.zeros(2).is_cpu and torch.get_default_device() == torch.device("cpu")
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
            assert torch.get_default_device() == torch.device("cuda:0")
        assert torch.arange(3).is_cpu
    assert torch.get_default_device() == torch.device("cpu")
    with eb.trace(rules="cuda"):
        assert torch.zeros(2).is_cuda


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_statistics_are_the_allocator_s_of_the_events_so_far(run):
    free = torch.cuda.mem_get_info()[0]
    big, small = torch.empty(1000, 1000), torch.empty(10)
    assert torch.cuda.memory_allocated() == round_up(4_000_000, 512) + 512
    assert torch.cuda.memory_reserved() == 20 * 2**20 + 2 * 2**20
    assert torch.cuda.mem_get_info() == (free - 22 * 2**20, run.gpu.total)
    del big
    assert torch.cuda.memory_allocated() == 512
    assert torch.cuda.max_memory_allocated("cuda:0") == torch.accelerator.max_memory_allocated() == 4_000_768
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 512
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * 2**20 and torch.cuda.max_memory_reserved() == 22 * 2**20
    assert "2048 KiB" in torch.cuda.memory_summary()
    del small


def test_the_first_matrix_product_takes_the_workspace_of_cublas_and_keeps_it():
    for gpu, workspace in (("a4000", 8_519_680), ("h100-80gb", 32 * 2**20)):
        with eb.trace(rules="cuda", gpu=gpu):
            a, b = torch.empty(64, 64), torch.empty(64, 64)
            product = a @ b
            assert torch.cuda.memory_allocated() == 3 * 4 * 64**2 + workspace
            del product
            assert torch.cuda.memory_allocated() == 2 * 4 * 64**2 + workspace


SIZES = st.lists(st.tuples(st.integers(1, 24 * 2**20), st.integers(0, 5)), min_size=1, max_size=20)


@given(SIZES)
def test_statistics_count_what_the_replayed_allocator_holds(requests):
    recorder = Recorder()
    stats = MemoryStats(recorder, tuple, eb.gpus.find("h100-80gb"))
    live = []
    for at, (nbytes, die) in enumerate(requests):
        live.append(recorder.alloc(nbytes, device="cuda:0"))
        for _ in range(min(die, len(live))):
            recorder.free(live.pop(die % len(live)))
        if at % 7 == 0:
            stats.nested()  # asking on the way changes nothing
    counted = stats.nested()
    replay = eb.Allocator().replay(recorder.finish({}))
    for name, series in {
        "allocated_bytes": replay.allocated,
        "reserved_bytes": replay.reserved,
        "requested_bytes": replay.requested,
        "inactive_split_bytes": replay.inactive_split,
    }.items():
        assert (counted[name]["all"]["current"], counted[name]["all"]["peak"]) == (series[-1], series.max()), name
    for pool, small in (("small_pool", True), ("large_pool", False)):
        segments = [segment for segment in replay.segments if segment.small is small]
        assert counted["segment"][pool]["current"] == len(segments)
        assert counted["allocated_bytes"][pool]["current"] == sum(segment.allocated for segment in segments)
        split = [b for segment in segments if len(segment.blocks) > 1 for b in segment.blocks if b.state == "inactive"]
        assert counted["inactive_split"][pool]["current"] == len(split)
        assert counted["inactive_split_bytes"][pool]["current"] == sum(block.size for block in split)
    for stat in (stat for name in ("allocation", "inactive_split_bytes") for stat in counted[name].values()):
        assert stat["current"] == stat["allocated"] - stat["freed"] <= stat["peak"]


def test_a_gpu_that_runs_out_counts_it_and_the_trace_goes_on():
    with eb.trace(rules="cuda", gpu="a4000") as run:
        kept = [torch.empty(2**30) for _ in range(5)]
        stats = torch.cuda.memory_stats()
        assert stats["num_ooms"] == 1 and stats["num_alloc_retries"] == 1
        assert torch.cuda.memory_allocated() == 5 * 2**32 > run.gpu.total
        del kept


def largest_batch_by_name(make):
    for size in (1, 2, 4):
        try:
            make(size)
        except torch.cuda.OutOfMemoryError:
            return size // 2
    return 4


def largest_batch_by_message(make):
    for size in (1, 2, 4):
        try:
            make(size)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return size // 2
    return 4


@pytest.mark.parametrize("search", [largest_batch_by_name, largest_batch_by_message])
def test_a_search_for_the_largest_batch_makes_a_condition_where_the_gpu_is_full(search):
    with eb.trace(rules="cuda", gpu="t4") as run:  # 15,642,329,088 B less a context
        assert search(lambda size: torch.empty(size, 6 * 10**9, dtype=torch.uint8)) == 4
    (line,) = run.conditional
    assert line.startswith("test_torch_cuda.py:") or line.startswith("tests/test_torch_cuda.py:")
    assert run.remarks == [f"{line}: the GPU's memory is full, which this code catches; a trace raises nothing"]
    with eb.trace(rules="cuda", gpu="a100-80gb") as run:
        search(lambda size: torch.empty(size, 6 * 10**9, dtype=torch.uint8))
    assert run.conditional == run.remarks == []


def test_full_memory_that_nobody_catches_is_no_condition():
    """Whoever only speaks of being out of memory does not catch it."""
    with eb.trace(rules="cuda", gpu="t4") as run:
        torch.empty(4, 6 * 10**9, dtype=torch.uint8)
    assert run.conditional == run.remarks == []


def test_pytorch_s_own_snapshot_of_a_trace_is_that_of_its_timeline(run, tmp_path):
    torch.cuda.memory._record_memory_history()
    kept = torch.empty(1000, 1000)
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    snapshot = eb.Snapshot.read(tmp_path / "snapshot.pickle")
    assert snapshot.timeline.peak_bytes == kept.nbytes


# -- streams, events, generators ---------------------------------------------------------------------------------------


def test_an_allocation_belongs_to_the_stream_that_is_current():
    with eb.trace(rules="cuda") as run:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        first = torch.empty(10)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side == torch.accelerator.current_stream()
            second = torch.empty(10)
        with side:
            third = torch.empty(10)
        second.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(side.record_event())
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert isinstance(side, torch.cuda.Stream) and isinstance(side, torch.Stream)
        del first, second, third
    assert run.timeline.table["stream"].to_pylist()[:3] == [0, 1, 1]
    assert eb.Allocator().replay(run.timeline).peak_reserved == 2 * 2 * 2**20  # streams share no segment
    assert any("record_stream" in text for text in run.left_out)


def test_a_time_between_events_is_a_number_that_nobody_knows():
    with eb.trace(rules="cuda") as run:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with pytest.raises(ValueError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        end.record()
        torch.cuda.synchronize()
        milliseconds = start.elapsed_time(end)
        assert f"{milliseconds:.1f} ms, {4096 / milliseconds:.0f} tokens/s"
        assert not run.conditional
        if milliseconds > 5:
            pass
    assert [read.op for read in run.unknown_reads] == ["elapsed_time"]
    assert len(run.conditional) == 1
    with eb.trace(rules="cuda"), pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_generators_of_the_gpu_draw_and_seed(run):
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert generator.device == torch.device("cuda:0") and isinstance(generator, torch.Generator)
    assert torch.randn(3, generator=generator, device="cuda").is_cuda
    assert torch.randperm(4, generator=torch.Generator().manual_seed(1), device="cpu").is_cpu
    torch.cuda.manual_seed_all(1)
    state = torch.cuda.get_rng_state()
    assert state.is_cpu
    torch.cuda.set_rng_state(state)
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(3)


# -- data and files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_what_it_yields_and_warns_of_nothing(run, workers):
    data = TensorDataset(on_host(8, 2))
    for (batch,) in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True, num_workers=workers):
        assert batch.is_cpu and batch.is_pinned()
        assert batch.to("cuda", non_blocking=True).is_cuda


def test_memory_is_pinned_on_the_host_alone(run):
    assert torch.empty(3, device="cpu", pin_memory=True).is_pinned()
    assert not on_host(3).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(3).pin_memory()


def test_a_checkpoint_is_loaded_onto_the_gpu_byte_by_byte_and_ties_stay():
    weight = torch.ones(4, 4)
    file = io.BytesIO()
    torch.save({"a": weight, "b": weight, "bias": torch.ones(3)}, file)
    for where in ("cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}):
        file.seek(0)
        with eb.trace(rules="cuda") as run:
            loaded = torch.load(file, map_location=where)
            assert loaded["a"].is_cuda and loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["bias"].data_ptr()
            loaded["a"] += 1
        events = run.timeline.frame().query("action == 'alloc'")
        assert sorted(events["nbytes"]) == [3 * 4, 4 * 4 * 4] and set(events["op"]) == {"load"}
    file.seek(0)
    with eb.trace(rules="cuda"):
        assert torch.load(file, map_location="cpu")["a"].tolist() == weight.tolist()


def test_a_training_run_resumes_from_its_checkpoint_on_the_gpu():
    def make():
        model = nn.Linear(8, 8)
        return model, torch.optim.AdamW(model.parameters())

    def train(model, optimizer):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    with eb.trace(rules="cuda") as run:
        checkpoint = torch.load(file, "cuda", weights_only=True)
        model, optimizer = make()
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state = optimizer.state[model.weight]
        assert state["exp_avg"].is_cuda and torch.cuda.memory_allocated() >= 4 * 4 * 8 * 8
        train(model, optimizer)
    assert run.timeline.frame().query("op == 'load' and action == 'alloc'")["nbytes"].tolist().count(4 * 64) == 3


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_saving_a_traced_tensor_is_refused_before_an_older_file_is_touched(tmp_path, rules):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"precious")
    with eb.trace(rules=rules), pytest.raises(NotImplementedError, match=r"test_torch_cuda.py:\d+: .*leave out saving"):
        torch.save(nn.Linear(2, 2).state_dict(), path)
    assert path.read_bytes() == b"precious"


def test_safetensors_writes_no_traced_tensor_either(monkeypatch):
    safetensors = ModuleType("safetensors.torch")
    safetensors._flatten, safetensors.safe_open = lambda tensors: tensors, None
    monkeypatch.setitem(sys.modules, "safetensors.torch", safetensors)
    with eb.trace(rules="cuda"):
        assert safetensors._flatten({"host": on_host(2)})["host"].is_cpu
        with pytest.raises(NotImplementedError, match="leave out saving"):
            safetensors._flatten({"weight": torch.ones(2)})


# -- moves -------------------------------------------------------------------------------------------------------------


def test_a_model_that_moves_keeps_its_ties_and_its_optimizer():
    with eb.trace(rules="cuda") as run:
        with torch.device("cpu"):
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            model[1].weight = model[0].weight
            optimizer = torch.optim.AdamW(model.parameters())
        model.to("cuda")
        assert model[0].weight is model[1].weight is optimizer.param_groups[0]["params"][0]
        assert model[0].weight.is_cuda and model[0].weight.requires_grad
        storages = [layer.weight.untyped_storage().data_ptr() for layer in (*model, nn.Linear(2, 2))]
        assert storages[0] == storages[1] != storages[2]
        del storages
        model.half()
        model.cpu()
        assert model[0].weight is model[1].weight and model[0].weight.is_cpu
        model.cuda()
        assert model[0].weight is model[1].weight
    moved = run.timeline.frame().query("action == 'alloc'")["nbytes"].tolist()
    assert moved == [4 * 64, 4 * 4, 4 * 2, 2 * 64, 2 * 64]  # of the other layer, 4 * 4 and 4 * 2


def test_one_of_one_gpu_is_where_a_data_parallel_model_runs(run):
    model = nn.DataParallel(nn.Linear(4, 4))
    assert model(torch.ones(2, 4)).is_cuda and model(on_host(2, 4)).is_cuda


@pytest.mark.parametrize("kind", [torch.cuda.FloatTensor, "torch.cuda.FloatTensor"])
def test_the_old_types_of_tensors_still_name_a_device(kind):
    with eb.trace(rules="cuda"):
        if not isinstance(kind, str):
            kind = torch.cuda.FloatTensor
            assert kind(2, 3).shape == (2, 3) and kind([1.0]).is_cuda
            assert isinstance(torch.ones(2), kind) and not isinstance(on_host(2), kind)
        assert on_host(2).type(kind).is_cuda
        assert torch.ones(2).type() == "torch.cuda.FloatTensor" and torch.ones(2).type(torch.half).dtype == torch.half


def test_activations_that_are_saved_on_the_host_leave_the_gpu_and_come_back():
    n = 256
    with eb.trace(rules="cuda") as run:
        x = torch.randn(n, requires_grad=True)
        for pin in (False, True):
            with torch.autograd.graph.save_on_cpu(pin_memory=pin):
                y = (x * x).sum()
            assert torch.cuda.memory_allocated() == 4 * n + 512 + 4 * n * pin  # x, the sum, and in the end a gradient
            y.backward()
    returned = run.timeline.frame().query("op == '_to_copy' and action == 'alloc' and phase == 'backward'")
    assert returned["nbytes"].tolist() == 4 * [4 * n]


def test_a_script_that_asks_which_attention_it_can_have_hears_what_it_will_get(run):
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    half, single = (torch.empty(1, 2, 64, 32, dtype=dtype) for dtype in (torch.float16, torch.float32))
    assert can_use_flash_attention(SDPAParams(half, half, half, None, 0.0, True, False))
    assert not can_use_flash_attention(SDPAParams(single, single, single, None, 0.0, True, False))
    assert can_use_efficient_attention(SDPAParams(single, single, single, None, 0.0, True, False))


def test_a_parameter_with_a_gradient_does_not_lose_it_by_moving(run):
    with torch.device("cpu"):
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"test_torch_cuda\.py:\d+: a tensor that has a gradient"):
        model.to("cuda")


JOIN = torch.distributed.init_process_group  # as a script has it that imports the name before


# -- what ends a trace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.compile(nn.Linear(2, 2)),
        lambda: torch.compile(mode="max-autotune")(nn.Linear(2, 2)),
        lambda: nn.Linear(2, 2).compile(),
        lambda: torch.distributed.init_process_group("nccl"),
        lambda: JOIN("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:29999"),
        lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.MemPool(),
        lambda: torch.cuda.caching_allocator_alloc(512),
        lambda: torch.cuda.current_blas_handle(),
        lambda: torch.ones(2).__cuda_array_interface__,
    ],
)
def test_what_no_rule_covers_ends_in_one_line_that_names_it(run, call):
    with pytest.raises(NotImplementedError, match=r"test_torch_cuda\.py:\d+: ") as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["_exit", "execl", "execvp"])
def test_what_would_end_the_process_takes_no_answer_with_it(run, name):
    arguments = {"_exit": (0,), "execl": ("/bin/true", "true"), "execvp": ("/bin/true", ["true"])}[name]
    with pytest.raises(NotImplementedError, match=r"os\.\w+ is not covered: the process would end"):
        getattr(os, name)(*arguments)


@pytest.mark.parametrize(("visible", "count"), [("", 0), (" -1", 0), ("0", 1), ("3,1", 1), (None, 1)])
def test_a_gpu_that_the_code_hides_before_it_looks_for_one_is_not_there(visible, count, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with eb.trace(rules="cuda", default="cpu") as run:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert torch.cuda.is_available() == bool(count) and torch.cuda.device_count() == count
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if count else "0")  # too late, as in a real run
        assert torch.cuda.is_available() == bool(count) and torch.cuda.device_count() == count
    assert ["hides every GPU" in remark for remark in run.remarks] == [True] * (1 - count)


def test_what_this_machine_hides_is_no_answer_for_the_gpu_that_is_followed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with eb.trace(rules="cuda"):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.empty(8, device="cuda"),
        lambda x: torch.ones(8).cuda(),
        lambda x: torch.ones(8).to("cuda:0", non_blocking=True),
        lambda x: torch.ones(8).to(torch.device("cuda")),
        lambda x: x.repeat(4),
        lambda x: x.clone(),
    ],
)
def test_what_another_thread_does_on_the_gpu_is_said_not_to_be_covered(work):
    with eb.trace(rules="cuda") as run:
        x, made = torch.ones(8), queue.Queue()
        threading.Thread(target=lambda: made.put(work(x))).start()
        assert made.get(timeout=30).dtype == torch.float32  # who waits for it is not left waiting
    (said,) = run.not_covered
    assert re.fullmatch(r"what another thread does on the GPU at \S*test_torch_cuda\.py:\d+", said)


def test_a_pools_threads_are_told_as_well():
    with eb.trace(rules="cuda") as run, ThreadPoolExecutor(1) as pool:
        pool.submit(torch.empty, 8, device="cuda").result()
    assert run.not_covered


def test_another_thread_may_do_what_it_wants_on_the_host():
    with eb.trace(rules="cuda", default="cpu") as run:
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.arange(4).sum().item()))
        thread.start()
        thread.join()
    assert made == [6] and not run.not_covered


def test_a_function_that_was_compiled_before_the_trace_is_refused_as_well():
    compiled = torch.compile(lambda x: x + 1)
    with eb.trace(rules="cuda"), pytest.raises(NotImplementedError, match=r"test_torch_cuda\.py:\d+: torch.compile"):
        compiled(torch.ones(2))


def test_an_extension_for_cuda_alone_ends_in_one_line(run):
    library = torch.library.Library("everybyte_test", "DEF")
    library.define("secret(Tensor x) -> Tensor")
    library.impl("secret", lambda x: x.clone(), "CUDA")
    made_in_python = torch.library.custom_op(
        "everybyte_test::secret_too", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    for extension in (torch.ops.everybyte_test.secret, made_in_python):
        with pytest.raises(NotImplementedError, match=r"test_torch_cuda\.py:\d+: secret.* cannot be traced") as refused:
            extension(torch.ones(2))
        assert "\n" not in str(refused.value)


# -- and back ----------------------------------------------------------------------------------------------------------

PLACES = (torch, torch._C, torch.cuda, torch.cuda.graphs, torch.cuda.nvtx, torch.cuda.memory, torch.accelerator)
KINDS = (torch.Tensor, torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph, torch.version, torch.backends.mps)


def everything():
    return [dict(vars(place)) for place in (*PLACES, *KINDS, torch.nn.parallel._functions, torch.autograd.profiler)]


def test_everything_is_as_it_was_after_the_block_an_error_in_it_and_a_second_one_inside():
    with eb.trace(rules="cuda"):  # what is imported on the way is imported
        nn.Linear(2, 2)(torch.ones(1, 2))
    before = everything()
    for _ in range(2):
        with eb.trace(rules="cuda"):
            with pytest.raises(RuntimeError, match="do not nest"), eb.trace(rules="cuda"):
                pass
            assert torch.cuda.is_available()
            torch.set_default_device("cuda")
        assert everything() == before
    with pytest.raises(KeyError), eb.trace(rules="cuda"):
        torch.set_default_device("cuda")
        raise KeyError
    assert everything() == before
    assert not torch.cuda.is_available() or torch.version.cuda
    assert torch.zeros(2).is_cpu


def test_what_a_module_that_was_imported_inside_has_kept_is_the_real_thing_again_after_the_block():
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    with eb.trace(rules="cuda"):
        from torch import compile, load

        with pytest.raises(NotImplementedError, match=r"torch\.compile"):
            compile(nn.Linear(2, 2))
    assert compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2)).shape == (1, 2)
    assert load(file, map_location="cpu").tolist() == [1.0, 1.0]


def test_a_cuda_build_s_own_functions_are_not_called_and_are_put_back(monkeypatch):
    def real(*args):
        raise AssertionError("a real GPU was touched")

    for name in ("getDeviceCount", "memoryStats", "synchronize", "setDevice", "emptyCache", "jiterator_compile"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", real, raising=False)
    with eb.trace(rules="cuda"):
        kept = torch.ones(3)
        torch.cuda.synchronize()
        torch.cuda.set_device(0)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == 512 and torch.cuda.device_count() == 1
        with pytest.raises(NotImplementedError, match="has no rule"):
            torch._C._cuda_jiterator_compile()
        del kept
    assert torch._C._cuda_memoryStats is torch._C._cuda_jiterator_compile is real


def test_a_thread_that_ran_before_the_trace_hears_the_truth(monkeypatch):
    # With it, which Lightning sets when it is imported, PyTorch asks a number that all threads share.
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    ask, heard = threading.Event(), []

    def other():
        ask.wait()
        heard.append(torch.cuda.is_available())

    thread = threading.Thread(target=other)
    truth = torch.cuda.is_available()
    thread.start()
    with eb.trace(rules="cuda"):
        ask.set()
        thread.join()
        inside = threading.Thread(target=lambda: heard.append(torch.cuda.is_available()))
        inside.start()
        inside.join()
    assert heard == [truth, True]
