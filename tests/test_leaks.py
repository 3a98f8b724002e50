"""What steps leave behind, who holds it, and whether detaching is enough."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import time
import weakref
from collections import deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import everybyte as eb

STEPS = 5
WIDTH = 4
GRAPH, OUTPUT = 4 * WIDTH, 4 * WIDTH  # of `kept_tensor`: exp() keeps its own result, which one more product takes in


def runs():
    return pytest.mark.parametrize("make", [eb.trace, eb.measure], ids=["traced", "measured"])


def holders_of(leaks):
    return set(leaks.frame()["holder"])


def growing(keep, steps=STEPS, make=eb.trace):
    """Runs steps that each make a tensor of `OUTPUT` bytes, the end of a graph of `GRAPH` bytes, and hands it over."""
    with make() as run:
        weight = torch.ones(WIDTH, requires_grad=True)
        for step in run.steps(steps):
            keep(step, weight.exp() + 1)
    return run


# -- reported by users -------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Two products and their activations; of a batch of b rows it keeps b (8 + 16 + 16) numbers and returns 4 b."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.body(x)


class Trainer:
    def __init__(self, detach):
        self.encoder, self.cache, self.detach = Encoder(), {}, detach

    def encode(self, key, batch):
        if key not in self.cache:
            encoded = self.encoder(batch)
            self.cache[key] = encoded.detach() if self.detach else encoded
        return self.cache[key]


@runs()
@pytest.mark.parametrize("detach", [False, True])
def test_cached_encoder_outputs_hold_the_graphs_of_their_batches_until_they_are_detached(make, detach):
    with make() as run:
        trainer = Trainer(detach)
        for step in run.steps(STEPS):
            trainer.encode(f"k{step}", torch.zeros(3, 8))
    graph, output = 4 * 3 * (8 + 16 + 16), 4 * 3 * 4
    leaks = eb.leaks(run)
    rows = leaks.frame()
    assert leaks.late == (output, output) if detach else (graph + output, graph + output)
    of_graph = rows[rows["detach"]]
    assert of_graph["nbytes"].sum() == (0 if detach else graph * (STEPS - 2))
    assert rows[~rows["detach"]]["nbytes"].sum() == output * (STEPS - 2)
    assert set(of_graph["holder"]) == (set() if detach else {"trainer.cache['k0'].grad_fn"})
    assert set(rows[~rows["detach"]]["holder"]) == {"trainer.cache['k0']"}
    assert ("detach() there lets them go" in leaks.explain()) is not detach


@runs()
@pytest.mark.parametrize(
    ("logged", "backward", "requested", "rounded"),
    [
        # the input, two activations, the prediction, which its square needs, and the loss
        ("loss", False, 4 * 32 * (64 + 128 + 128 + 1) + 4, 41_984),
        ("loss", True, 4, 512),
        ("number", False, 0, 0),
    ],
)
def test_a_logged_loss_holds_its_graph_only_if_no_backward_has_run(make, logged, backward, requested, rounded):
    with make() as run:
        model, log = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)), []
        for _ in run.steps(STEPS):
            loss = model(torch.zeros(32, 64)).pow(2).mean()
            if backward:
                loss.backward()
            log.append({"loss": loss if logged == "loss" else loss.item()})
            model.zero_grad()
    leaks = eb.leaks(run)
    assert leaks.late == (requested, requested)
    assert list(run.timeline.rounded(512).growth_per_step()["growth"])[1:] == [rounded] * (STEPS - 1)
    kept = {"log[0]['loss'].grad_fn", "log[0]['loss']"}
    assert holders_of(leaks) == (set() if not requested else {"log[0]['loss']"} if backward else kept)
    assert ("Nothing in tensors" in leaks.explain()) is (requested == 0)


def advance(lstm, x, state, detach):
    out, state = lstm(x, state)
    return out.sum().detach() if detach else out.sum(), tuple(s.detach() if detach else s for s in state)


@runs()
def test_a_hidden_state_handed_on_with_its_graph_is_named_and_not_what_only_reaches_back_through_it(make):
    """The figures of the report, in blocks of 512 B: a step from zeros, which are two blocks more than a step later."""
    grown = {}
    for detach in (False, True):
        with make() as run:
            lstm, x, state, history = nn.LSTM(8, 16, batch_first=True), torch.zeros(4, 10, 8), None, []
            for _ in run.steps(STEPS):
                loss, state = advance(lstm, x, state, detach)
                history.append((loss.detach(), *(s.detach() for s in state)))
        grown[detach] = list(run.timeline.rounded(512).growth_per_step()["growth"])
        leaks = eb.leaks(run)
        graph = leaks.frame().query("detach")
        assert set(graph["holder"]) == (set() if detach else {"state[0].grad_fn"})
    assert grown == {False: [65_024, *[64_000] * (STEPS - 1)], True: [1_536] * STEPS}


@pytest.mark.parametrize("detach", [False, True])
def test_outputs_kept_for_the_end_of_an_epoch_stay_detached_or_not(detach):
    with eb.trace(rules="cuda") as run:
        head = nn.Linear(8, 24_000, bias=False, dtype=torch.float64)
        outputs = []
        for _ in run.steps(4):
            logits = head(torch.zeros(10_240, 8, dtype=torch.float64))
            outputs.append({"logits": logits.detach() if detach else logits})
    leaks = eb.leaks(run)
    kept = leaks.frame().query("not detach")
    assert kept["nbytes"].tolist() == [2 * 10_240 * 24_000 * 8]
    assert kept["holder"].tolist() == ["outputs[0]['logits']"]
    assert "1.831 GiB) of it are tensors" in leaks.explain()
    assert "detach() does not let them go" in leaks.explain()


# -- what is not in tensors --------------------------------------------------------------------------------------------


def test_a_growing_list_of_numbers_is_said_to_be_nothing_in_tensors():
    numbers = [float(i) for i in range(4 * 10**6)]  # what other tests left free in the heap would serve the first ones
    with eb.measure() as run:
        weight = torch.ones(WIDTH)
        for step in run.steps(4):
            numbers += [float(step * 10**6 + i) for i in range(10**6)]
            weight.sum().item()
    leaks = eb.leaks(run)
    assert leaks.late == (0,)
    assert leaks.frame().empty
    assert leaks.resident_per_step > 24 * 10**6  # a float object each, and 8 B to refer to it
    assert leaks.explain().startswith("Nothing in tensors")
    assert "a trace does not see the host's memory" in eb.leaks(growing(lambda step, made: None)).explain()


def test_open_figures_are_said_to_be_nothing_in_tensors():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    try:
        with eb.measure() as run:
            for _ in run.steps(3):
                loss = torch.ones(WIDTH).sum()
                pyplot.figure().gca().plot([loss.item()])
        assert eb.leaks(run).explain().startswith("Nothing in tensors")
    finally:
        pyplot.close("all")


def test_a_window_that_moves_on_is_no_leak():
    window = deque(maxlen=2)
    leaks = eb.leaks(growing(lambda step, made: window.append(made), steps=6))
    assert leaks.growth.tolist()[-2:] == [0, 0]
    assert leaks.frame().empty


# -- who may hold it ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    value: torch.Tensor


class Slotted:
    __slots__ = ("empty", "kept")

    def __init__(self):
        self.kept = []


class Shared:
    kept: ClassVar[list] = []


class Hostile:
    """Answers no question: every one that Python may ask raises."""

    def __init__(self):
        self.kept = []

    def _refuse(self, *args):
        raise RuntimeError("asked")

    __repr__ = __str__ = __len__ = __eq__ = __bool__ = __iter__ = __getattr__ = __dir__ = _refuse
    __hash__ = object.__hash__
    __class__ = secret = property(_refuse)


def closure():
    hidden = []
    return lambda made: hidden.append(made)


def generator():
    own = []
    while True:
        own.append((yield))


def started(stream):
    next(stream)
    return stream


def keepers():
    """For each name how a tensor is kept, by what, and the path that leads there."""
    places = SimpleNamespace(
        hook=closure(), records=[], slotted=Slotted(), window=deque(), stream=started(generator()), model=nn.Module(),
        seen=set(), of_thread=threading.local(), hostile=Hostile(), by_pair={}, odd={}, parts=nn.Sequential(),
    )  # fmt: skip
    places.model.kept = []
    places.of_thread.kept = []
    places.parts.append(nn.Module())
    places.parts[0].kept = []
    odd = Hostile()
    return [
        pytest.param(places, keep, path, id=path)
        for keep, path in (
            (lambda made: places.hook(made), "places.hook.__closure__.hidden[0]"),
            (lambda made: places.records.append(Record(made)), "places.records[0].value"),
            (places.slotted.kept.append, "places.slotted.kept[0]"),
            (places.window.append, "places.window[0]"),
            (places.stream.send, "places.stream.gi_frame.own[0]"),
            (places.model.kept.append, "places.model.kept[0]"),
            (places.parts[0].kept.append, "places.parts[0].kept[0]"),
            (places.seen.add, "places.seen{…}"),
            (places.of_thread.kept.append, "places.of_thread.kept[0]"),
            (places.hostile.kept.append, "places.hostile.kept[0]"),
            (lambda made: places.by_pair.update({("k", len(places.by_pair)): made}), "places.by_pair[('k', 0)]"),
            (lambda made: places.odd.setdefault(odd, []).append(made), "places.odd[<Hostile>][0]"),
            (Shared.kept.append, "tests.test_leaks.Shared.kept[0]"),
        )
    ]


@pytest.mark.parametrize(("places", "keep", "path"), keepers())
def test_the_path_to_a_holder_is_named(places, keep, path):
    leaks = eb.leaks(growing(lambda step, made: keep(made)))
    assert leaks.late == (GRAPH + OUTPUT,) * 2
    assert holders_of(leaks) == {path, f"{path}.grad_fn"}


def test_a_cache_of_functools_is_named_by_its_function():
    values = []
    encode = functools.lru_cache(lambda key: values.pop())

    def keep(step, made):
        values.append(made)
        encode(step)

    assert holders_of(eb.leaks(growing(keep, make=eb.measure))) == {"encode(…)", "encode(…).grad_fn"}


def test_all_holders_are_named_where_there_are_several():
    history, trainer = [], SimpleNamespace(cache={})

    def keep(step, made):
        history.append({"out": made})
        trainer.cache[step] = made.detach()

    rows = eb.leaks(growing(keep)).frame().set_index("detach")
    assert rows.loc[True, "holder"] == "history[0]['out'].grad_fn"
    assert set(rows.loc[False, "holder"].split(" and ")) == {"history[0]['out']", "trainer.cache[0]"}


def test_a_graph_is_let_go_by_detach_only_if_no_holder_has_one_of_its_tensors():
    whole, part = [], []

    def keep(step, made):
        whole.append(made)
        part.append(made.grad_fn.next_functions[0][0]._saved_result)  # what exp() keeps

    rows = eb.leaks(growing(keep)).frame()
    assert not rows["detach"].any()
    assert {frozenset(holder.split(" and ")) for holder in rows["holder"]} == {
        frozenset({"whole[0]"}),
        frozenset({"whole[0].grad_fn", "part[0]"}),
    }


def test_a_weak_reference_holds_nothing():
    references = []
    leaks = eb.leaks(growing(lambda step, made: references.append(weakref.ref(made))))
    assert leaks.late == (0, 0)


def test_an_array_that_shares_a_tensor_s_memory_holds_it():
    arrays = []
    leaks = eb.leaks(growing(lambda step, made: arrays.append(made.detach().numpy()[1:]), make=eb.measure))
    assert leaks.late == (OUTPUT, OUTPUT)
    assert holders_of(leaks) == {"arrays[0].base.base"}
    assert "detach() does not let them go" in leaks.explain()


def test_a_view_taken_without_gradients_holds_its_base_s_graph():
    rows = []

    def keep(step, made):
        with torch.no_grad():
            rows.append(made[1:])

    assert holders_of(eb.leaks(growing(keep))) == {"rows[0] and rows[0]._base", "rows[0]._base.grad_fn"}


def test_a_node_that_is_kept_without_its_tensor_holds_the_graph():
    nodes = []
    leaks = eb.leaks(growing(lambda step, made: nodes.append(made.grad_fn)))
    assert leaks.late == (GRAPH, GRAPH)
    assert holders_of(leaks) == {"nodes[0].grad_fn"}


def test_a_running_sum_is_named_and_not_the_last_loss():
    with eb.measure() as run:
        weight, total = torch.ones(WIDTH, requires_grad=True), 0.0
        for _ in run.steps(STEPS):
            loss = weight.exp().sum()
            total = total + loss
    assert holders_of(eb.leaks(run)) == {"total.grad_fn"}
    assert loss.grad_fn is not None


def test_local_variables_of_other_threads_are_looked_at():
    ready, done = threading.Event(), threading.Event()
    handed = []

    def collect():
        of_the_thread = [*handed]
        handed.clear()
        ready.set()
        done.wait()
        return of_the_thread

    run = growing(lambda step, made: handed.append(made))
    thread = threading.Thread(target=collect)
    thread.start()
    try:
        ready.wait()
        assert holders_of(eb.leaks(run)) == {"of_the_thread[0]", "of_the_thread[0].grad_fn"}
    finally:
        done.set()
        thread.join()


def test_a_cycle_that_no_name_reaches_is_told_from_a_holder():
    def keep(step, made):
        cycle = [made]
        cycle.append(cycle)

    gc.disable()
    try:
        leaks = eb.leaks(growing(keep))
    finally:
        gc.enable()
    assert leaks.late == (GRAPH + OUTPUT,) * 2
    assert all(holder.startswith("<no name reaches it; gc.collect() may free it>") for holder in holders_of(leaks))


def test_what_died_since_is_counted_and_said_to_be_gone():
    kept = []
    run = growing(lambda step, made: kept.append(made))
    kept.clear()
    assert holders_of(eb.leaks(run)) == {"(what let it go since: ask inside the block)"}


def test_a_trace_answers_before_its_block_ends_and_goes_on():
    kept = []
    with eb.trace() as run:
        weight = torch.ones(WIDTH, requires_grad=True)
        for _ in run.steps(4):
            kept.append(weight.exp() + 1)
        events = len(run.timeline)
        assert holders_of(eb.leaks(run)) == {"kept[0]", "kept[0].grad_fn"}
        assert len(run.timeline) == events


def test_looking_keeps_no_local_variable_alive():
    kept = []
    run = growing(lambda step, made: kept.append(made))
    local = torch.ones(WIDTH)
    reference = weakref.ref(local)
    eb.leaks(run)
    del local
    assert reference() is None


def test_what_locals_returned_to_the_program_is_left_as_it_is():
    kept = []
    run = growing(lambda step, made: kept.append(made))
    before = locals()
    eb.leaks(run)
    assert before["kept"] is kept


@pytest.mark.alone
def test_a_hundred_thousand_kept_tensors_are_looked_through_in_seconds():
    kept = [{"value": torch.ones(1)} for _ in range(100_000)]
    run = growing(lambda step, made: kept.append({"value": made}))
    began = time.process_time()
    leaks = eb.leaks(run)
    assert time.process_time() - began < 10
    assert holders_of(leaks) == {"kept[0]['value']", "kept[0]['value'].grad_fn"}


def test_runs_that_cannot_be_compared_are_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"this run has 2; write `for step in run.steps\(3\):`"):
        eb.leaks(growing(lambda step, made: None, steps=2))
    with pytest.raises(TypeError, match="not Timeline"):
        eb.leaks(growing(lambda step, made: None).timeline)
