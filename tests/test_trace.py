import copy
import importlib
import inspect
import statistics

import numpy as np
import pandas as pd
import pytest
import torch
from agreement import assert_agree
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everybyte as eb


def train(run, model, optimizer, data, steps=2):
    for _ in run.steps(steps):
        model(run.to_device(data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def traced(build=mlp, data=None, **options):
    with eb.trace(rules="cpu") as run:
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), foreach=False, **options)
        train(run, model, optimizer, np.ones((4, 8), "float32"))
    return run


def test_nothing_is_computed_and_nothing_of_the_model_s_size_is_allocated():
    with eb.trace() as run:
        layer = nn.Linear(100_000, 100_000)  # 40 GB, were it real
        layer(run.to_device(np.zeros((1, 100_000), "float32"))).sum().backward()
    assert run.timeline.peak_bytes > 2 * 4 * 100_000**2


def test_the_start_is_parameters_and_the_end_adds_adam_s_state():
    run = traced()
    parameters = 4 * (8 * 32 + 32 + 32 * 8 + 8)
    assert run.timeline.start_bytes == parameters
    end = run.timeline.by("category", event=-1)["nbytes"]
    assert end["parameter"] == parameters
    assert end["optimizer state"] == 2 * parameters + 4 * 4  # two moments, and a step counter of 4 B for each tensor


def test_backward_memory_belongs_to_the_module_whose_forward_made_it():
    frame = traced().timeline.frame()
    made = frame[(frame["action"] == "alloc") & (frame["phase"] == "backward") & (frame["op"] == "mm")]
    weights = made[made["shape"].isin(["[8, 32]", "[32, 8]"])]
    assert set(weights["module"]) == {"0", "2"}
    assert (frame[frame["op"] == "threshold_backward"]["module"] == "1").all()


def test_gradients_parameters_inputs_and_state_are_told_apart_by_their_size():
    frame = traced().timeline.frame()
    made = frame[frame["action"] == "alloc"]
    totals = made.groupby("category", observed=True)["nbytes"].sum()
    parameters = 4 * (8 * 32 + 32 + 32 * 8 + 8)
    assert totals["parameter"] == parameters
    assert totals["gradient"] == 2 * parameters  # made anew in each of the two steps
    assert totals["input"] == 2 * 4 * 8 * 4


def test_phases_follow_the_training_loop():
    frame = traced().timeline.frame()
    assert frame[frame["step"] == -1]["phase"].unique().tolist() == ["other"]
    order = frame[(frame["step"] == 0) & (frame["action"] == "alloc")]["phase"].drop_duplicates().tolist()
    assert order == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("run", [lambda: eb.trace(rules="cpu"), lambda: eb.measure("cpu")], ids=["trace", "measure"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])  # without it the optimizer's step allocates nothing
def test_between_the_optimizer_s_step_and_the_next_module_nothing_is_forward(run, momentum):
    with run() as run:
        model, x = nn.Linear(8, 8), run.to_device(torch.zeros(4, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        for _ in run.steps(2):
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.zeros(1000)
    frame = run.timeline.frame()
    let_go = frame[(frame["action"] == "free") & (frame["category"] == "gradient")]
    assert len(let_go) == 8 and set(let_go["phase"]) == {"other"}
    assert set(frame[frame["nbytes"] == 4000]["phase"]) == {"other"}
    products = frame[(frame["op"] == "addmm") & (frame["action"] == "alloc")]
    assert products[["step", "phase"]].values.tolist() == [[step, "forward"] for step in (0, 0, 1, 1)]


@pytest.mark.parametrize("run", [lambda: eb.trace(rules="cpu"), lambda: eb.measure("cpu")], ids=["trace", "measure"])
def test_a_forward_pass_in_the_closure_of_the_optimizer_s_step_is_forward_and_what_it_keeps_an_activation(run):
    with run() as run:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), run.to_device(torch.zeros(4, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def closure():
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            return loss

        for _ in run.steps(2):
            optimizer.step(closure)
    made = run.timeline.frame().query("action == 'alloc' and step == 1")
    of = made.set_index("op")[["phase", "category"]]
    assert of.loc["tanh"].tolist() == ["forward", "activation"]
    assert set(made[made["category"] == "gradient"]["phase"]) == {"backward"}
    assert set(run.timeline.frame().query("category == 'optimizer state'")["phase"]) == {"optimizer"}


def test_a_step_without_modules_is_forward_again_when_the_next_one_begins():
    with eb.trace(rules="cpu") as run:
        weight = nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in run.steps(2):
            (weight.exp() * 3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = run.timeline.frame().query("action == 'alloc' and category == 'activation' and op == 'exp'")
    assert kept["step"].tolist() == [0, 1]


def test_what_a_closure_of_the_optimizer_runs_is_no_update():
    with eb.trace(rules="cuda") as run:
        weight = nn.Parameter(torch.ones(1000))
        adam = torch.optim.Adam([weight])

        def closure():
            adam.zero_grad()
            loss = weight.exp().sum()
            loss.backward()
            return loss

        for _ in run.steps(2):
            adam.step(closure)
    made = run.timeline.frame().query("action == 'alloc' and nbytes == 4000 and step >= 0")
    assert set(made[made["phase"] == "forward"]["op"]) == {"exp"}
    assert set(made[made["op"] == "exp"]["category"]) == {"activation"}
    moments = made[made["category"] == "optimizer state"]
    assert len(moments) == 2 and set(moments["phase"]) == {"optimizer"}


def test_lines_are_the_user_s_own():
    for column in ("line", "own"):
        lines = traced().timeline.frame()[column]
        assert (
            lines[lines != ""].str.startswith("tests/test_trace.py:").all()
        )  # numbers that Python hands over have none


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_a_backward_pass_makes_is_of_the_line_whose_gradient_it_is():
    def block(x):
        return x.sin().cos()

    with eb.trace(rules="cpu") as run:
        weight = nn.Parameter(torch.ones(1000))
        for _ in run.steps(2):
            scaled = weight * 3
            y = checkpoint(block, scaled, use_reentrant=False)
            doubled = Doubled.apply(y)
            doubled.exp().sum().backward()
    made = run.timeline.frame().query("action == 'alloc' and phase == 'backward' and nbytes == 4000")
    source, first = inspect.getsourcelines(test_what_a_backward_pass_makes_is_of_the_line_whose_gradient_it_is)
    at = {text.strip(): f"tests/test_trace.py:{first + i}" for i, text in enumerate(source)}
    assert set(made["line"]) == {
        at["scaled = weight * 3"],
        at["return x.sin().cos()"],  # recomputed, and its gradients
        at["doubled.exp().sum().backward()"],
        f"tests/test_trace.py:{inspect.getsourcelines(Doubled.backward)[1] + 2}",
    }
    assert made["own"].equals(made["line"])


def test_in_a_library_s_code_the_user_s_line_that_led_there_is_told_too(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "net"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "def forward(x):\n    return x.exp().sum()\n\ndef fit(x):\n    forward(x).backward()\n"
    )
    (tmp_path / "train.py").write_text("import net\n\ndef train(x):\n    net.fit(x)\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    train = importlib.import_module("train").train
    with eb.trace(rules="cpu") as run:
        x = nn.Parameter(torch.ones(1000))
        train(x)
    made = run.timeline.frame().query("action == 'alloc'")
    inside = made[made["own"] == "train.py:4"]
    assert set(inside["phase"]) >= {"backward"} and len(inside) == len(made) - 1
    in_forward, in_engine = "net/__init__.py:2", "net/__init__.py:5"  # the gradient of the loss is autograd's own
    assert set(inside.query("nbytes == 4000")["line"]) == {in_forward}
    assert set(inside["line"]) <= {in_forward, in_engine}


def test_inference_mode_is_traced_as_it_is_measured_for_a_model_made_inside_it_or_outside():
    def forward(layer, attention):
        x = torch.randn(2, 3, 8)
        mixed = torch.einsum("bsi,bti->bst", layer(x), x)  # composites, which arrive in one piece without autograd
        torch.where(mixed > 0, mixed, 0.0).transpose(1, 2).reshape(2, 9).contiguous().softmax(-1)
        layer(x.transpose(0, 1))  # asks whether its weight learns, and adds its bias in place
        attention(x, x, x)
        nn.BatchNorm1d(3)(x)  # a kernel that PyTorch also has in Python

    def body(run):
        made_outside = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.inference_mode():
            forward(*made_outside)
            forward(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True))

    assert_agree(body)


def test_numbers_that_a_write_into_a_view_keeps_stay_with_a_graph_that_any_call_leaves():
    def body(run):
        x = torch.rand(16, 16, requires_grad=True)
        for _ in run.steps(2):
            y = x.clone()
            y[0].mul_(2.0)
            y[1] *= 0.5
            (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            torch.autograd.backward(gradient.sum(), retain_graph=True)
            x.grad = None

    assert_agree(body)


def test_a_tensor_of_no_numbers_is_no_event():
    with eb.trace(rules="cpu") as run:
        kept = torch.tensor([]), torch.Tensor([]), torch.tensor([[]], dtype=torch.long), torch.empty(0, 4)
    assert len(run.timeline) == 0, kept


# -- values ------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_only_looked_at_reads_zero_and_is_recorded():
    with eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean()
        print(f"{loss.item():.3f} {float(loss)} {loss.item() / 2 + 1:.1f}")
        total = sum([loss.item(), loss.item()])
    assert type(total + 0.0) is not bool
    assert len(run.unknown_reads) == 5
    assert run.conditional == []


def as_log(tensor):
    return round(tensor.item(), 3)


@pytest.mark.parametrize("read", [lambda t: t.item(), as_log, lambda t: t.tolist(), lambda t: 2 * t.item() - 1])
def test_a_number_read_anywhere_that_decides_a_branch_makes_the_result_conditional(read):
    with eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean()
        if read(loss) > 3:
            loss = loss * 2
    assert len(run.conditional) == 1
    assert "test_trace.py" in run.conditional[0]
    assert run.timeline.info["conditional"] == run.conditional


def test_a_plain_number_that_decides_a_branch_makes_the_result_conditional():
    with eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean()
        value = float(loss)
        if value > 3:
            loss = loss * 2
    assert len(run.conditional) == 1


def test_a_tensor_as_a_condition_makes_the_result_conditional():
    with eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean()
        if loss > 3:
            loss = loss * 2
    assert len(run.conditional) == 1


def test_values_that_follow_from_constants_stay_known():
    with eb.trace() as run:
        steps = torch.tensor(0.0)
        for _ in range(3):
            steps += 1
        index = torch.arange(6).view(2, 3)[1] * 2
        assert steps.item() == 3.0
        assert index.tolist() == [6, 8, 10]
        assert (index.numpy() == [6, 8, 10]).all()
        assert bool((index > 5).all())
    assert run.unknown_reads == []


def test_a_value_written_with_something_unknown_is_unknown():
    with eb.trace() as run:
        known = torch.zeros(())
        known += mlp()(run.to_device(np.ones((4, 8), "float32"))).mean().detach()
        assert known.item() == 0.0
    assert len(run.unknown_reads) == 1


@pytest.mark.parametrize(
    "index", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.masked_select(x > 0), lambda x: x.unique()]
)
def test_a_shape_that_depends_on_values_fails_with_the_user_s_line_and_a_way_out(index):
    with pytest.raises(eb.DataDependentShape, match=r"test_trace\.py:\d+: .*torch\.where"), eb.trace() as run:
        index(run.to_device(np.ones((100, 100), "float32")).exp())


def test_a_mask_of_known_values_selects_as_it_really_would():
    with eb.trace() as run:
        kept = run.to_device(np.ones((4, 8), "float32"))[torch.tensor([True, False, True, False])]
    assert kept.shape == (2, 8)


# -- the surroundings --------------------------------------------------------------------------------------------------


def test_data_of_every_usual_kind_reaches_the_device_in_its_arrangement():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    data = {"x": (np.ones((2, 3)), [frame, 5]), "y": torch.ones(2, dtype=torch.int32)}
    with eb.trace() as run:
        batch = run.to_device(data)
    assert batch["x"][0].shape == (2, 3) and batch["x"][0].dtype == torch.float64
    assert batch["x"][1][0].shape == (2, 2)
    assert run.timeline.by("category")["nbytes"].to_dict() == {"input": 2 * 3 * 8 + 4 * 8 + 8 + 2 * 4}


@pytest.mark.parametrize("data", ["text", object(), np.array(["a", "b"]), np.array([object()])])
def test_data_that_is_no_number_is_refused(data):
    with eb.trace() as run, pytest.raises(TypeError, match="to_device"):
        run.to_device(data)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_a_number_of_steps_that_is_none_is_refused(count):
    with eb.trace() as run, pytest.raises(ValueError, match="positive integer"):
        run.steps(count)


def test_unknown_rules_and_devices_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="rules='rocm'"):
        eb.trace(rules="rocm")
    with pytest.raises(ValueError, match="device='tpu'"):
        eb.measure(device="tpu")


def test_a_failure_inside_leaves_torch_as_it_was():
    before = (F.has_torch_function, torch.get_rng_state, torch.backends.mha.get_fastpath_enabled())
    with pytest.raises(ZeroDivisionError), eb.trace():
        nn.Linear(2, 2)
        raise ZeroDivisionError
    assert (F.has_torch_function, torch.get_rng_state, torch.backends.mha.get_fastpath_enabled()) == before
    assert torch.ones(1).device.type == "cpu"
    assert traced().timeline.peak_bytes == traced().timeline.peak_bytes


def test_traces_do_not_nest():
    with eb.trace(), pytest.raises(RuntimeError, match="do not nest"), eb.trace():
        pass


def test_code_that_asks_a_tensor_where_it_is_hears_the_device_whose_rules_hold():
    with eb.trace() as run:
        x = run.to_device(np.ones(3, "float32"))
        assert x.device.type == "cpu" and x.is_cpu and not x.is_meta
        assert (x + torch.arange(3, device=x.device)).shape == (3,)
        assert x.cpu() is x and x.to("cpu").shape == (3,)


def test_a_loader_shuffles_as_it_really_does_and_its_batches_have_their_shapes():
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.ones(10, 3))
    seen = []
    with eb.trace() as run:
        for index, x in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            seen += index.tolist()
            assert run.to_device(x).shape[1] == 3
    assert sorted(seen) == list(range(10))
    assert run.unknown_reads == []


def test_a_model_made_outside_is_refused_at_the_user_s_line_with_the_way_out():
    model = mlp()
    with pytest.raises(ValueError, match=r"test_trace\.py:\d+: .*run\.to_device"), eb.trace() as run:
        model(run.to_device(np.ones((4, 8), "float32")))


def test_a_model_made_outside_is_brought_in_as_a_copy():
    model = mlp()
    with eb.trace() as run:
        copied = run.to_device(model)
        copied(run.to_device(np.ones((4, 8), "float32"))).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].weight.device.type == "cpu" and not model[0].weight.is_meta
    assert run.timeline.by("category", event=-1)["nbytes"]["parameter"] == 4 * (8 * 32 + 32 + 32 * 8 + 8)


def test_layers_made_without_initialisation_are_traced():
    with eb.trace() as run:
        layer = nn.utils.skip_init(nn.Linear, 8, 8)
        layer(run.to_device(np.ones((4, 8), "float32"))).sum().backward()
    assert run.timeline.by("category", event=-1)["nbytes"]["parameter"] == 4 * (8 * 8 + 8)


def test_a_tensor_of_losses_is_made_of_unknown_values():
    with eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean().detach()
        both = torch.tensor([loss, loss])
        assert both.shape == (2,)
        both[0].item()
    assert len(run.unknown_reads) == 3


SIZES = [
    lambda x, n: x[:, : n.item()],
    lambda x, n: x[:, :n],
    lambda x, n: torch.zeros(n.item(), 4),
    lambda x, n: x.new_zeros(2 * n.item()),
    lambda x, n: x.narrow(1, 0, n.item()),
    lambda x, n: F.pad(x, (0, n.item())),
    lambda x, n: torch.zeros(int(x.sum().item())),
    lambda x, n: [x for _ in range(n.item())],
    lambda x, n: [x for _ in range(n)],
]


@pytest.mark.parametrize("use", SIZES)
@pytest.mark.parametrize("rules", ["cpu", "cuda"])
def test_an_unknown_value_that_becomes_a_size_makes_the_trace_conditional(use, rules):
    with eb.trace(rules=rules) as run:
        x, n = torch.empty(4, 4), run.to_device(np.ones(2**18, "int64")).sum()
        use(x, n)
    assert len(run.conditional) == 1


def test_an_unknown_value_that_is_counted_or_printed_is_no_condition():
    with eb.trace() as run:
        x, n = torch.empty(4, 4), run.to_device(np.ones(2**18, "int64")).sum()
        _ = x[:, :2] * n.item() / (n.item() + 1), f"{n.item():d} {x.mean().item():.3f}", int(n.item())
        _ = x[:, : torch.tensor(3)]  # this one is known
    assert run.conditional == []


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: divmod(loss, 2)[0] < 1,
        lambda loss: divmod(7, loss + 1)[1] < 1,
        lambda loss: statistics.mean([loss, 0.5]) < 1,  # which turns it into a fraction, and back by its type
        lambda loss: loss.is_integer(),
        lambda loss: copy.deepcopy({"loss": loss})["loss"] < 1,
    ],
)
def test_an_unknown_value_is_still_unknown_after_what_the_standard_library_makes_of_it(use):
    with eb.trace() as run:
        use(mlp()(run.to_device(np.ones((4, 8), "float32"))).mean().item())
    assert len(run.conditional) == 1


def test_an_op_without_a_shape_rule_is_refused_in_one_line():
    with pytest.raises(NotImplementedError, match=r"test_trace\.py:\d+: .* cannot be traced"), eb.trace() as run:
        torch.histogram(run.to_device(np.ones(5000, "float32")).exp(), 4)


def test_a_compiled_model_is_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.compile is not covered"), eb.trace() as run:
        torch.compile(mlp())(run.to_device(np.ones((4, 8), "float32")))


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.compile(lambda x: x + 1),
        lambda: torch.distributed.init_process_group("gloo"),
        lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
        lambda: torch.multiprocessing.spawn(print, nprocs=2),
    ],
)
def test_what_no_rules_cover_ends_a_trace_by_any_rules(call):
    with pytest.raises(NotImplementedError, match=r"test_trace\.py:\d+: .* is not covered: "), eb.trace():
        call()


def test_runs_are_used_once():
    for make in (eb.trace, eb.measure):
        run = make()
        with run:
            pass
        with pytest.raises(RuntimeError, match="make a new one"), run:
            pass


def test_a_failure_after_a_branch_on_an_unknown_value_says_where_it_was_taken():
    with pytest.raises(AssertionError) as caught, eb.trace() as run:
        loss = mlp()(run.to_device(np.ones((4, 8), "float32"))).mean()
        large = bool(loss > 9)
        assert large
    assert "does not know, at" in caught.value.__notes__[0]


def test_a_value_dies_with_the_tensor_that_had_it():
    """A host tensor's stand-in is gone after the op; a new tensor at its address does not have its value."""
    host = torch.full((8,), 7.0)
    with eb.trace(rules="cpu") as run:
        weight = torch.randn(8)
        for _ in range(100):
            product = weight * host
            assert product.sin().sum().item() == 0
            del product
    assert len(run.unknown_reads) == 100
