"""Traced and measured agree to the byte and allocation by allocation, one mechanism of PyTorch at a time."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everybyte as eb


def pair(body):
    """The same body measured and traced, scratch left out."""
    runs = []
    for context in (eb.measure(device="cpu"), eb.trace(rules="cpu")):
        with context as run:
            torch.manual_seed(0)
            body(run)
        runs.append(run.timeline.without("scratch"))
    return runs


def assert_equal(body):
    measured, traced = pair(body)
    difference = traced.allocations().sub(measured.allocations(), fill_value=0)
    assert difference[difference != 0].to_dict() == {}
    assert traced.peak_bytes == measured.peak_bytes
    assert traced.start_bytes == measured.start_bytes
    return measured, traced


def training(build, data, loss=lambda y: y.float().square().mean(), optimizer=torch.optim.SGD, **options):
    def body(run):
        model = build()
        stepper = optimizer(model.parameters(), lr=0.1, **options)
        for _ in run.steps(2):
            loss(model(run.to_device(data))).backward()
            stepper.step()
            stepper.zero_grad()

    return body


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


class Apply(nn.Module):
    """A model from a function of its layers and its input."""

    def __init__(self, function, *layers):
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, x):
        return self.function(*self.layers, x)


class Attention(nn.Module):
    def __init__(self, dropout=0.0, causal=True):
        super().__init__()
        self.qkv, self.out, self.dropout, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), dropout, causal

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 4, h // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate + x * gate * (1 - gate))


class ThenEvaluated(nn.Module):
    """A layer that learns, and a module that is evaluated between forward and backward."""

    def __init__(self, module):
        super().__init__()
        self.learns, self.module = nn.Linear(8, 8), module

    def forward(self, x):
        y = self.learns(x)
        with torch.no_grad():
            evaluated = self.module.eval()(y)
        return y + evaluated


MODELS = {
    "contributions to one gradient are summed in place": (
        lambda: Apply(lambda f, x: f(torch.tanh(f(f(x).relu_()))) + f(x), nn.Linear(16, 16)),
        normal(8, 16),
    ),
    "scattering gradients writes into one fresh tensor": (
        lambda: Apply(
            lambda f, x: (
                f(x).gather(1, torch.zeros(8, 4, dtype=torch.long)) + f(x)[:, torch.arange(4)] + f(x).topk(4)[0]
            ),
            nn.Linear(16, 16),
        ),
        normal(8, 16),
    ),
    "linear adds its bias in place to a product of non-contiguous input": (
        lambda: Apply(lambda f, x: f(x.transpose(0, 1)), nn.Linear(16, 16)),
        normal(5, 7, 16),
    ),
    "a product and a sum written by the user are two tensors": (
        lambda: Apply(lambda f, x: x @ f.weight.t() + f.bias, nn.Linear(16, 16)),
        normal(8, 16),
    ),
    "numbers become tensors that multiplication keeps": (
        lambda: Apply(lambda f, x: (f(x) * 0.5 / 3 + 1) * 2.0 - 1, nn.Linear(16, 16)),
        normal(8, 16),
    ),
    "attention by the fused kernel": (Attention, normal(4, 16, 32)),
    "attention by the fused kernel, no mask, odd length": (lambda: Attention(causal=False), normal(2, 17, 32)),
    "attention with dropout takes the path with scores": (lambda: Attention(dropout=0.1), normal(4, 16, 32)),
    "attention of PyTorch's own module, with weights": (
        lambda: Apply(lambda f, x: f(x, x, x)[0], nn.MultiheadAttention(32, 4, batch_first=True)),
        normal(4, 16, 32),
    ),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), normal(4, 16, 32)),
    "an LSTM by oneDNN, its workspace kept": (
        lambda: Apply(lambda f, x: f(x)[0], nn.LSTM(16, 24, 2, bidirectional=True, dropout=0.1)),
        normal(9, 4, 16),
    ),
    "an LSTM over batch-first input": (
        lambda: Apply(lambda f, x: f(x)[0], nn.LSTM(16, 24, batch_first=True)),
        normal(4, 9, 16),
    ),
    "convolution, batch norm, in-place ReLU, pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 8, 3),
        ),
        normal(4, 3, 20, 20),
    ),
    "a table tied to the output layer": (
        lambda: Apply(lambda table, x: F.linear(table(x), table.weight), nn.Embedding(50, 16, padding_idx=0)),
        np.arange(28).reshape(4, 7),
    ),
    "checkpointing, which keeps the generator's state": (
        lambda: Apply(
            lambda f, g, x: checkpoint(g, f(x), use_reentrant=False),
            nn.Linear(16, 16),
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)),
        ),
        normal(8, 16),
    ),
    "checkpointing, the reentrant kind": (
        lambda: Apply(lambda f, g, x: checkpoint(g, f(x), use_reentrant=True), nn.Linear(16, 16), nn.Linear(16, 16)),
        normal(8, 16),
    ),
    "a GRU in both directions": (
        lambda: Apply(lambda f, x: f(x)[0], nn.GRU(16, 24, 2, bidirectional=True, dropout=0.1)),
        normal(4, 9, 16),
    ),
    "a plain RNN without biases": (
        lambda: Apply(lambda f, x: f(x)[1], nn.RNN(16, 24, nonlinearity="relu", batch_first=True, bias=False)),
        normal(4, 9, 16),
    ),
    "an LSTM with a projection, which oneDNN does not take": (
        lambda: Apply(lambda f, x: f(x)[0], nn.LSTM(16, 24, proj_size=8)),
        normal(4, 9, 16),
    ),
    "an LSTM without biases": (lambda: Apply(lambda f, x: f(x)[0], nn.LSTM(16, 24, bias=False)), normal(4, 9, 16)),
    "batch norm over a transposed view lays its results out anew": (
        lambda: Apply(
            lambda f, norm, x: norm(f(x).transpose(1, 2)).transpose(1, 2), nn.Linear(6, 6), nn.BatchNorm1d(6)
        ),
        normal(4, 5, 6),
    ),
    "sums that a formula makes itself stay out of place": (
        lambda: Apply(lambda f, x: torch.atan2(f(x), f(x) * 2) + sum(torch.var_mean(f(x), 0)), nn.Linear(6, 6)),
        normal(4, 6),
    ),
    "sums that a custom function makes stay out of place": (
        lambda: Apply(lambda f, x: Swish.apply(f(x)), nn.Linear(6, 6)),
        normal(4, 6),
    ),
    "mish has one kernel for its gradient": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Mish()), normal(4, 6)),
    "one-hot scatters": (lambda: Apply(lambda f, x: f(F.one_hot(x, 6).float()), nn.Linear(6, 6)), np.arange(4)),
    "a list as an index is a tensor": (lambda: Apply(lambda f, x: f(x)[:, [0, 1]], nn.Linear(6, 6)), normal(4, 6)),
    "attention in evaluation is one kernel": (
        lambda: ThenEvaluated(Apply(lambda f, x: f(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True))),
        normal(3, 5, 8),
    ),
    "a transformer layer in evaluation is one kernel": (
        lambda: ThenEvaluated(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
        normal(3, 5, 8),
    ),
    "an LSTM without biases in evaluation makes zeros for each call": (
        lambda: ThenEvaluated(Apply(lambda f, x: f(x)[0], nn.LSTM(8, 8, 2, bias=False))),
        normal(3, 5, 8),
    ),
    "pooling in evaluation keeps no indices": (lambda: ThenEvaluated(nn.MaxPool1d(1)), normal(3, 5, 8)),
    "layer norm in half precision keeps half-precision statistics": (
        lambda: nn.Sequential(nn.Linear(16, 50), nn.LayerNorm(50), nn.Softmax(-1), nn.Dropout(0.1)).bfloat16(),
        torch.ones(8, 16, dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_traced_equals_measured(name):
    build, data = MODELS[name]
    assert_equal(training(build, data))


LOSSES = {
    "mse keeps the unreduced loss's storage": lambda y: F.mse_loss(y, torch.zeros(8, 50)),
    "smooth l1 keeps the unreduced loss's storage": lambda y: F.smooth_l1_loss(y, torch.zeros(8, 50)),
    "binary cross entropy keeps the unreduced loss's storage": lambda y: F.binary_cross_entropy(
        y.sigmoid(), torch.ones(8, 50)
    ),
    "soft margin keeps the unreduced loss's storage": lambda y: F.soft_margin_loss(y, torch.ones(8, 50)),
    "binary cross entropy with a weight for positives, which has another shape": lambda y: (
        F.binary_cross_entropy_with_logits(y, torch.zeros(8, 50), pos_weight=torch.ones(50))
    ),
    "mse of a transposed prediction has a contiguous gradient": lambda y: F.mse_loss(y.t(), torch.zeros(50, 8)),
    "cross entropy": lambda y: F.cross_entropy(y, torch.arange(8)),
    "binary cross entropy works on its gradient in place": lambda y: F.binary_cross_entropy_with_logits(
        y, torch.zeros(8, 50)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_traced_equals_measured_for_the_loss(name):
    assert_equal(training(lambda: nn.Linear(16, 50), normal(8, 16), loss=LOSSES[name]))


OPTIMIZERS = {
    "Adam, one tensor at a time": (torch.optim.Adam, {"foreach": False}),
    "Adam, all tensors at once": (torch.optim.Adam, {"foreach": True}),
    "AdamW with amsgrad": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD with Nesterov momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop, centred": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_traced_equals_measured_for_the_optimizer(name):
    kind, options = OPTIMIZERS[name]
    assert_equal(training(mlp, normal(4, 8), optimizer=kind, **options))


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def test_the_profiler_s_numbers_are_what_arithmetic_says():
    """Nothing traced is in this comparison: a forward pass of one layer, counted by hand."""
    with eb.measure() as run:
        layer = nn.Linear(8, 32)
        x = run.to_device(normal(4, 8))
        with torch.no_grad():
            for _ in run.steps(1):
                y = layer(x)
                del y
    assert run.timeline.start_bytes == 4 * (8 * 32 + 32) + 4 * 8 * 4
    assert run.timeline.without("scratch").peak_above_start == 4 * 4 * 32


def test_memory_that_a_kernel_takes_for_itself_is_scratch_and_names_the_kernel():
    def body(run):
        x = run.to_device(normal(64, 64))
        for _ in run.steps(1):
            F.conv1d(x[None].transpose(1, 2), torch.ones(8, 64, 3))

    with eb.measure() as run:
        body(run)
    scratch = run.timeline.frame().query("category == 'scratch' and action == 'alloc'")
    assert "convolution" in set(scratch["op"])


def test_categories_agree_between_traced_and_measured_at_the_peak():
    measured, traced = assert_equal(training(mlp, normal(4, 8), optimizer=torch.optim.Adam, foreach=False))
    assert measured.by("category").equals(traced.by("category"))


def test_backward_belongs_to_the_same_modules_traced_and_measured():
    measured, traced = assert_equal(training(mlp, normal(4, 8)))
    sums = [
        t.frame().query("action == 'alloc' and phase == 'backward'").groupby("module", observed=True)["nbytes"].sum()
        for t in (measured, traced)
    ]
    assert sums[0].drop("", errors="ignore").to_dict() == sums[1].drop("", errors="ignore").to_dict()


def test_measurements_do_not_nest():
    with eb.measure(), pytest.raises(RuntimeError, match="do not nest"), eb.measure():
        pass


def test_measuring_breaks_nothing_that_runs_without_it():
    table = nn.Embedding(20, 4, sparse=True)
    with eb.measure():
        nn.LazyLinear(3)(torch.ones(2, 4))
        table(torch.arange(3)).sum().backward()
        torch.func.grad(lambda x: nn.Linear(4, 1)(x).sum())(torch.ones(4))
    assert table.weight.grad.is_sparse


def test_results_written_into_a_tensor_given_for_them_grow_it():
    def body(run):
        x = run.to_device(normal(6, 8))
        for _ in run.steps(1):
            out = torch.empty(0)
            torch.mul(x, x, out=out)

    assert_equal(body)


def test_a_graph_that_stays_is_walked_twice_alike():
    def body(run):
        layer = nn.Linear(6, 6)
        for _ in run.steps(2):
            y = layer(run.to_device(normal(5, 6)))
            z = torch.atan2(y, y * 2)
            z.select(1, 0).mul_(2)
            loss = z.sum()
            loss.backward(retain_graph=True)
            loss.backward()
            layer.zero_grad()

    assert_equal(body)


def test_what_lived_before_the_measurement_is_not_counted():
    before = torch.ones(1000)
    with eb.measure() as run:
        del before
    assert len(run.timeline) == 0


def test_the_timeline_is_read_after_the_block():
    with eb.measure() as run, pytest.raises(RuntimeError, match="after the with block"):
        _ = run.timeline


def test_a_failure_inside_is_the_user_s_own_and_the_next_measurement_works():
    with pytest.raises(ZeroDivisionError), eb.measure():
        raise ZeroDivisionError
    assert_equal(training(mlp, normal(4, 8)))


def test_looking_keeps_no_module_alive():
    def body(run):
        for _ in run.steps(2):
            layer = nn.Linear(100, 100)
            layer(run.to_device(normal(1, 100)))
            del layer

    measured, _ = assert_equal(body)
    assert measured.growth_per_step()["growth"].to_dict() == {0: 0, 1: 0}
    assert measured.by("category")["nbytes"]["parameter"] == 4 * (100 * 100 + 100)


def test_a_model_brought_in_costs_the_same_traced_and_measured():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.append(model[0])  # shared

    def body(run):
        own = run.to_device(model)
        for _ in run.steps(1):
            own(run.to_device(normal(4, 8))).sum().backward()

    measured, _ = assert_equal(body)
    at_peak = measured.by("category")["nbytes"]
    assert at_peak["parameter"] == 4 * (8 * 8 + 8 + 8 + 8)
    assert at_peak["buffer"] == 4 * (8 + 8) + 8


@pytest.mark.parametrize(
    "start", [lambda: eb.trace(rules="cpu"), lambda: eb.measure(device="cpu")], ids=["traced", "measured"]
)
def test_gradients_are_known_though_their_model_dies_with_the_function_that_made_it(start):
    def train(run):
        layer = nn.Linear(8, 4)
        for _ in run.steps(1):
            layer(torch.ones(2, 8)).sum().backward()

    with start() as run:
        train(run)
    events = run.timeline.frame()
    made = events[(events["category"] == "gradient") & (events["action"] == "alloc")]
    assert sorted(made["nbytes"]) == [4 * 4, 4 * 4 * 8]
