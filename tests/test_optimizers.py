"""Optimizers, scalers of losses and clipping of gradients: their state and what they allocate on the way."""

import inspect

import pytest
import torch
from torch import nn

import everybyte as eb

SHAPES = [(64, 8), (32, 32), (48,)]
N = sum(torch.Size(shape).numel() for shape in SHAPES)  # numbers in one copy of the parameters

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgradw": (torch.optim.AdamW, {"amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop, centered, with momentum": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}
FUSED = [name for name, (kind, _) in OPTIMIZERS.items() if kind is not torch.optim.RMSprop]
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ADAGRAD_IS_FUSED_ON_GPUS = "cuda_unsupported" not in inspect.getsource(torch.optim.Adagrad._init_group)  # not in 2.11


def steps(run, name, count=2, **options):
    kind, given = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = kind(parameters, **{**given, **options})
    for _ in run.steps(count):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def traced(rules, *args, **options):
    with eb.trace(rules=rules) as run:
        steps(run, *args, **options)
    return run.timeline


def allocations(timeline):
    """What the optimizer's steps allocate, in order; not what is smaller than any parameter: numbers and counters."""
    frame = timeline.without("scratch").frame()
    inside = frame[(frame["phase"] == "optimizer") & (frame["action"] == "alloc") & (frame["nbytes"] >= 4 * 48)]
    return inside["nbytes"].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("name, way", [(n, w) for n in OPTIMIZERS for w in WAYS if w != "fused" or n in FUSED])
def test_a_step_allocates_on_either_device_what_it_really_allocates_on_the_host(name, way, options):
    """The same Python, in the same order; with the peak, on the host, of a real run."""
    options = {**options, **WAYS[way]}
    with eb.measure(device="cpu") as run:
        steps(run, name, **options)
    host = traced("cpu", name, **options)
    assert allocations(host) == allocations(run.timeline)
    assert host.without("scratch").peak_bytes == run.timeline.without("scratch").peak_bytes
    if name == "adagrad" and way == "fused" and not ADAGRAD_IS_FUSED_ON_GPUS:
        with pytest.raises(RuntimeError, match="supported devices"):
            traced("cuda", name, **options)
    else:
        assert allocations(traced("cuda", name, **options)) == allocations(host)


@pytest.mark.parametrize(
    "name, state, temporary, decayed, maximized",
    [
        # Copies of the parameters, read off `torch/optim`: `_multi_tensor_*`. Decay that is added to the gradient makes
        # a copy of it, and so does turning its sign; Adam drops that copy before it takes the root.
        ("sgd", 0, 0, 1, 1),
        ("momentum", 1, 0, 1, 1),
        ("nesterov", 1, 0, 1, 1),
        ("adam", 2, 1, 1, 1),  # the root of the second moment
        ("amsgrad", 3, 1, 1, 1),
        ("adamw", 2, 1, 1, 1),  # decay in place
        ("amsgradw", 3, 1, 1, 1),
        ("rmsprop", 1, 1, 2, 2),
        ("rmsprop, centered, with momentum", 3, 1, 2, 2),
        ("adagrad", 1, 2, 2, 2),  # the root, and the gradient times the rate, which a copy of the gradient becomes
    ],
)
def test_foreach_on_the_gpu_peaks_by_whole_copies_of_the_parameters(name, state, temporary, decayed, maximized):
    cases = [({}, temporary), ({"weight_decay": 0.1}, decayed), ({"maximize": True}, maximized)]
    for options, copies in cases:
        timeline = traced("cuda", name, foreach=True, **options)
        assert timeline.peak_bytes == (2 + state + copies) * 4 * N, options
        assert timeline.by("category")["nbytes"].get("optimizer state", 0) == state * 4 * N


@pytest.mark.parametrize("name, state", [("adam", 2), ("amsgrad", 3), ("adamw", 2), ("sgd", 0), ("momentum", 1)])
def test_a_fused_step_makes_nothing_but_its_state_and_adam_counts_on_the_gpu(name, state):
    timeline = traced("cuda", name, fused=True, maximize=True, weight_decay=0.1)
    counters = 4 * len(SHAPES) if "adam" in name or name == "amsgrad" else 0
    assert timeline.peak_bytes == (2 + state) * 4 * N + counters
    by_category = timeline.rounded(512).by("category")["nbytes"]
    if counters:
        assert by_category["optimizer state"] == state * 4 * (64 * 8 + 32 * 32 + 128) + 512 * len(SHAPES)


def test_counters_are_on_the_gpu_where_the_kernel_reads_them_there():
    with eb.trace(rules="cuda") as run:
        for name, options, on_gpu in (
            ("adam", {"fused": True}, True),
            ("adam", {"capturable": True}, True),
            ("adam", {}, False),
            *([("adagrad", {"fused": True}, True)] if ADAGRAD_IS_FUSED_ON_GPUS else []),
        ):
            state = steps(run, name, count=1, **options).state
            assert {s["step"].is_cuda for s in state.values()} == {on_gpu}, (name, options)


# -- a scaler of losses ------------------------------------------------------------------------------------------------


def scaled(run, scaler, optimizer_options, count=2, unscale=False):
    layer = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), **optimizer_options)
    for _ in run.steps(count):
        with torch.autocast("cuda", torch.float16):
            loss = layer(torch.ones(2, 16)).float().mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        del loss


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_takes_the_step_as_in_a_run_that_goes_well(unscale):
    with eb.trace(rules="cuda") as run:
        scaler = torch.amp.GradScaler("cuda", growth_interval=2)
        before = scaler.get_scale()
        scaled(run, scaler, {}, unscale=unscale)
        assert scaler.is_enabled()
        assert scaler.get_scale() == 2 * before == 2.0**17  # it grew after two steps, so it knows that both were taken
    assert run.conditional == [] and run.not_covered == set()
    assert {read.op for read in run.unknown_reads} == {"_amp_foreach_non_finite_check_and_unscale_"}
    states = run.timeline.frame().query("category == 'optimizer state' and action == 'alloc'")
    assert states["nbytes"].tolist() == 2 * [4 * 16 * 16] + 2 * [4 * 16]


def test_a_scaler_with_a_fused_optimizer_leaves_the_look_for_infinities_to_the_kernel():
    with eb.trace(rules="cuda") as run:
        scaled(run, torch.amp.GradScaler("cuda"), {"fused": True})
    assert run.conditional == []


def test_a_scaler_keeps_two_numbers_and_makes_a_few_more_on_the_way():
    """`torch/amp/grad_scaler.py`: all of one number each."""
    with eb.trace(rules="cuda") as plain:
        scaled(plain, torch.amp.GradScaler("cuda", enabled=False), {})
    with eb.trace(rules="cuda") as run:
        scaler = torch.amp.GradScaler("cuda")
        scaled(run, scaler, {})
    made, without = (
        trace.timeline.frame().query("step == 1 and action == 'alloc'")["nbytes"].tolist() for trace in (run, plain)
    )
    for nbytes in without:
        made.remove(nbytes)
    # The scaled loss and its gradient; the inverse scale in double precision, twice, and in single; the flag, and a
    # copy of each for the device of the gradients.
    assert sorted(made) == sorted([4, 4, 8, 8, 4, 4, 4, 4])
    del scaler
    assert plain.timeline.live_bytes[-1] == 0
    assert run.timeline.live_bytes[-1] == 4 + 4  # the scale, and how many steps it has not grown for


def test_an_outdated_name_of_the_scaler_works_too():
    with pytest.warns(FutureWarning), eb.trace(rules="cuda") as run:
        scaled(run, torch.cuda.amp.GradScaler(), {}, count=1)
    assert run.conditional == []


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_the_norm_makes_a_number_for_each_tensor_and_foreach_partial_ones_beside(foreach):
    shapes = [(300, 300), (64,), (7, 5)]
    with eb.trace(rules="cuda") as run:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in run.steps(1):
            norm = nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    assert norm.shape == ()
    frame = run.timeline.frame().query("step == 0 and action == 'alloc'")
    partial = frame[frame["category"] == "scratch"]["nbytes"].tolist()
    assert partial == ([] if foreach is False else [4 * 3 * 2])  # two runs of 65,536 numbers in the largest
    first = frame["category"].iloc[0] == "scratch"
    assert bool(first) is (foreach is not False)  # taken before the norms are made
    others = frame[frame["category"] != "scratch"]["nbytes"].tolist()
    # Three norms, side by side, and theirs; that plus a little, its inverse, times the limit, at most 1.
    assert others == [*3 * [4], 3 * 4, 4, 4, 4, 4, 4]
    assert "partial norms" not in run.left_out


def test_clipping_by_value_is_done_in_place():
    with eb.trace(rules="cuda") as run:
        parameter = nn.Parameter(torch.zeros(8, 8))
        parameter.grad = torch.ones(8, 8)
        for _ in run.steps(1):
            nn.utils.clip_grad_value_([parameter], 0.5)
    assert run.timeline.frame().query("step == 0").empty
