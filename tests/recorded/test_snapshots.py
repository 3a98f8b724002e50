"""Every recording of a real GPU against the allocator's rules: address by address, segment by segment."""

import pickle

import pytest

import everybyte as eb
from everybyte import plain_pickle
from everybyte.allocator import Allocator

# From the recordings' notes: allocations; peaks of whole blocks, of sizes rounded to 512 B, of segments.
RECORDED = {
    "attention-small": (36, 3_249_144_832, 3_249_144_832, 3_781_165_056),
    "lm-2.7b-ctx128-forward-fp32": (2_058, 19_498_420_224, 19_498_420_224, 19_667_091_456),
    "lm-2.7b-ctx128-train-fp32": (6_771, 55_079_000_576, 55_078_640_128, 61_111_009_280),
    "lm-medium-ctx128-inference": (1_280, 1_738_928_128, 1_738_928_128, 1_763_704_832),
    "lm-medium-ctx128-train-fp32": (6_526, 7_026_606_592, 7_021_691_392, 7_235_174_400),
    "lm-medium-ctx1024-train-amp": (7_591, 24_213_918_720, 24_211_100_672, 25_178_406_912),
}


def test_the_recordings_hold_24262_allocations():
    assert sum(allocations for allocations, *_ in RECORDED.values()) == 24_262


@pytest.mark.parametrize("name", RECORDED)
def test_each_allocation_lies_at_its_recorded_address_and_each_segment_comes_when_it_came(snapshots, name):
    comparison = eb.Snapshot.read(snapshots / f"{name}.pickle").compare()
    allocations, allocated, rounded, reserved = RECORDED[name]
    assert (comparison.allocations, comparison.address_mismatches) == (allocations, 0)
    assert (comparison.segment_mismatches, comparison.reserved_mismatches, comparison.contradictions) == (0, 0, 0)
    assert comparison.recorded == comparison.modelled
    peaks = comparison.recorded
    assert (peaks.peak_allocated, peaks.peak_rounded, peaks.peak_reserved) == (allocated, rounded, reserved)


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("kept", [1, 2, 97, 1_500, 4_000])
def test_the_end_of_a_recording_is_completed_as_well_without_what_older_files_lack(snapshots, tmp_path, name, kept):
    data, _ = plain_pickle.load(snapshots / f"{name}.pickle")
    (events,) = data["device_traces"]
    segments = [
        {
            **{key: value for key, value in segment.items() if key not in ("is_expandable", "segment_pool_id")},
            "blocks": [{key: block[key] for key in ("size", "requested_size", "state")} for block in segment["blocks"]],
        }
        for segment in data["segments"]
    ]
    last = [{key: event[key] for key in ("action", "addr", "size", "stream")} for event in events[-kept:]]
    path = tmp_path / "last.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [last]}, 4))
    snapshot = eb.Snapshot.read(path)
    comparison = snapshot.compare()
    assert comparison.exact
    assert comparison.contradictions == 0
    assert comparison.allocations == sum(event["action"] == "alloc" for event in last)
    whole = eb.Snapshot.read(snapshots / f"{name}.pickle").recording(0)
    least = comparison.recorded.peak_allocated
    most = least + sum(slack.possible[-1] - slack.possible[0] for slack in comparison.undetermined)
    assert least <= whole.allocated[-len(last) - 1 :].max() <= most


@pytest.mark.parametrize("name", RECORDED)
def test_the_timeline_of_a_recording_is_its_events_after_what_was_live_before(snapshots, recorded_events, name):
    timeline = eb.Snapshot.read(snapshots / f"{name}.pickle").timeline
    start = timeline.info["start_event"]
    frame = timeline.frame()[start:]
    changes = [n if action == "alloc" else -n for action, n in zip(frame["action"], frame["nbytes"], strict=True)]
    assert changes == recorded_events(name)
    assert timeline.info["evidence"] == "recorded"
    rounded = timeline.rounded(512)
    assert (
        rounded.peak_above_start
        == {
            "attention-small": 3_249_144_832,
            "lm-2.7b-ctx128-forward-fp32": 19_498_420_224 - 13_774_469_120,
            "lm-2.7b-ctx128-train-fp32": 55_078_640_128 - 13_904_525_312,
            "lm-medium-ctx128-inference": 1_738_928_128 - 1_703_276_544,
            "lm-medium-ctx128-train-fp32": 1_918_013_952,
            "lm-medium-ctx1024-train-amp": 19_111_273_472,
        }[name]
    )


def test_blocks_from_before_the_recording_name_the_line_that_made_them(snapshots):
    timeline = eb.Snapshot.read(snapshots / "lm-2.7b-ctx128-forward-fp32.pickle").timeline
    of_the_output = timeline.frame()["line"].str.startswith("transformer.py:").sum()
    assert of_the_output > 1_000
    assert (timeline.by("line")["nbytes"].sum()) == timeline.peak_bytes


def test_other_settings_would_have_reserved_otherwise(snapshots):
    snapshot = eb.Snapshot.read(snapshots / "lm-2.7b-ctx128-train-fp32.pickle")
    apart, growing = (Allocator(expandable_segments=on).replay(snapshot.timeline) for on in (False, True))
    assert growing.peak_reserved < apart.peak_reserved
    assert growing.peak_allocated < apart.peak_allocated  # no remainder is left unsplit
    assert growing.fragmentation.unsplit == 0
