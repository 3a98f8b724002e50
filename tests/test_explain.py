"""Out-of-memory messages: the kind follows from the figures, whatever wrote them and whatever stands around them."""

from __future__ import annotations

import json
import random
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from streams import timeline

from everybyte import gpus
from everybyte.allocator import Allocator
from everybyte.cli import main
from everybyte.explain import KINDS, Size, explain
from everybyte.gpus import CONTEXT
from everybyte.units import GiB, KiB, MiB, round_up

MESSAGES = [
    message
    for path in sorted((Path(__file__).parent / "explain").glob("*.toml"))
    for message in tomllib.loads(path.read_text(encoding="utf-8"))["message"]
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_a_message_is_of_the_kind_that_its_arithmetic_makes_it(message):
    assert eval(message["because"], {"__builtins__": {"abs": abs}, "text": message["text"]}) is True
    found = explain(message["text"], message.get("gpu"))
    assert found.kind == message["kind"], found
    assert list(found.possible) == message.get("possible", [])
    assert found.device == message.get("device", "CUDA")
    assert found.more == message.get("more_messages", 0)
    if "index" in message:
        assert found.index == message["index"]
    said = [*found.why, *found.next, *(text for row in found.rows for text in row)]
    assert found.why and found.next
    assert not [line for line in said if "{" in line or "None" in line]


def test_there_are_messages_of_every_kind_and_of_every_version():
    assert {message["kind"] for message in MESSAGES} == set(KINDS)
    assert {f"2.{minor}" for minor in range(1, 14)} <= {message["writes"] for message in MESSAGES}
    assert len(MESSAGES) >= 30


# -- from a state, by PyTorch's own format strings, to the kind --------------------------------------------------------


def format_size(nbytes: int) -> str:
    """`format_size` of `c10/cuda/CUDACachingAllocator.cpp`."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    width, unit = next((w, u) for w, u in ((KiB, "KiB"), (MiB, "MiB"), (GiB, "GiB")) if nbytes <= w * 1024 or w == GiB)
    return f"{nbytes / width:.2f} {unit}"


@dataclass(frozen=True)
class State:
    """What is true of a GPU when a request fails; all are bytes. `graphs` counts as allocated."""

    tried: int
    total: int
    free: int
    others: int
    allocated: int
    graphs: int
    unallocated: int
    outside: int
    allowed: int | None = None

    @property
    def reserved(self) -> int:
        return self.allocated + self.unallocated

    @property
    def kinds(self) -> set[str]:
        """By definition: the fewest causes without which the request passes, and of these the largest."""
        limited = self.allowed is not None and self.free >= self.tried and self.reserved + self.tried > self.allowed
        room = self.allowed - self.reserved if limited else self.free if self.free < self.tried else 0
        if self.tried > self.total - CONTEXT[0]:
            return {"one tensor"}
        if not limited and self.free >= self.tried and self.free >= self.total / 20:
            return {"cannot say"}
        causes = {"fragmentation": self.unallocated, "private pools": self.graphs}
        if limited:
            causes["smaller card"] = self.free - room
        else:
            causes |= {"another process": self.others, "outside the allocator": self.outside - CONTEXT[1]}
        worth = {name: nbytes for name, nbytes in causes.items() if nbytes >= self.total / 20}
        for count in range(1, len(worth) + 1):
            sums = {names: sum(worth[name] for name in names) for names in combinations(worth, count)}
            if sums and room + max(sums.values()) >= self.tried:
                best = [names for names in sums if sums[names] == max(sums.values())]
                return {name for names in best for name in names if worth[name] == max(worth[x] for x in names)}
        nothing_to_free = self.free + sum(max(0, nbytes) for nbytes in causes.values()) < self.tried
        alone = self.tried > self.allocated - self.graphs
        return {"one tensor" if nothing_to_free and alone else "demand"}

    def message(self, wording: str, who: str) -> str:
        """As a version of PyTorch writes it; `who` is how this process is listed."""
        own = format_size(self.reserved + self.outside)
        listed = f"Process 4711 has {format_size(self.others)} memory in use. " if self.others else ""
        named = {"this": "Including non-PyTorch memory, this process", "container": "Process 990", "nobody": ""}[who]
        listed = f"{listed}{named} has {own} memory in use. " if named else ""
        allowed = f"{format_size(self.allowed)} allowed; " if self.allowed is not None else ""
        size = {name: format_size(getattr(self, name)) for name in self.__annotations__ if name != "allowed"}
        if wording == "2.0":
            return (
                f"CUDA out of memory. Tried to allocate {size['tried']} (GPU 0; {size['total']} total capacity; "
                f"{size['allocated']} already allocated; {size['free']} free; {allowed}{format_size(self.reserved)} "
                "reserved in total by PyTorch)"
            )
        graphs = f"with {size['graphs']} allocated in private pools (e.g., CUDA Graphs), " if self.graphs else ""
        return (
            f"CUDA out of memory. Tried to allocate {size['tried']}. GPU 0 has a total "
            f"{'capacty' if wording == '2.1' else 'capacity'} of {size['total']} of which {size['free']} is free. "
            f"{listed}{allowed}Of the allocated memory {size['allocated']} is allocated by PyTorch, {graphs}and "
            f"{size['unallocated']} is reserved by PyTorch but unallocated."
        )


def drawn(rng, limits=True) -> State:
    """A GPU shared out among its holders, and a request that fails; a driver and a limit refuse in their own way."""
    total = rng.choice([gpu.total for gpu in gpus.TABLE])
    outside = rng.randint(*CONTEXT) + rng.choice([0, 0, total // 12])
    weights = [rng.choice([0, rng.randint(1, 999)]) for _ in range(4)]
    rest, parts = total - outside, []
    for weight in weights:
        parts.append(rest * weight // (sum(weights) + 300) // 512 * 512)
    free, others, unallocated, graphs = parts
    allocated = rest - free - others - unallocated
    graphs = min(graphs, allocated) if rng.choice([False, True]) else 0
    tried = round_up(rng.randint(1, total * 5 // 4), 2 * MiB)
    tried = max(tried, round_up(free + 1, 2 * MiB))
    allowed = None
    if limits and rng.randint(0, 3) == 0:
        allowed = allocated + unallocated + rng.randint(0, max(0, total - allocated - unallocated))
        if free >= 4 * MiB and allowed < allocated + unallocated + free and rng.choice([False, True]):
            room = allowed - allocated - unallocated
            tried = round_up(rng.randint(min(room + 1, free - 2 * MiB), free - 2 * MiB), 2 * MiB)
            assume(tried > room)
    return State(tried, total, free, others, allocated, graphs, unallocated, outside, allowed)


def states(limits=True):
    return st.builds(drawn, st.randoms(use_true_random=False), st.just(limits))


@given(states(), st.sampled_from(["2.0", "2.1", "2.5"]), st.sampled_from(["this", "container", "nobody"]))
def test_the_kind_follows_the_state_whatever_rounding_and_wording_hide(state, wording, who):
    if wording == "2.0":
        state, who = replace(state, graphs=0), "nobody"
    found = explain(state.message(wording, who))
    right = {found.kind, *found.possible} & state.kinds
    assert right, (found, state.kinds)


def test_a_message_that_says_what_this_process_holds_is_nearly_always_decided():
    evenly = random.Random(0)  # hypothesis looks for the cases between two kinds
    cases = [state for _ in range(2000) if len((state := drawn(evenly, limits=False)).kinds) == 1]
    undecided = sum(explain(state.message("2.5", "this")).kind == "cannot say" for state in cases)
    assert undecided <= 0.05 * len(cases)


def test_what_the_model_of_the_allocator_calls_demand_and_fragmentation_is_called_so():
    card, context, seen = 8 * GiB, 300 * MiB, Counter()
    for seed in range(30):
        rng, events, live = random.Random(seed), [], []
        for number in range(120):
            events.append(f"{number}={rng.choice([rng.randint(1, 40), rng.randint(100, 900)]) * MiB}")
            live.append(number)
            while seed % 2 and live and rng.random() < 0.4:
                events.append(f"-{live.pop(rng.randrange(len(live)))}")
        failed = Allocator(total=card).replay(timeline(*events)).out_of_memory
        if failed is None:
            continue
        unallocated = failed.reserved - failed.allocated
        state = State(failed.segment, card + context, failed.free, 0, failed.allocated, 0, unallocated, context)
        kind = explain(state.message("2.6", "this")).kind
        if failed.cause == "demand":
            assert kind in ("demand", "one tensor")
        elif unallocated + failed.free >= failed.segment and unallocated >= state.total / 19:
            assert kind == "fragmentation"
        seen[failed.cause, kind] += 1
    assert seen["demand", "demand"] > 3 and seen["fragmentation", "fragmentation"] > 3


@given(st.integers(0, 2**43))
def test_what_is_printed_lies_in_the_interval_that_is_read(nbytes):
    size = Size.said(*format_size(nbytes).split())
    assert size.least <= nbytes <= size.most
    assert size.most - size.least <= max(1, nbytes) // 100 + 11 * MiB
    assert str(size) == format_size(nbytes)


# -- around the message ------------------------------------------------------------------------------------------------


def test_of_ten_megabytes_of_log_the_message_is_found_quickly():
    state = State(2 * GiB, 16 * GiB, GiB, 0, 14 * GiB, 0, 64 * MiB, 400 * MiB)
    line = "[rank0]: 2026-11-30 12:00:00 INFO step 1 loss 2.31 out of memory? no: \x1b[32mfine\x1b[0m\n"
    log = line * (10_000_000 // len(line)) + state.message("2.6", "this")
    start = time.perf_counter()
    assert explain(log).kind == "demand"
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: too many values to unpack",
        "torch.cuda.OutOfMemoryError",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456",
        "\x00\xff\x1b[2J" * 1000,
        "out of memory " * 1000,
    ],
)
def test_what_is_no_message_is_none(text):
    assert explain(text) is None


@given(
    st.text(st.sampled_from("CUDA out of memory. Tried to allocate 1.5 GiB()[];:\x1b\x00\n0123456789"), max_size=300)
)
def test_no_text_breaks_it(text):
    found = explain("CUDA out of memory. Tried to allocate " + text)
    assert found.kind in KINDS
    assert all(line.isprintable() for line in (*found.why, *found.next))


@pytest.fixture
def run(capsys, tmp_path):
    """A function from a log and arguments to exit code, stdout and stderr of the command."""

    def run(log: bytes | str, *args):
        path = tmp_path / "log.txt"
        path.write_bytes(log if isinstance(log, bytes) else log.encode())
        return main(["explain", str(path), *args]), *capsys.readouterr()

    return run


DEMAND = State(2 * GiB, 16 * GiB, GiB, 0, 14 * GiB, 0, 64 * MiB, 400 * MiB).message("2.6", "this")


def test_the_command_answers_with_kind_figures_reason_and_next_step(run):
    code, out, err = run(DEMAND)
    assert (code, err) == (0, "")
    assert out.startswith("demand: the tensors themselves do not fit\n")
    assert "\neverybyte trace train.py" in out.replace("  everybyte", "everybyte")
    code, out, err = run(DEMAND + "\n" + DEMAND, "--json")
    answer = json.loads(out)
    assert (code, answer["kind"], answer["possible"], answer["more"]) == (0, "demand", [], 1)
    assert answer["sizes"]["tried"]["least"] <= 2 * GiB <= answer["sizes"]["tried"]["most"]


def test_what_the_message_leaves_open_is_exit_code_3_and_garbage_is_2(run):
    code, out, err = run("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert code == 3 and out.startswith("cannot say") and err.count("\n") == 1
    for garbage in ("hello", b"\xff\xfe\x00", b"\x80\x04" * 999):
        code, out, err = run(garbage)
        assert (code, out) == (2, "")
        assert "not an out-of-memory message I know" in err and err.count("\n") == 1
    assert run(DEMAND, "--gpu", "abacus")[0] == 2


def test_a_container_that_was_not_killed_and_other_libraries_errors_are_no_message(run):
    xla = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
    for log in ('"State": {"OOMKilled": false, "ExitCode": 1}', xla, "RuntimeError: CUDA out of memory."):
        assert run(log)[:2] == (2, "")


def test_a_message_of_an_allocator_that_cannot_be_recorded_asks_for_one_that_can(run):
    answer = json.loads(run("torch.OutOfMemoryError: Allocation on device \n", "--json")[1])
    assert any("backend:native" in step for step in answer["next"])
    assert not any("_record_memory_history" in step for step in answer["next"])


def test_a_log_that_powershell_wrote_is_read(run):
    assert run(DEMAND.encode("utf-16"))[0] == 0


def test_a_file_that_is_not_there_is_bad_input(capsys):
    assert main(["explain", "/nowhere/log.txt"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gpu_that_was_thought_larger_is_told_by_its_name(run):
    slice_of_one = State(GiB, 9 * GiB, MiB, 0, 8 * GiB + 600 * MiB, 0, 23 * MiB, 400 * MiB).message("2.6", "this")
    code, out, _ = run(slice_of_one, "--gpu", "a100-80gb", "--json")
    assert (code, json.loads(out)["kind"]) == (0, "smaller card")
    assert json.loads(run("on NVIDIA A100-SXM4-80GB\n" + slice_of_one, "--json")[1])["kind"] == "smaller card"
    assert json.loads(run(slice_of_one, "--json")[1])["kind"] == "demand"
