"""What a forward pass pins as PyTorch keeps memory and as candle does: every operand of every recorded operation.

The expected values are counted by hand from the operations: a row of the tables is a tensor that is an operand, and the
result is there because it is held.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import everybyte as eb
from everybyte.models.tft import TFT, TFTConfig, quantile_loss
from everybyte.rules import candle

ROWS, IN, HIDDEN = 5, 3, 8
X, H, ROW = 4 * ROWS * IN, 4 * ROWS * HIDDEN, 4 * ROWS  # bytes of an input, of a hidden tensor, of a number a row


def pinned(forward, retention, *shapes, rules="cpu"):
    """Bytes that a forward pass leaves while its result is held; its inputs, which learn, are there before."""
    with eb.trace(rules=rules, retention=retention) as run:
        inputs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        for _ in run.steps(1):
            held = forward(*inputs)
    del held
    return int(run.timeline.growth_per_step()["growth"].iloc[0])


def softmax(x):
    return x.softmax(-1)


def attend(x):
    return (x @ x.transpose(0, 1)).softmax(-1) @ x


CASES = {
    # name: (forward, shape of its input, bytes as PyTorch, bytes as candle)
    "a sum of sums": (lambda x: ((x + 1) + 2) + 3, (ROWS, HIDDEN), H, 3 * H),  # PyTorch: the result alone
    "exp": (torch.exp, (ROWS, HIDDEN), H, H),  # its result is the one thing either has
    "a view's storage is its base's": (lambda x: (x + 1).view(-1).unsqueeze(0) + 2, (ROWS, HIDDEN), H, 2 * H),
    "contiguous copies": (lambda x: (x + 1).t().contiguous() + 2, (ROWS, HIDDEN), H, 3 * H),
    "cat copies": (lambda x: torch.cat([x + 1, x + 2]) + 2, (ROWS, HIDDEN), 2 * H, 2 * H + 2 * H + 2 * H),
    # maximum, difference, power, sum, result; PyTorch: its result, from which the gradient is written
    "softmax": (softmax, (ROWS, HIDDEN), H, 3 * H + 2 * ROW),
    # sum and mean of each row, centred, squares, their sum, mean, mean + eps and root; result, as there are no weights
    "layer norm": (lambda x: F.layer_norm(x, (HIDDEN,)), (ROWS, HIDDEN), H + 2 * ROW, 3 * H + 6 * ROW),
    # scores q k^T [5, 5]: the scores are the softmax's operand; then the probabilities, and the output
    "attention": (attend, (ROWS, HIDDEN), 4 * ROWS * ROWS + H, 4 * (4 * ROWS * ROWS) + 2 * ROW + H),
    "mean": (lambda x: (x + 1).mean(0), (ROWS, HIDDEN), 4 * HIDDEN, H + 4 * HIDDEN + 4 * HIDDEN),
    # the mask is an operand; PyTorch's on CPU is in the input's dtype, too
    "dropout": (lambda x: F.dropout(x + 1, 0.5), (ROWS, HIDDEN), 2 * H, 3 * H),
    "detach lets go": (lambda x: (((x + 1) + 2) + 3).detach(), (ROWS, HIDDEN), H, H),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operands_that_live_are_those_counted_by_hand(case):
    forward, shape, as_pytorch, as_candle = case
    assert pinned(forward, "pytorch", shape) == as_pytorch
    assert pinned(forward, "candle", shape) == as_candle
    assert pinned(forward, "candle", shape, rules="cuda") == as_candle


class GatedNorm(nn.Module):
    """LayerNorm(W2 ELU(W1 x + b1) + b2), then a softmax: the operations of a gated residual network."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return self.norm(self.outer(F.elu(self.inner(x)))).softmax(-1)


def test_a_network_s_operands_are_those_counted_by_hand():
    with_model = {}
    for retention in ("pytorch", "candle"):
        with eb.trace(retention=retention) as run:
            model, x = GatedNorm(), torch.zeros(ROWS, IN)
            for _ in run.steps(1):
                held = model(x)
        del held
        with_model[retention] = int(run.timeline.growth_per_step()["growth"].iloc[0])
    # ELU's input and its result, the norm's input and statistics, the softmax's result
    assert with_model["pytorch"] == H + H + (H + 2 * ROW) + H
    # x W1, + b1, ELU, h W2, + b2; centred, squares, normed, scaled, six rows; + b; difference, power, two rows, result
    assert with_model["candle"] == 5 * H + (4 * H + 6 * ROW) + H + (2 * H + 2 * ROW) + H


def test_operands_outlive_the_backward_pass_and_die_with_the_loss():
    with eb.trace(retention="candle") as run:
        x = torch.zeros(ROWS, HIDDEN, requires_grad=True)
        for _ in run.steps(1):
            loss = (x + 1).exp().sum()
            forward = run.timeline.live_bytes[-1]
            loss.backward()
            after = run.timeline.live_bytes[-1]
            del loss
            released = run.timeline.live_bytes[-1]
    assert forward == H + 2 * H + 4  # x, the sum, its power, the loss
    assert after == forward + H  # and x's gradient
    assert released == H + H


def test_what_has_no_tracked_argument_is_not_recorded():
    with eb.trace(retention="candle") as run:
        x = torch.zeros(ROWS, HIDDEN)
        for _ in run.steps(1):
            held = ((x + 1) + 2) + 3
    del held
    assert run.timeline.growth_per_step()["growth"].tolist() == [H]


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("retention", ["pytorch", "candle"])
def test_nothing_is_kept_under_inference_mode_and_views_of_a_weight_still_learn(rules, retention):
    with eb.trace(rules=rules, retention=retention) as run:
        layer, x = nn.Linear(HIDDEN, HIDDEN), torch.zeros(ROWS, HIDDEN)
        for _ in run.steps(1):
            with torch.inference_mode():
                out = layer(x)
                views = (layer.weight.t(), layer.weight.T, layer.weight[0], layer.weight.view(-1))
    learn = [view.requires_grad for view in views]
    weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN))
    with torch.inference_mode():
        real = [v.requires_grad for v in (weight.t(), weight.T, weight[0], weight.view(-1))]
    assert learn == real
    assert run.timeline.growth_per_step()["growth"].tolist() == [out.nbytes]


def test_what_candle_composes_and_no_rule_does_is_named():
    with eb.trace(retention="candle") as run:
        lstm = nn.LSTM(4, 4)
        lstm(torch.zeros(2, 1, 4))
    assert run.not_covered == {"lstm (one operation here, composed of several in candle)"}
    assert run.timeline.info["retention"] == "candle"


def test_bad_retention_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match="retention='tinygrad': a trace keeps what 'pytorch' keeps"):
        eb.trace(retention="tinygrad")
    with eb.trace(retention="candle"), pytest.raises(ValueError, match="saved\\(\\) lists what PyTorch keeps"):
        eb.saved(lambda: torch.zeros(1, requires_grad=True) + 1)


class Composed(TorchFunctionMode):
    """Composes functions as candle does; `F.layer_norm` is written in Python and comes in one piece."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return {**candle.FUNCTIONS, F.layer_norm: candle.layer_norm}.get(func, func)(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Writes down of each storage which storages were operands of the operations that made it."""

    def __init__(self):
        super().__init__()
        self.operands = {}
        self.storages = {}  # alive, so that no address comes twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for made in [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]:
            for tensor in (made, *operands):
                self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            if any(tensor.requires_grad for tensor in operands):
                held = self.operands.setdefault(made.untyped_storage()._cdata, set())
                held |= {tensor.untyped_storage()._cdata for tensor in operands}
        return out

    def held_by(self, tensor):
        """What a tensor holds through the operation that made it: the closure over operands, itself included."""
        held, frontier = set(), [tensor.untyped_storage()._cdata]
        while frontier:
            if (storage := frontier.pop()) not in held:
                held.add(storage)
                frontier += self.operands.get(storage, ())
        return held


def test_what_the_tft_s_forward_pins_is_the_closure_over_the_operands_of_a_tape():
    config, batch = TFTConfig(), 8
    with torch.device("meta"), Tape() as tape:
        model, windows = TFT(config), tft_inputs(config, batch)
        before = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *windows)}
        with Composed():
            loss = loss_of(model, windows)
        taped = sum(tape.storages[storage].nbytes() for storage in tape.held_by(loss) - before)

    kept = {}
    for retention in ("pytorch", "candle"):
        with eb.trace(retention=retention) as run:
            model, windows = TFT(config), tft_inputs(config, batch)
            for _ in run.steps(1):
                loss = loss_of(model, windows)
        assert not run.not_covered
        kept[retention] = int(run.timeline.growth_per_step()["growth"].iloc[0])
    assert kept["candle"] == taped
    assert kept["candle"] > 2 * kept["pytorch"]


def tft_inputs(config, b):
    return [torch.zeros(shape) for shape in config.input_shapes(b).values()]


def loss_of(model, windows):
    *inputs, target = windows
    return quantile_loss(model(*inputs), target, model.quantiles)
