"""Snapshots: read safely whatever the file holds, completed wherever they begin, written for PyTorch's viewer."""

import io
import os
import pickle
import random
import struct
import time

import numpy as np
import pytest
import torch
import torch.cuda._memory_viz as viz
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu import KINDS, SimulatedGpu, program
from streams import sizes, timeline, timelines
from torch import nn

import everybyte as eb
from everybyte.account import Account
from everybyte.allocator import Allocator
from everybyte.caching import DEFAULT_POOL
from everybyte.rewind import INACTIVE
from everybyte.snapshot_file import _segment_as_dict, _settings_as_dict
from everybyte.units import MiB

# -- a GPU that records ------------------------------------------------------------------------------------------------


class Gpu:
    """The rules at work on what a program does, recording as PyTorch does, until the recording is cut off."""

    def __init__(self, settings):
        self.allocator = Allocator(**settings)
        self.model = self.allocator.device()
        self.events = []  # all of them; a ring buffer keeps the last
        self.live, self.pending = [], []

    def log(self, action, block=None):
        new = self.model.segment_events[sum(e["action"].startswith("segment") for e in self.events) :]
        entries = [(*event[:3], event.stream) for event in new]
        if block is not None:
            entries.append((action, block.address, block.requested, block.stream))
        self.events += [dict(zip(("action", "addr", "size", "stream"), entry, strict=True)) for entry in entries]

    def alloc(self, size, stream, pool_id):
        block = self.model.malloc(size, stream, pool_id)
        self.log("alloc", block)
        if block is not None:
            self.live.append(block)
        return block is not None

    def free(self, which, other_stream_uses_it):
        block = self.live.pop(which % len(self.live))
        self.log("free_requested", block)
        self.model.request_free(block)
        self.pending.append(block)
        if not other_stream_uses_it:
            self.complete(-1)

    def complete(self, which):
        block = self.pending.pop(which % len(self.pending))
        self.log("free_completed", block)
        self.model.free_block(block)

    def empty_cache(self):
        self.model.release_cached_blocks()  # but for private pools, which a graph still uses
        self.log("")

    def blocks(self):
        return {b.address: b for segment in self.model.segments() for b in segment.blocks if b.state != INACTIVE}

    def snapshot(self, keep):
        return {
            "segments": [_segment_as_dict(segment, 0, {}) for segment in self.model.segments()],
            "device_traces": [self.events[len(self.events) - keep :]],
            "allocator_settings": _settings_as_dict(self.allocator),
        }


GPU_SETTINGS = st.sampled_from(
    [{}, {}, {"max_split_size_mb": 24}, {"roundup_power2_divisions": 4}, {"expandable_segments": True}]
)
POOL = (1, 0)


@st.composite
def recordings(draw):
    """A snapshot that begins anywhere in a program's life, and the blocks that there really were at its beginning."""
    gpu = Gpu({**draw(GPU_SETTINGS), **draw(st.sampled_from([{}, {"total": 300 * MiB}]))})
    streams, private = draw(st.integers(1, 2)), draw(st.booleans())
    states = [(0, {})]
    for _ in range(draw(st.integers(1, 60))):
        match draw(st.sampled_from("aaaaaafffffce")):
            case "f" if gpu.live:
                gpu.free(draw(st.integers(0, 99)), streams > 1 and draw(st.booleans()))
            case "c" if gpu.pending:
                gpu.complete(draw(st.integers(0, 99)))
            case "e" if draw(st.booleans()):
                gpu.empty_cache()
            case _:
                pool = POOL if private and draw(st.booleans()) else DEFAULT_POOL
                if not gpu.alloc(draw(sizes), draw(st.integers(0, streams - 1)), pool):
                    break  # out of memory: the program ends
        states.append((len(gpu.events), gpu.blocks()))
    begin, blocks = draw(st.sampled_from(states))
    return gpu.snapshot(len(gpu.events) - begin), blocks


def dump(folder, data, protocol=4):
    path = folder / f"{np.random.default_rng().integers(2**62)}.pickle"
    path.write_bytes(pickle.dumps(data, protocol))
    return path


@given(recordings())
def test_wherever_a_recording_begins_each_allocation_lands_where_it_was_recorded(tmp_path_factory, recording):
    data, before = recording
    snapshot = eb.Snapshot.read(dump(tmp_path_factory.getbasetemp(), data))
    comparison = snapshot.compare()
    assert comparison.exact
    assert comparison.contradictions == 0
    assert comparison.allocations == sum(event["action"] == "alloc" for event in data["device_traces"][0])
    assert comparison.recorded == comparison.modelled
    if not before:
        return
    completed = snapshot.recording(0)
    found = {b.address: b for s in completed.start for b in s.blocks if b.state != INACTIVE}
    slacks = {slack.address: slack for slack in completed.slacks}
    assert found.keys() == before.keys()
    for address, block in before.items():
        least = found[address].size - (slacks[address].bytes if address in slacks else 0)
        assert block.size - least in (slacks[address].possible if address in slacks else [0])
        assert (found[address].requested, found[address].state) == (block.requested, block.state)


# -- what the start leaves open ----------------------------------------------------------------------------------------


def test_a_slack_that_nothing_reveals_is_reported_with_its_range_and_last_event(tmp_path):
    gpu = Gpu({})
    gpu.alloc(20 * MiB, 0, DEFAULT_POOL)
    gpu.free(0, False)
    gpu.alloc(12 * MiB, 0, DEFAULT_POOL)  # of the 20: the rest is free, or up to 1 MiB of it belongs to this block
    begun = len(gpu.events)
    gpu.alloc(512, 0, DEFAULT_POOL)
    gpu.free(0, False)
    comparison = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events) - begun))).compare()
    (slack,) = comparison.undetermined
    assert (slack.requested, slack.possible[0], slack.possible[-1]) == (12 * MiB, 0, MiB)
    assert slack.last_event == 2  # segment_alloc, alloc, free_requested
    assert comparison.recorded.peak_allocated == 12 * MiB + 512
    assert "allocated may be larger by up to 1,048,576 B" in comparison.explain()
    assert comparison.as_dict()["undetermined"][0]["most_slack"] == MiB


def test_an_allocation_behind_a_block_says_where_it_ends(tmp_path):
    gpu = Gpu({})
    gpu.alloc(20 * MiB, 0, DEFAULT_POOL)
    gpu.free(0, False)
    gpu.alloc(12 * MiB, 0, DEFAULT_POOL)
    begun = len(gpu.events)
    gpu.alloc(8 * MiB, 0, DEFAULT_POOL)
    gpu.free(0, False)
    snapshot = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events) - begun)))
    assert snapshot.compare().undetermined == ()
    assert snapshot.recording(0).start[0].blocks[0].size == 12 * MiB


# -- what a program may do -------------------------------------------------------------------------------------------


def test_an_expandable_segment_that_was_given_back_whole_comes_back_elsewhere(tmp_path):
    gpu = Gpu({"expandable_segments": True})
    for _ in range(3):
        gpu.alloc(30 * MiB, 0, DEFAULT_POOL)
        gpu.free(0, False)
        gpu.empty_cache()  # nothing of the segment is mapped any more: its addresses are given back too
        gpu.model._top -= 2**40  # and the driver's next ones lie below
    for begun in range(len(gpu.events)):
        assert eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events) - begun))).compare().exact


def test_what_is_given_back_for_a_request_that_then_fails_is_no_surprise(tmp_path):
    gpu = Gpu({"max_split_size_mb": 64, "total": 250 * MiB})
    for size in (70, 90, 30):
        gpu.alloc(size * MiB, 0, DEFAULT_POOL)
    gpu.free(0, False)
    gpu.free(0, False)
    gpu.alloc(240 * MiB, 0, DEFAULT_POOL)  # the largest first, then the other, and it is not enough
    returned = [event["size"] // MiB for event in gpu.events if event["action"] == "segment_free"]
    assert returned == [90, 70]
    gpu.events.append({"action": "oom", "device_free": 220 * MiB, "size": 240 * MiB, "stream": 0})
    gpu.alloc(512, 0, DEFAULT_POOL)
    assert eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events)))).compare().exact


def test_the_pool_of_a_graph_is_known_after_its_segments_are_gone_where_events_name_it(tmp_path):
    gpu = Gpu({})
    gpu.alloc(30 * MiB, 0, POOL)
    gpu.free(0, False)
    gpu.alloc(30 * MiB, 0, DEFAULT_POOL)  # not where the graph's was
    gpu.model.release_cached_blocks(POOL)
    gpu.log("")
    for event in gpu.events:
        event["pool_id"] = DEFAULT_POOL if event is gpu.events[5] or event is gpu.events[4] else POOL
    assert [event["action"] for event in gpu.events[4:]] == ["segment_alloc", "alloc", "segment_free"]
    assert eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events)))).compare().exact


def test_frees_recorded_only_at_their_completion_count_until_then(tmp_path):
    gpu = Gpu({})
    for size in (3, 4, 5):
        gpu.alloc(size * MiB, 0, DEFAULT_POOL)
    begun = len(gpu.events)
    gpu.free(0, False)
    gpu.free(0, False)
    gpu.events = [event for event in gpu.events if event["action"] != "free_requested"]
    comparison = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events) - begun))).compare()
    assert comparison.exact
    assert comparison.recorded.peak_allocated == comparison.modelled.peak_allocated == 12 * MiB


def without(gpu, *actions):
    """The program's whole recording, events of some kinds left out."""
    data = gpu.snapshot(len(gpu.events))
    data["device_traces"] = [[event for event in gpu.events if event["action"] not in actions]]
    return data


def test_where_kinds_of_events_were_not_recorded_it_is_said_from_which_event_on_nothing_is_certain(tmp_path):
    gpu = Gpu({})
    gpu.alloc(30 * MiB, 0, DEFAULT_POOL)
    gpu.alloc(8 * MiB, 1, DEFAULT_POOL)
    gpu.free(0, True)  # another stream still uses it
    gpu.alloc(30 * MiB, 0, DEFAULT_POOL)  # so this, after two segments, two blocks and a request, needs one
    gpu.complete(0)
    whole = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(len(gpu.events)))).compare()
    assert whole.exact and whole.left_out == ()
    comparison = eb.Snapshot.read(dump(tmp_path, without(gpu, "free_completed"))).compare()
    assert not comparison.exact
    assert "a free that was completed, on several streams, from event 5 on" in comparison.left_out
    gpu = Gpu({})
    gpu.alloc(30 * MiB, 0, DEFAULT_POOL)
    gpu.free(0, False)
    gpu.empty_cache()
    gpu.alloc(40 * MiB, 0, DEFAULT_POOL)
    comparison = eb.Snapshot.read(dump(tmp_path, without(gpu, "segment_alloc", "segment_free"))).compare()
    assert "memory taken from the driver, from event 0 on" in comparison.left_out  # no segment holds the first block
    assert comparison.as_dict()["left_out"] == list(comparison.left_out)
    assert "Nothing is certain if the recording was made without these: memory taken" in comparison.explain()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_simulators_programs_are_exact_from_anywhere_or_it_is_said_from_where_on_not(kind):
    exact = 0
    for seed in [*range(30), 158]:
        gpu, moments = program(kind, seed)
        begun, *_ = random.Random(seed).choice([moments[0], *moments[:-1]])
        comparison = eb.Snapshot.of(gpu.snapshot(begun)).compare()
        _, allocated, reserved = zip(*[moment for moment in moments if moment[0] > begun] or [moments[-1]], strict=True)
        exact += comparison.exact
        if comparison.exact:
            slack = sum(one.possible[-1] for one in comparison.undetermined)
            assert not comparison.contradictions and not comparison.left_out
            assert comparison.recorded.peak_allocated + slack >= max(allocated)
            assert comparison.recorded.peak_reserved >= max(reserved)
        else:
            assert "event" in comparison.left_out[0] and comparison.left_out[0] in comparison.explain()
    assert exact >= 30


def test_where_an_expandable_segment_ends_is_learned_from_where_the_next_one_begins_and_said(tmp_path):
    gpu = SimulatedGpu(random.Random(0), 100 * MiB, expandable=True)  # 120 MiB of addresses
    blocks = [gpu.malloc(20 * MiB) for _ in range(5)]
    gpu.free(blocks[0])
    gpu.free(blocks[2])
    gpu.empty_cache()
    gpu.malloc(40 * MiB)  # there are the memory, two gaps of 20 MiB, and 20 MiB of addresses at the end
    comparison = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(0))).compare()
    assert [event["action"] for event in gpu.events[-2:]] == ["segment_map", "alloc"]
    assert len({segment.base for segment in gpu.segments}) == 2
    assert comparison.exact
    assert comparison.as_recorded == (
        "where an expandable segment ends (its addresses are 9/8 of the GPU's memory), 1 times",
    )
    assert comparison.as_recorded[0] in comparison.explain()
    assert comparison.as_dict()["as_recorded"] == list(comparison.as_recorded)


def test_what_was_mapped_in_vain_before_others_gave_memory_back_is_no_surprise():
    gpu = SimulatedGpu(random.Random(0), 180 * MiB, expandable=True)
    blocks = [gpu.malloc(20 * MiB) for _ in range(5)]
    other = gpu.malloc(40 * MiB, stream=7)
    gpu.free(blocks[0])
    gpu.free(blocks[2])
    gpu.empty_cache()
    gpu.others = 60 * MiB
    gpu.free(blocks[1])
    gpu.free(other)
    before = len(gpu.events)
    gpu.malloc(60 * MiB)  # two gaps around a free block, and memory for one of them
    found = [(event["action"], event["size"] // MiB) for event in gpu.events[before:-1]]
    assert found == [("segment_map", 20), ("segment_unmap", 40), ("segment_unmap", 40), ("segment_map", 60)]
    assert eb.Snapshot.of(gpu.snapshot(0)).compare().exact


# -- formats -----------------------------------------------------------------------------------------------------------


def plain():
    gpu = Gpu({})
    for size in (300, 3 * MiB, 30 * MiB):
        gpu.alloc(size, 0, DEFAULT_POOL)
    gpu.free(1, False)
    return gpu.snapshot(len(gpu.events))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_without_settings_times_block_addresses_pools_and_frames_read_the_same(tmp_path, protocol):
    full, old = plain(), plain()
    del old["allocator_settings"]
    for segment in old["segments"]:
        for name in ("segment_pool_id", "is_expandable", "frames"):
            del segment[name]
        for block in segment["blocks"]:
            del block["address"], block["frames"]
    new, old = (eb.Snapshot.read(dump(tmp_path, data, protocol)) for data in (full, old))
    assert (new.segments, new.settings) == (old.segments, old.settings)
    assert [event._replace(frames=()) for event in new.traces[0]] == old.traces[0]
    assert old.compare().recorded.peak_allocated == 512 + 3 * MiB + 30 * MiB


def test_segments_that_do_not_say_whether_they_expand_and_stacks_that_are_missing_read_the_same():
    gpu, _ = program("full", 0)
    new, old = (gpu.snapshot(0) for _ in range(2))
    for segment in old["segments"]:
        del segment["is_expandable"]
    old["device_traces"] = [[{**event, "frames": None} for event in gpu.events]]
    del old["allocator_settings"]["expandable_segments"]
    new, old = eb.Snapshot.of(new), eb.Snapshot.of(old)
    assert (new.segments, new.settings, new.traces) == (old.segments, old.settings, old.traces)
    assert old.compare().exact


def test_a_file_without_settings_says_that_they_may_be_why_it_differs():
    gpu = Gpu({"roundup_power2_divisions": 4})
    gpu.alloc(1100 * MiB, 0, DEFAULT_POOL)
    data = gpu.snapshot(len(gpu.events))
    assert eb.Snapshot.of(data).compare().exact
    del data["allocator_settings"]
    assert eb.Snapshot.of(data).compare().left_out[0] == "the allocator's settings, from event 0 on"


def test_blocks_that_list_their_uses_as_before_2_1_read_the_same(tmp_path):
    new, old = plain(), plain()
    for segment in old["segments"]:
        for block in segment["blocks"]:
            use = {
                "addr": block.pop("address"),
                "real_size": block.pop("requested_size"),
                "frames": block.pop("frames"),
            }
            if block["state"] != INACTIVE:
                use["frames"] = [{"filename": "train.py", "line": 7, "name": "step"}]
                block["history"] = [use]
    new, old = (eb.Snapshot.read(dump(tmp_path, data)) for data in (new, old))
    assert [segment.allocated for segment in old.segments] == [segment.allocated for segment in new.segments]
    assert [b for s in old.segments for b in s.blocks if b.state != INACTIVE] == [
        b for s in new.segments for b in s.blocks if b.state != INACTIVE
    ]
    assert {stack[0]["filename"] for stack in old.stacks.values()} == {"train.py"}
    assert old.compare().exact


def test_a_recording_of_one_event_is_completed_from_the_segments(tmp_path):
    data = plain()
    data["device_traces"][0] = data["device_traces"][0][-1:]
    snapshot = eb.Snapshot.read(dump(tmp_path, data))
    assert snapshot.compare().exact
    assert snapshot.timeline.frame()["nbytes"].tolist() == [300, 3 * MiB, 30 * MiB, 3 * MiB]
    assert snapshot.timeline.info["start_event"] == 3
    assert snapshot.timeline.start_bytes == 300 + 33 * MiB


def test_segments_alone_are_a_snapshot_without_events(tmp_path):
    snapshot = eb.Snapshot.read(dump(tmp_path, plain()["segments"]))
    assert snapshot.compare().allocations == 0
    assert snapshot.compare().recorded.peak_allocated == 512 + 30 * MiB


def test_several_devices_are_compared_each_and_together(tmp_path):
    one, two = plain(), plain()
    for segment in two["segments"]:
        segment["device"] = 2
    both = {"segments": one["segments"] + two["segments"], "device_traces": [one["device_traces"][0], []]}
    both["device_traces"].append(two["device_traces"][0])
    snapshot = eb.Snapshot.read(dump(tmp_path, both))
    assert snapshot.devices == (0, 2)
    assert snapshot.compare().exact
    assert snapshot.compare().allocations == 6
    assert snapshot.compare(2).recorded.peak_allocated == 512 + 33 * MiB
    assert set(snapshot.timeline.frame()["device"]) == {"cuda:0", "cuda:2"}
    with pytest.raises(ValueError, match="no device 1; the recording has 0, 2"):
        snapshot.compare(1)


def test_streams_named_by_addresses_get_small_numbers_in_their_order(tmp_path):
    data = plain()
    for entry in [*data["segments"], *data["device_traces"][0]]:
        entry["stream"] = 0x5555_DEAD_BEE0
    snapshot = eb.Snapshot.read(dump(tmp_path, data))
    assert {segment.stream for segment in snapshot.segments} == {1}
    assert snapshot.compare().exact


def test_settings_are_read_as_the_allocator_takes_them(tmp_path):
    settings = {"max_split_size_mb": 24, "roundup_power2_divisions": {str(1 << i): 4 for i in range(16)}}
    gpu = Gpu(settings)
    gpu.alloc(3 * MiB, 0, DEFAULT_POOL)
    snapshot = eb.Snapshot.read(dump(tmp_path, gpu.snapshot(2)))
    assert {name: snapshot.settings[name] for name in settings} == settings
    assert eb.Snapshot.read(dump(tmp_path, plain())).settings.get("max_split_size_mb") is None


# -- files that are none -----------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def refused(path, why):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=why) as caught:
        eb.Snapshot.read(path)
    assert time.perf_counter() - started < 2
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, protocol):
    data = {**plain(), "extra": Bomb(tmp_path / "ran")}
    refused(dump(tmp_path, data, protocol), "is not a pickle of plain data: " + ("instruction" if protocol > 1 else ""))
    assert not (tmp_path / "ran").exists()


@given(st.data())
def test_a_file_cut_short_anywhere_is_refused(tmp_path_factory, data):
    whole = pickle.dumps(plain(), 4)
    path = tmp_path_factory.getbasetemp() / "short.pickle"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(path, "is not a pickle of plain data")


@pytest.mark.parametrize(
    "lie",
    [
        b"r" + struct.pack("<I", 2**32 - 1),  # a memo of four billion entries
        b"\x8d" + struct.pack("<Q", 2**40) + b"x",  # a text of a tebibyte
        b"\x8e" + struct.pack("<Q", 2**63 - 1),
        b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01",  # a whole number of two gibibytes
        b"\x8b" + struct.pack("<i", -1) + b"\x01",
        b"\x95" + struct.pack("<Q", 2**50),  # a frame
        b"\x96" + struct.pack("<Q", 2**40),  # a bytearray, which Python would make room for first
    ],
)
def test_a_pickle_that_claims_a_billion_entries_is_refused_at_once(tmp_path, lie):
    path = tmp_path / "lie.pickle"
    path.write_bytes(b"\x80\x04}" + lie + b".")
    refused(path, "is not a pickle of plain data")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "is not a memory snapshot: there is no 'segments'"),
        ({"segments": 3, "device_traces": []}, "is not a memory snapshot"),
        ("text", "it holds a str, not a dict"),
        ([1, 2], "is not a memory snapshot"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]}, "below 2\\^63"),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": "0", "size": 1}]]},
            "a str is not a whole number",
        ),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": 2**70, "size": 1}]]}, "below 2\\^63"),
    ],
)
def test_a_pickle_that_is_no_snapshot_is_refused(tmp_path, data, why):
    refused(dump(tmp_path, data), why)


def test_tuples_nested_too_deep_to_be_a_key_are_refused(tmp_path):
    for i, nest in enumerate((b"\x85" * 10**6, b"N\x86" * 10**6, b"(" * 10**6 + b"t" * 10**6)):
        path = tmp_path / f"{i}.pickle"
        path.write_bytes(b"\x80\x04}N" + nest + b"Ns.")  # hashing such a key would overflow the stack
        refused(path, "makes no plain data")


def test_lists_that_repeat_one_entry_without_end_are_refused(tmp_path):
    block = {"size": 1, "state": "inactive"}
    segment = {"address": 0, "total_size": 10**5, "stream": 0, "segment_type": "small", "blocks": [block] * 10**5}
    refused(dump(tmp_path, {"segments": [segment] * 10**5}), "more entries than bytes")


def test_memory_mapped_in_many_pieces_costs_no_more_than_its_entries(tmp_path):
    pieces = [{"addr": 100 * MiB * i, "size": 20 * MiB, "stream": 0} for i in range(1, 10_001)]
    segments = [
        {"address": piece["addr"], "total_size": piece["size"], "stream": 0, "segment_type": "large"}
        | {"is_expandable": True, "blocks": [{"size": piece["size"], "state": "inactive"}]}
        for piece in pieces
    ]
    data = {"segments": segments, "device_traces": [[{"action": "segment_map", **piece} for piece in pieces]]}
    started = time.perf_counter()
    assert eb.Snapshot.read(dump(tmp_path, data)).compare().recorded.peak_reserved == 10_000 * 20 * MiB
    assert time.perf_counter() - started < 60  # looking at all pieces for each takes several minutes


def test_blocks_that_do_not_fill_their_segment_and_segments_that_overlap_are_refused(tmp_path):
    short, twice = plain(), plain()
    short["segments"][0]["total_size"] += 512
    twice["segments"].append(twice["segments"][0])
    refused(dump(tmp_path, short), "do not fill it")
    refused(dump(tmp_path, twice), "two segments overlap")


def test_what_is_no_pickle_at_all_is_refused(tmp_path):
    for i, content in enumerate((b"", b"hello", b"\x80", b"PK\x03\x04", b"\x80\x04.", bytes(1000))):
        path = tmp_path / f"{i}.pickle"
        path.write_bytes(content)
        refused(path, "is not a")
    with pytest.raises(FileNotFoundError):
        eb.Snapshot.read(tmp_path / "missing.pickle")


@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    content = bytearray(pickle.dumps(plain(), data.draw(st.sampled_from([2, 4]))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(content)
    try:
        snapshot = eb.Snapshot.read(path)
        comparison, _ = snapshot.compare(), snapshot.timeline
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert comparison.allocations >= comparison.address_mismatches


# -- written -----------------------------------------------------------------------------------------------------------


def test_pytorchs_own_viewer_opens_a_timeline_that_was_written(tmp_path):
    with eb.trace(rules="cuda") as run:
        model = nn.Linear(64, 64)
        model(torch.randn(8, 64)).sum().backward()
    path = tmp_path / "trace.pickle"
    run.timeline.to_snapshot(path)
    data = pickle.loads(path.read_bytes())  # our own
    for page in (viz.trace_plot(data), viz.trace_plot(data, plot_segments=True), viz.segment_plot(data)):
        assert "snapshot.pickle" in page
    assert f"{len(data['device_traces'][0])} entries" in viz.trace(data)
    assert f"segments: {len(data['segments'])}" in viz.segsum(data)
    flames = io.StringIO(viz.memory(data, format_flamegraph=lambda text: text)).read()
    assert "test_snapshot.py" in flames


@given(timelines(), GPU_SETTINGS)
def test_what_was_written_reads_back_as_the_same_allocations_at_the_same_addresses(tmp_path_factory, t, settings):
    path = tmp_path_factory.getbasetemp() / "written.pickle"
    t.to_snapshot(path, Allocator(**settings))
    snapshot, replay = eb.Snapshot.read(path), Allocator(**settings).replay(t)
    columns = ["action", "nbytes", "stream", "device"]
    assert snapshot.timeline.frame()[columns].astype(str).equals(t.frame()[columns].astype(str))
    comparison = snapshot.compare()
    assert comparison.exact
    assert comparison.recorded.peak_allocated == replay.peak_allocated
    assert comparison.recorded.peak_reserved == replay.peak_reserved
    assert comparison.modelled.peak_requested == t.peak_bytes


def test_an_allocation_that_fails_is_written_as_out_of_memory(tmp_path):
    path = tmp_path / "oom.pickle"
    timeline(f"a={30 * MiB}", "-a", 90 * MiB).to_snapshot(path, Allocator(total=80 * MiB))
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    assert [event["action"] for event in events][-2:] == ["segment_free", "oom"]
    assert events[-1]["device_free"] == 80 * MiB
    assert eb.Snapshot.read(path).compare().exact


# -- what another size would have done ---------------------------------------------------------------------------------


class Upwards:
    """A driver whose segments lie at rising addresses, as the library's."""

    def random(self):
        return 1.0


def _play(gpu, requests):
    """How many of the requests (bytes, or minus the place of one that is given back) a GPU serves."""
    live = {}
    for done, request in enumerate(requests):
        if request > 0:
            live[done] = gpu.malloc(request)
            if live[done] is None:
                return done
        else:
            gpu.free(live[-request])
    return len(requests)


def _requests(rng):
    """Requests of a random program whose memory grows until no card holds it."""
    sizes = [rng.randint(*rng.choice([(1, MiB), (MiB, 10 * MiB), (10 * MiB, 60 * MiB)])) for _ in range(6)]
    requests, live = [rng.choice(sizes)], []  # the first one stays, for it has no minus
    while sum(size for size in requests if size > 0) < 4_000 * MiB:
        if live and rng.random() < 0.4:
            requests.append(-live.pop(rng.randrange(len(live))))
        else:
            live.append(len(requests))
            requests.append(rng.choice(sizes))
    return requests


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_whether_a_larger_card_would_have_done_is_as_if_the_program_had_run_there(tmp_path, seed, expandable):
    rng = random.Random(seed)
    requests, total = _requests(rng), rng.randrange(100, 300) * MiB
    gpu = SimulatedGpu(Upwards(), total, expandable=expandable)
    failed = _play(gpu, requests)
    assert gpu.events[-1]["action"] == "oom", "the program fills the card"
    path = dump(tmp_path, gpu.snapshot(0))
    sizes = [total + more * MiB for more in (0, 1, 2, 8, 20, 40, 80)]
    account = Account.read(path, what_if=[{"total": size} for size in sizes])
    really = [_play(SimulatedGpu(Upwards(), size, expandable=expandable), requests) > failed for size in sizes]
    assert [answer["out_of_memory"] is None for answer in account.answer["what_if"]] == really
    assert not really[0] and account.answer["replayed"]["out_of_memory"] is not None
    assert account.answer["room"] == total


def test_what_a_request_that_failed_needed_counts_it(tmp_path):
    gpu = SimulatedGpu(Upwards(), 100 * MiB)
    for size in (30 * MiB, 60 * MiB, 30 * MiB):
        gpu.malloc(size)
    account = Account.read(dump(tmp_path, gpu.snapshot(0)), what_if=[{"total": 118 * MiB}, {"total": 120 * MiB}])
    (failure,) = account.comparison.out_of_memory
    assert (failure.needed, failure.room) == (120 * MiB, 100 * MiB)
    assert [answer["out_of_memory"] is None for answer in account.answer["what_if"]] == [False, True]
    assert account.answer["recorded"]["peak_requested"] == 90 * MiB  # what was refused was never there
