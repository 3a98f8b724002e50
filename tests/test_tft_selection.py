"""Three ways to compute a variable selection: one function, one set of parameters, and very different memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import everybyte as eb
from everybyte.data import Batch
from everybyte.models.tft import TFT, TFTConfig, VariableSelection, quantile_loss
from everybyte.models.tft_selection import grouped_state, loop_state
from everybyte.training import train_step

SMALL = TFTConfig(
    features=17, static_features=2, known_features=3, observed_features=12, history=7, horizon=3, hidden=16, heads=2,
    stack_layers=1, selection_keep=4,
)  # fmt: skip
LASTING = ("scratch", "parameter", "gradient", "optimizer state", "buffer")
VARIANTS = ("grouped", "streamed")

configs = st.builds(
    lambda hidden, keep, **switches: replace(SMALL, hidden=2 * hidden, selection_keep=keep, **switches),
    hidden=st.integers(1, 8),
    keep=st.integers(0, 4),
    dropout=st.sampled_from((0.0, 0.3)),
    context=st.sampled_from(("every", "none")),
    skip=st.sampled_from(("project", "none")),
    biases=st.sets(st.sampled_from(("grn", "selection", "context"))).map(lambda chosen: tuple(sorted(chosen))),
)


class Times(nn.Module):
    """A dropout whose mask is given."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def selection(config: TFTConfig, compute: str, n: int, state: dict[str, Tensor] | None = None) -> VariableSelection:
    """In double precision, so that another order of summation shows only far behind the decimal point."""
    made = VariableSelection(replace(config, selection_compute=compute), n).double()
    if state is not None:
        made.load_state_dict(state)
    return made


def outcome(
    made: nn.Module,
    variables: list[Tensor],
    context: Tensor | None,
    autocast: bool = False,
    backward_too: bool = False,
) -> dict[str, Tensor]:
    """The output and every gradient of a fixed function of it."""
    leaves = [x.clone().requires_grad_() for x in (*variables, *([] if context is None else [context]))]
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = made(leaves[: len(variables)], *leaves[len(variables) :])
    drawn_after = torch.rand(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_too):
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = {f"input {i}": x.grad for i, x in enumerate(leaves)} | {"output": y.detach(), "drawn after": drawn_after}
    return found | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(configs, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_streamed_selection_has_the_loop_s_output_gradients_and_random_numbers(config, n, batch, has_context):
    torch.manual_seed(0)
    loop = selection(config, "loop", n)
    streamed = selection(config, "streamed", n, loop.state_dict())
    variables = list(torch.randn(batch, 5, n, dtype=torch.double).split(1, -1))
    context = torch.randn(batch, 1, config.hidden, dtype=torch.double) if has_context else None
    assert_same(outcome(streamed, variables, context), outcome(loop, variables, context))


@given(configs, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_grouped_selection_has_the_loop_s_output_and_gradients(config, n, batch, has_context, embedding):
    torch.manual_seed(0)
    config = replace(config, embedding=embedding)
    loop = selection(config, "loop", n)
    grouped = selection(config, "grouped", n, grouped_state(loop.state_dict()))
    masks = torch.randint(0, 2, (n, batch, 5, config.hidden)).double()  # the numbers drawn are in another order
    grouped.variables.gate.dropout = Times(masks)
    for network, mask in zip(loop.variables, masks, strict=True):
        network.gate.dropout = Times(mask)
    width = config.hidden if embedding else 1
    variables = list(torch.randn(n, batch, 5, width, dtype=torch.double))
    context = torch.randn(batch, 1, config.hidden, dtype=torch.double) if has_context else None
    assert_same(loop_state(outcome(grouped, variables, context)), outcome(loop, variables, context))


@pytest.mark.parametrize("compute", VARIANTS)
def test_a_model_s_parameters_go_to_a_variant_and_come_back_unchanged(compute):
    loop, other = TFT(SMALL), TFT(replace(SMALL, selection_compute=compute))
    state = loop.state_dict()
    other.load_state_dict(grouped_state(state) if compute == "grouped" else state)
    back = loop_state(other.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())
    held = {value.untyped_storage().data_ptr() for value in other.state_dict().values()}
    assert {value.untyped_storage().data_ptr() for value in back.values()} == held


def batch_of(config: TFTConfig, size: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(*(torch.randn(config.input_shapes(size)[name], generator=generator) for name in Batch._fields))


def trained(config: TFTConfig, state: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
    """Parameters after some steps of accumulated gradients, each from all batches, in double precision."""
    model = TFT(config).double()
    model.load_state_dict(grouped_state(state) if config.selection_compute == "grouped" else state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(2)
    for _ in range(3):
        for batch in batches:
            static, past, future, target = (x.double() for x in batch)
            quantile_loss(model(static, past, future), target, model.quantiles).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop_state(model.state_dict())


@pytest.mark.parametrize(("compute", "dropout"), [("grouped", 0.0), ("streamed", 0.0), ("streamed", 0.3)])
def test_a_variant_learns_what_the_loop_learns_from_gradients_accumulated_over_batches(compute, dropout):
    config = replace(SMALL, dropout=dropout)
    state = TFT(config).double().state_dict()
    batches = [batch_of(config), batch_of(config, 3)]
    found = trained(replace(config, selection_compute=compute), state, batches)
    assert_same(found, trained(config, state, batches))


@pytest.mark.parametrize("backward_too", [False, True], ids=["backward outside", "backward inside"])
def test_streamed_selection_under_autocast_is_as_near_to_single_precision_as_the_loop(backward_too):
    torch.manual_seed(0)
    config = replace(SMALL, dropout=0.3)
    loop, streamed = VariableSelection(config, 12), VariableSelection(replace(config, selection_compute="streamed"), 12)
    streamed.load_state_dict(loop.state_dict())
    variables, context = list(torch.randn(2, 5, 12).split(1, -1)), torch.randn(2, 1, config.hidden)
    exact = outcome(loop, variables, context)

    def error(made: nn.Module) -> float:
        made.zero_grad()
        found = outcome(made, variables, context, autocast=True, backward_too=backward_too)
        assert found.keys() == exact.keys()
        return np.mean([((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()])

    assert 1e-3 < error(streamed) <= 1.1 * error(loop)


@pytest.mark.parametrize("frozen", ["weights", "variables"])
def test_streamed_selection_trains_what_is_not_frozen(frozen):
    selected = selection(replace(SMALL, selection_compute="streamed"), "streamed", 6)
    getattr(selected, frozen).requires_grad_(False)
    selected(list(torch.randn(2, 5, 6, dtype=torch.double).split(1, -1))).sum().backward()
    learns = {name for name, p in selected.named_parameters() if p.grad is not None}
    context = {name for name, _ in selected.named_parameters() if ".context." in name}
    assert learns == {name for name, _ in selected.named_parameters() if not name.startswith(frozen)} - context


def test_streamed_selection_refuses_to_hand_gradients_out_where_it_would_leave_them_behind():
    selected = selection(SMALL, "streamed", 3)
    y = selected(list(torch.randn(2, 5, 3, dtype=torch.double).split(1, -1)))
    with pytest.raises(RuntimeError, match=r"call backward\(\) without inputs, not autograd.grad"):
        torch.autograd.grad(y.sum(), list(selected.parameters()), allow_unused=True)


def two_steps(run, config: TFTConfig) -> eb.Timeline:
    host = batch_of(config)
    with run:
        model = TFT(config)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
        for _ in run.steps(2):
            train_step(model, optimizer, run.to_device(host))
    return run.timeline.without("scratch")


@pytest.mark.parametrize("compute", VARIANTS)
def test_each_variant_traced_is_the_variant_measured_allocation_by_allocation(compute):
    config = replace(SMALL, selection_compute=compute)
    traced, measured = two_steps(eb.trace(rules="cpu"), config), two_steps(eb.measure(device="cpu"), config)
    assert traced.peak_above_start == measured.peak_above_start
    pd.testing.assert_series_equal(traced.allocations(), measured.allocations())


def beyond(config: TFTConfig, size: int) -> int:
    """Bytes that forward and backward have at their peak beside weights and gradients: saved, and temporary."""
    host = batch_of(config, size)
    with eb.trace(rules="cpu") as run:
        model = TFT(config)
        for _ in run.steps(1):
            batch = run.to_device(host)
            quantile_loss(model(*batch[:3]), batch.target, model.quantiles).backward()
    return run.timeline.without(*LASTING).peak_bytes


def test_streamed_memory_grows_with_a_variable_by_less_than_its_output():
    small, large = (replace(SMALL, observed_features=n, features=n + 5, selection_compute="streamed") for n in (8, 24))
    grown = beyond(large, 2) - beyond(small, 2)
    output = 4 * 2 * SMALL.history * SMALL.hidden  # of one variable; it has its weight, logit and data, and no more
    assert grown < (24 - 8) * output / 2


def test_streamed_full_width_model_has_an_eighth_of_the_loop_s_bytes_in_forward_and_backward():
    assert 8 * beyond(TFTConfig(selection_compute="streamed"), 8) <= beyond(TFTConfig(), 8)


def sketched(
    self: VariableSelection, variables: list[Tensor], context: Tensor | None = None, recorded: bool = True
) -> Tensor:
    """The report's own way to stream: room for all outputs at first, then each is copied into its slice."""
    stacked = torch.zeros(*variables[0].shape[:-1], self.weights.in_features // len(variables), len(variables))
    for i, (network, x) in enumerate(zip(self.variables, variables, strict=True)):
        (stacked if recorded else stacked.detach())[..., i] = network(x, context)
    weights = self.weights(stacked.transpose(-1, -2).flatten(-2)).softmax(-1)
    return (stacked @ weights.unsqueeze(-1)).squeeze(-1)


def test_sketch_of_the_report_keeps_all_the_loop_keeps_and_a_copy_more():
    rows, n, h = 2 * 7, 12, SMALL.hidden
    kept = {}
    with eb.trace(rules="cpu"):
        made, context = VariableSelection(SMALL, n), torch.randn(2, 1, h)
        x = torch.randn(2, 7, n)
        for forward in (VariableSelection.forward, sketched):
            kept[forward] = eb.saved(lambda forward=forward: forward(made, list(x.split(1, -1)), context))
    loop, sketch = kept.values()
    outputs = 4 * rows * n * h
    assert sketch.total_bytes == loop.total_bytes + outputs  # the slices are columns; the selection layer needs rows
    assert sorted(sketch.frame()["nbytes"])[-2:] == [outputs, outputs]


def test_sketch_of_the_report_teaches_the_networks_nothing_where_writing_a_slice_is_not_recorded():
    """As in candle, whose `Tensor::slice_set` is documented not to go with back-propagation; PyTorch records it."""
    made = VariableSelection(replace(SMALL, dropout=0.0), 5)
    variables = list(torch.randn(2, 7, 5).split(1, -1))
    learns = {}
    for recorded in (True, False):
        made.zero_grad()
        y = sketched(made, variables, recorded=recorded)
        torch.testing.assert_close(y, made(variables))
        y.sum().backward()
        learns[recorded] = {name.partition(".")[0] for name, p in made.named_parameters() if p.grad is not None}
    assert learns == {True: {"variables", "weights"}, False: {"weights"}}
