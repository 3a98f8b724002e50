"""The closed forms of TFT-225 against the network itself: counted parameters, and storages that autograd keeps."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace

import pytest
import torch

import everybyte as eb
from everybyte.data import Batch
from everybyte.formulas import tft as formulas
from everybyte.models.tft import BIASED, CHOICES, TFT, TFTConfig, parameters_by_component, quantile_loss
from everybyte.training import train_step

GENERATOR = torch.get_rng_state().nbytes
PRESETS = {
    **TFTConfig.readings(),
    "published": TFTConfig.published(),
    **{compute: TFTConfig(selection_compute=compute) for compute in ("grouped", "streamed")},
}


class Kept:
    """What autograd holds in place of a tensor: it dies with the graph, so it shows what the graph keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def kept_bytes(model: TFT, batch: int) -> tuple[int, int, torch.Tensor]:
    """What lives between forward and backward, parameters left out: bytes of tensors, of opaque workspace, the loss."""
    shapes = model.config.input_shapes(batch)
    static, past, future, target = (torch.randn(shapes[name]) for name in ("static", "past", "future", "target"))
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss = quantile_loss(model(static, past, future), target, model.quantiles)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tensors = {kept.tensor.untyped_storage().data_ptr(): kept.tensor for kept in alive}
    opaque = [x.untyped_storage().nbytes() for x in tensors.values() if x.dtype == torch.uint8]
    workspace = sum(nbytes for nbytes in opaque if nbytes != GENERATOR)
    known = sum(x.untyped_storage().nbytes() for p, x in tensors.items() if p not in parameters)
    return known - workspace + kept_numbers(loss), workspace, loss


def kept_numbers(loss: torch.Tensor) -> int:
    """Bytes of Python numbers kept as factors, on which PyTorch runs no hooks (saved_variable.cpp, wrapped numbers)."""
    found, frontier = set(), [loss.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is not None and node not in found:
            found.add(node)
            frontier += [parent for parent, _ in node.next_functions]
    others = [node._saved_other for node in found if node.name() == "MulBackward0"]
    return sum(x.untyped_storage().nbytes() for x in others if x is not None and x.dtype == torch.float64)


def any_config(chance: random.Random) -> TFTConfig:
    """A small model with every switch drawn at random."""
    while True:
        static, known, observed = (chance.randint(1, 4) for _ in range(3))
        heads, embedding, fused = chance.choice([1, 2, 4]), chance.random() < 0.5, chance.random() < 0.3
        switches = {name: chance.choice(values) for name, values in CHOICES.items()}
        try:
            return TFTConfig(
                features=static + known + observed,
                static_features=static,
                known_features=known,
                observed_features=observed,
                history=chance.randint(1, 6),
                horizon=chance.randint(2, 5),
                quantiles=(0.1, 0.5, 0.9)[: chance.randint(1, 3)],
                hidden=heads * chance.randint(2, 4),
                heads=heads,
                stack_layers=chance.randint(0, 3),
                max_positions=chance.choice([0, 20]),
                biases=tuple(name for name in (*BIASED, "context", "qkv") if chance.random() < 0.6),
                selection_keep=chance.randint(0, 5),
                dropout=chance.choice([0.0, 0.3]),
                attention_dropout=0.0 if fused else chance.choice([0.0, 0.3]),
                fused_attention=fused,
                causal=chance.random() < 0.5,
                embedding=embedding,
                known_in_history=embedding and chance.random() < 0.5,
                gates=chance.random() < 0.5,
                **switches,
            )
        except ValueError as error:  # the two combinations of switches that no model has
            assert "feeds no layer" in str(error) or "one by one" in str(error)


def test_generator_s_state_has_the_size_that_the_closed_form_takes():
    assert formulas.sizes(TFTConfig())[formulas.g] == GENERATOR


def substituted(terms, sizes) -> int:
    """The terms' sum, an LSTM kernel's opaque workspace left out."""
    return int(formulas.total(terms).subs({formulas.w_e: 0, formulas.w_d: 0} | sizes))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_counted_component_by_component_by_its_closed_form(name):
    config = PRESETS[name]
    with torch.device("meta"):
        model = TFT(config)
    computed = {k: substituted(v, formulas.sizes(config)) for k, v in formulas.parameters(config).items()}
    assert computed == parameters_by_component(model)
    assert sum(computed.values()) == sum(parameter.numel() for parameter in model.parameters())


def test_report_components_follow_from_the_closed_forms_where_its_arithmetic_holds():
    config = replace(TFTConfig.seed(), biases=())
    at = {formulas.h: 256, formulas.a: 8, formulas.f: 10, formulas.q: 9, formulas.L: 3}
    parts = {name: formulas.total(terms).subs(at) for name, terms in formulas.parameters(config).items()}
    assert parts["attention"] == 262_656  # its "Attention Total"
    assert parts["recurrence"] == 2 * 65_536  # its LSTM encoder and decoder
    assert parts["head"] == 23_040  # its quantile layer
    assert parts["historical_stack"] / 3 == 262_656  # its "~263K" a layer


def test_joint_selection_of_210_variables_has_the_parameters_reported_for_it_elsewhere():
    config = replace(TFTConfig(), selection="grn", context="none")
    parts = formulas.selection_weights(config, formulas.n_o)
    count = sum(weight.count for tensors in parts.values() for weight in tensors)
    assert count.subs(formulas.sizes(config)) == 66_998_298


@pytest.mark.parametrize("seed", range(5))
def test_closed_forms_hold_for_every_switch(seed):
    chance = random.Random(seed)
    for _ in range(8):
        config, batch = any_config(chance), chance.randint(2, 3)
        model, sizes = TFT(config), formulas.sizes(config, batch)
        computed = {k: substituted(v, sizes) for k, v in formulas.parameters(config).items()}
        assert computed == parameters_by_component(model), config
        tensors = sum(w.copies for group in formulas.weights(config).values() for w in group)
        assert int(tensors.subs(sizes)) == len(list(model.parameters())), config

        kept, workspace, loss = kept_bytes(model, batch)
        assert substituted(formulas.saved(config), sizes) == kept, config
        assert bool(workspace) == (config.recurrence == "lstm")

        loss.backward()
        learned = sum(p.numel() for p in model.parameters() if p.grad is not None)
        assert int(formulas.model_state(config)["gradients"].subs(sizes)) == 4 * learned, config


def test_what_the_full_width_default_keeps_is_its_closed_form_to_the_byte():
    config = replace(TFTConfig(), history=7, horizon=3)
    kept, _, _ = kept_bytes(TFT(config), 2)
    assert substituted(formulas.saved(config), formulas.sizes(config, 2)) == kept


@pytest.mark.parametrize("name", PRESETS)
def test_what_each_preset_keeps_over_60_bars_is_its_closed_form_to_the_byte(name):
    config = replace(PRESETS[name], hidden=16)
    kept, _, _ = kept_bytes(TFT(config), 3)
    assert substituted(formulas.saved(config), formulas.sizes(config, 3)) == kept


def test_the_scale_of_every_head_is_kept_as_a_double_on_a_cpu_and_not_on_a_gpu():
    config = TFTConfig()
    scale = formulas.saved(config)["attention"]["scale"]
    assert scale.subs(formulas.sizes(config)) == 8 * 8
    assert scale.subs(formulas.sizes(config, mask=1, number=0)) == 0


SMALL = TFTConfig(
    features=45, static_features=2, known_features=3, observed_features=40, history=6, horizon=4, quantiles=(0.1, 0.5),
    hidden=16, heads=2, stack_layers=1, max_positions=10,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.0, "context": "none", "biases": ("grn", "selection")},
        {"stack_layers": 2, "skip": "none", "attention": "shared value", "causal": True, "attention_dropout": 0.2},
        {"heads": 4, "head": "step", "biases": ("context", "qkv"), "stack_layers": 0, "max_positions": 0},
    ],
    ids=lambda changes: ", ".join(changes) or "default",
)
@pytest.mark.parametrize("batch_size", [2, 5])
def test_peak_of_a_step_is_its_closed_form_in_both_phases(changes, batch_size):
    config = replace(SMALL, **changes)
    shapes = config.input_shapes(batch_size)
    host = Batch(*(torch.zeros(shapes[name]) for name in Batch._fields))
    with eb.trace(rules="cpu") as run:
        model = TFT(config)
        adam = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in run.steps(2):
            train_step(model, adam, run.to_device(host))
    timeline = run.timeline.without("scratch")
    phase = timeline.frame()["phase"].where(timeline.frame()["step"] == 1)
    for name, terms in formulas.peak(config).items():
        highest = timeline.live_bytes[phase == name].max() - timeline.start_bytes
        assert highest == substituted(terms, formulas.sizes(config, batch_size)), name


@pytest.mark.parametrize("change", [{"selection": "grn"}, {"selection_compute": "streamed"}, {"recurrence": "lstm"}])
def test_peak_refuses_a_model_it_was_not_written_for(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        formulas.peak(replace(SMALL, **change))


def test_adam_state_counts_only_parameters_that_a_gradient_reaches():
    config = replace(
        TFTConfig(),
        features=6, static_features=2, known_features=2, observed_features=2, history=4, horizon=2, hidden=8, heads=2,
    )  # fmt: skip
    model = TFT(config)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    _, _, loss = kept_bytes(model, 2)
    loss.backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in states)
    terms = {k: int(v.subs(formulas.sizes(config))) for k, v in formulas.model_state(config).items()}
    assert terms["optimizer moments"] + terms["optimizer step counters"] == nbytes
    assert terms["parameters"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert terms["gradients"] < terms["parameters"]
    buffers = {name: buffer.numel() * buffer.element_size() for name, buffer in model.named_buffers()}
    assert buffers == {"position.table": terms["positional table"], "quantiles": terms["quantiles"]}
