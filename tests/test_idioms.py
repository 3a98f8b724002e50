"""Idioms of models that nobody here wrote, each in a few lines: traced as they run."""

from __future__ import annotations

import copy
import functools
import gc

import numpy as np
import pytest
import torch
from agreement import assert_agree
from torch import nn
from torch.nn import functional as F

import everybyte as eb

RULES = ["cpu", "cuda"]


def rows(*shape):
    return np.ones(shape, "float32")


# -- tensors made by old names -----------------------------------------------------------------------------------------


class OldNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(8, 8).normal_())
        self.bias = nn.Parameter(torch.FloatTensor(8).uniform_())
        self.gain = nn.Parameter(torch.Tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]))
        self.register_buffer("places", torch.LongTensor([0, 1, 2]))
        self.register_buffer("counts", torch.LongTensor(3).fill_(1))

    def forward(self, x):
        assert self.places.sum().item() == 3 and self.counts.sum().item() == 3
        assert x.new_tensor([1, 2]).sum().item() == 3
        return ((x @ self.weight + self.bias) * self.gain + x.new(8).zero_())[self.places]


def test_tensors_made_by_their_class_live_on_the_device():
    def body(run):
        model, x = OldNames(), run.to_device(rows(4, 8))
        for _ in run.steps(2):
            model(x).sum().backward()

    assert_agree(body)
    with eb.trace(rules="cuda") as run:
        body(run)
    assert run.timeline.by("category")["nbytes"]["parameter"] == 4 * (8 * 8 + 8 + 8)


def test_data_sets_that_make_tensors_by_their_class_stay_on_the_host():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.Tensor([i]), torch.FloatTensor(3).fill_(2)

    with eb.trace(rules="cuda") as run:
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2):
            assert all(tensor.is_cpu for tensor in batch)
        assert torch.empty(3, device="cpu").is_cpu and torch.from_numpy(rows(3)).is_cpu
    assert len(run.timeline) == 0


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("padding", [0, 7])
def test_a_mask_of_a_large_batch_decides_its_branch(rules, padding):
    mask = np.ones((16, 1024), "int64")
    mask[0, 1024 - padding :] = 0
    with eb.trace(rules=rules) as run:
        given = run.to_device(mask)[:, None, None, :].bool()
        assert bool(given.all()) == (padding == 0)
        assert given.logical_not().sum().item() == padding
    assert run.conditional == [] and run.unknown_reads == []


def if_not_all(x):
    if not (x > 0).all():
        raise ValueError("a value is not positive")


def if_any(x):
    if (x < 0).any() or torch.isnan(x).any():
        raise ValueError("a value is negative" if x.dim() else "it is negative")


def if_else(x):
    fine = (x > 0).all()
    if fine:
        return
    else:
        raise ValueError("a value is not positive")


def if_item(x):
    if not (x > 0).all().item():
        raise ValueError("a value is not positive")


def if_alike(x):
    if not torch.allclose(x, 2 * x):
        raise ValueError("they differ")


def asserted(x):
    assert (x > 0).all(), f"{x.shape}"


def distribution(x):
    torch.distributions.Normal(x, x.exp(), validate_args=True)  # torch.compile, once imported, turns its default off


CHECKS = [if_not_all, if_any, if_else, if_item, if_alike, asserted, distribution]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_on_unknown_values_passes_as_in_a_run_that_goes_on(rules, check):
    with eb.trace(rules=rules) as run:
        check(torch.randn(4, 4))
    assert run.unknown_reads and run.conditional == []


def test_a_branch_that_raises_nothing_still_makes_the_trace_conditional():
    with eb.trace() as run:
        x = torch.randn(4, 4)
        if (x < 0).any():
            x = 2 * x
    assert len(run.conditional) == 1


# -- functions that remember their results -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def positions(n):
    return torch.arange(n).float()


@functools.cache
def zeros_and_number(n):
    return torch.zeros(n), n


def test_a_remembered_tensor_is_made_by_each_run_and_reaches_no_other():
    def body(run):
        model, x = nn.Linear(8, 8), run.to_device(rows(4, 8))
        for _ in run.steps(2):
            (model(x) + positions(8) + zeros_and_number(8)[0]).sum().backward()

    assert_agree(body)
    assert_agree(body)
    with eb.trace() as run:
        body(run)
    assert positions(8).tolist() == list(range(8))


# -- order -----------------------------------------------------------------------------------------------------------


def in_order(run):
    frame = run.timeline.without("scratch").frame()
    return list(zip(frame["action"].astype(str), frame["nbytes"], strict=True))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 8, 3), nn.Conv1d(4, 8, 3, groups=2), nn.Conv3d(2, 4, 2), nn.ConvTranspose2d(3, 8, 2)]
)
def test_a_convolution_makes_the_gradient_of_its_weight_last(layer):
    sizes = (2, layer.in_channels, *[6] * len(layer.kernel_size))

    def body(run):
        weights = [run.to_device(p.detach().numpy()).requires_grad_() for p in layer.parameters()]
        x = run.to_device(rows(*sizes)).requires_grad_()
        for _ in run.steps(1):
            out = torch.func.functional_call(layer, dict(zip(("weight", "bias"), weights, strict=True)), x)
            grads = torch.autograd.grad(out.sum(), [x, *weights])
            del out, grads

    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    allocations = [[event for event in in_order(run) if event[0] == "alloc"] for run in (traced, measured)]
    assert allocations[0] == allocations[1]


@pytest.mark.parametrize("divide", [lambda x: 1.0 / x, lambda x: torch.nan_to_num(1.0 / (x + 1.0)) * 2.0])
def test_a_number_s_tensor_ends_with_the_op_that_no_graph_records(divide):
    def body(run):
        x = run.to_device(rows(4, 4))
        for _ in run.steps(1):
            divide(x)

    with eb.trace(rules="cpu") as traced:
        body(traced)
    with eb.measure(device="cpu") as measured:
        body(measured)
    assert in_order(traced) == in_order(measured)


# -- layouts -----------------------------------------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """Tokens as an image and back, as vision transformers with convolutions do."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)
        self.pooled = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        b, s, _ = x.shape
        image = self.into(x).transpose(1, 2).reshape(b, 16, int(s**0.5), -1)
        image = self.norm(self.depthwise(image))
        image = image * self.pooled(F.adaptive_avg_pool2d(image, 1)).sigmoid()
        return self.out(image.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("last", ["input", "weights", "neither"])
def test_convolutions_are_channels_last_where_input_or_weight_is(last):
    def body(run):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2))
        x = run.to_device(rows(2, 3, 8, 8))
        if last == "input":
            x = x.to(memory_format=torch.channels_last)
        if last == "weights":
            model = model.to(memory_format=torch.channels_last)
        for _ in run.steps(2):
            model(x).permute(0, 2, 3, 1).reshape(-1, 4).sum().backward()

    assert_agree(body)


def test_tokens_as_an_image_and_back_are_not_copied():
    def body(run):
        model, x = ChannelsLast(), run.to_device(rows(2, 16, 8))
        for _ in run.steps(2):
            model(x).sum().backward()

    assert_agree(body)


@pytest.mark.parametrize("stride", [1, 4])
def test_unfolding_keeps_the_storage_that_was_made_for_its_input(stride):
    def body(run):
        mix, x = nn.Conv2d(4, 4, 1), run.to_device(rows(2, 4, 16, 16))
        for _ in run.steps(1):
            columns = F.unfold(mix(x), 3, padding=1, stride=stride)
            F.fold(2 * columns, (16, 16), 3, padding=1, stride=stride).sum().backward()

    assert_agree(body)


def test_an_indexed_bias_shared_by_a_batch_gathers_its_gradient_in_place():
    def body(run):
        table, places = nn.Parameter(torch.zeros(4, 9)), run.to_device(np.arange(64).reshape(8, 8) % 9)
        x = run.to_device(rows(2, 4, 8, 8))
        for _ in run.steps(1):
            (x * table[:, places]).sum().backward()

    assert_agree(body)


# -- sequences of several lengths --------------------------------------------------------------------------------------


def packed(run, lengths):
    layer = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=0.1)
    x, given = run.to_device(rows(3, 5, 8)), run.to_device(np.array(lengths))
    for _ in run.steps(2):
        sequences = nn.utils.rnn.pack_padded_sequence(x, given.cpu(), batch_first=True, enforce_sorted=False)
        out, read = nn.utils.rnn.pad_packed_sequence(layer(sequences)[0], batch_first=True)
        assert read.tolist() == lengths and out.shape == (3, max(lengths), 16)
        out.sum().backward()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="up to 2.12 they run step by step, as those of several lengths")
def test_packed_sequences_of_one_length_run_as_if_they_were_not_packed():
    assert assert_agree(lambda run: packed(run, [5, 5, 5])).remarks == []


@pytest.mark.parametrize("rules", RULES)
def test_sequences_are_packed_by_the_values_of_their_lengths(rules):
    with eb.trace(rules=rules) as run:
        packed(run, [5, 3, 4])
    assert run.unknown_reads == [] and ("packed" in "".join(run.remarks)) == (rules == "cpu")


# -- mixtures of experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 30])
def test_one_product_a_group_pads_its_rows_to_sixteen_bytes(width):
    def body(run):
        experts = nn.Parameter(torch.zeros(4, width, 64))
        x, ends = run.to_device(rows(48, 64)), run.to_device(np.array([10, 20, 20, 48], "int32"))
        x.requires_grad_()
        for _ in run.steps(1):
            out = torch._grouped_mm(x, experts.mT, offs=ends)
            if width % 4 == 0:  # the gradient's own product takes no other
                (2 * out).sum().backward()

    assert_agree(body)


# -- runs that go well -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
def test_a_loss_that_is_tested_is_finite(rules):
    with eb.trace(rules=rules) as run:
        loss = nn.Linear(8, 1)(run.to_device(rows(4, 8))).mean()
        if not torch.isfinite(loss) or torch.isnan(loss).any():
            loss = torch.tensor(1e9)
        loss.backward()
    assert run.conditional == [] and len(run.unknown_reads) == 2


@pytest.mark.parametrize("rules", RULES)
def test_missing_values_in_data_too_large_to_be_known_are_not_taken_to_be_there(rules):
    targets = rows(4096)
    targets[::3] = np.nan
    with eb.trace(rules=rules) as run:
        missing = torch.isnan(run.to_device(targets[:600]))  # small: its values are known
        assert missing.sum().item() == 200
        y = run.to_device(targets)
        with pytest.raises(eb.DataDependentShape, match=r"test_idioms.py:\d+: the result of index depends"):
            y[~torch.isnan(y)]
        if torch.isnan((y * 2).mean()):
            raise ValueError("a loss that is no number ends the run")


@pytest.mark.parametrize("rules", RULES)
def test_data_brought_in_twice_keeps_its_values_and_empty_data_is_no_event(rules):
    with eb.trace(rules=rules) as run:
        lengths = run.to_device(run.to_device(np.array([3, 1])))
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 5), lengths.cpu(), batch_first=True)
        assert packed.data.shape == (4, 5)
        before = len(run.timeline)
        run.to_device(np.zeros((8, 0)))
        assert len(run.timeline) == before


# -- bags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_embeddings_keeps_what_its_way_of_summing_needs(mode):
    def body(run):
        tokens = run.to_device(np.arange(20) % 7)
        offsets = run.to_device(np.array([0, 5, 9, 20]))
        for options in ({}, {"include_last_offset": True}, {"padding_idx": 1}, {"dtype": torch.float64}):
            bags = nn.EmbeddingBag(40, 8, mode=mode, **options)
            bags(tokens, offsets).sum().backward()
            F.embedding_bag(tokens, bags.weight.detach(), offsets, mode=mode)

    assert_agree(body)


# -- deep copies -------------------------------------------------------------------------------------------------------


def copies_of_views(run):
    x = torch.ones(30)
    copied = copy.deepcopy({"head": x[:10], "tail": x[10:], "turned": x.view(5, 6).t(), "none": x[:0]})
    del x
    assert copied["turned"].stride() == (1, 6) and copied["tail"].storage_offset() == 10
    copied["head"].add_(1)


def copies_of_gradients(run):
    parameter, leaf = nn.Parameter(torch.ones(7)), torch.ones(9, requires_grad=True)
    (parameter.sum() * leaf.sum()).backward()
    first, second = copy.deepcopy([parameter, leaf])
    assert first.grad is None and second.grad is not None and second.requires_grad  # a parameter has its own way
    (first.sum() * second.sum()).backward()


def copies_of_modules(run):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(6))
    model.register_buffer("part", model.table[2:])
    copied = copy.deepcopy(model)
    assert copied[1].weight is copied[0].weight
    copied(torch.ones(2, 4)).sum().backward()


def copies_of_states(run):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in run.steps(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        twin = copy.deepcopy(optimizer)
    model.load_state_dict(best[0])
    assert len(twin.state) == 2


def copies_of_attributes(run):
    x = torch.ones(3, dtype=torch.bfloat16)
    x.note = torch.arange(5)
    assert copy.deepcopy(x).note.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "body", [copies_of_views, copies_of_gradients, copies_of_modules, copies_of_states, copies_of_attributes]
)
def test_a_deep_copy_takes_each_storage_once_event_for_event(body):
    events = []
    for context in (eb.trace(rules="cpu"), eb.measure(device="cpu")):
        with context as run:
            body(run)
        frame = run.timeline.without("scratch").frame()
        events.append(list(zip(frame["action"], frame["nbytes"], strict=True)))
    assert events[0] == events[1]


def test_a_deep_copy_on_the_gpu_is_one_storage_and_a_passing_scalar():
    with eb.trace(rules="cuda") as run:
        x, host = torch.ones(30), torch.ones(3, device="cpu")
        copied = copy.deepcopy([x[:3], x[3:], host])
        assert copied[0].is_cuda and copied[2].is_cpu
        assert torch.cuda.memory_allocated() == 2 * 512
    frame = run.timeline.frame()
    assert list(frame["nbytes"]) == [120, 120, 4, 4, 4, 4]  # two passing scalars, each made and released
    assert frame["line"].str.contains("test_idioms.py:").all()  # not a line of Python's own copy module
    with eb.trace(rules="cuda"), pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(torch.ones(3, requires_grad=True) * 2)


# -- reference cycles --------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Wraps its own method, as metrics do that count their calls: a cycle, of which only the collector makes an end."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1000))
        self.update = functools.partial(self.update)

    def update(self, x):
        return x + self.total.sum()


def test_what_setting_up_drops_in_cycles_is_gone_when_the_first_step_begins():
    def body(run):
        metric = copy.deepcopy(Wrapped())  # of the first nothing remains but a cycle
        layer = nn.Linear(8, 8)
        for _ in run.steps(1):
            metric.update(layer(torch.ones(2, 8))).sum().backward()
        starts.append(run)

    starts = []
    gc.disable()
    try:
        assert_agree(body)
    finally:
        gc.enable()
    assert [run.timeline.start_bytes for run in starts] == [4 * (1000 + 8 * 8 + 8)] * 2
