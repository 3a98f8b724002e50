"""What CUDA kernels keep, on a machine without a GPU: expected bytes are arithmetic on PyTorch's source."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everybyte as eb

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
        assert len(run.unknown_reads) == 2
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
    with pytest.raises(ValueError, match="gpu='a4000': this version knows no GPU by name"):
        eb.trace(rules="cuda", gpu="a4000")


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
