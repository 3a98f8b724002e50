"""The caching allocator's rules: at their borders, in field reports, and against a plain list of blocks."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import timeline, timelines
from torch import nn

import everybyte as eb
from everybyte.allocator import Allocator
from everybyte.caching import DeviceAllocator
from everybyte.units import KiB, MiB

# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given_"), [(1, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512)])
def test_a_request_is_rounded_to_512_bytes(asked, given_):
    assert DeviceAllocator().round_size(asked) == given_


def test_with_divisions_a_request_is_rounded_to_a_step_between_powers_of_two():
    # 4 steps between 1024 and 2048 are 1024, 1280, 1536, 1792 (roundup_power2_next_division, in KiB here)
    rules = Allocator(roundup_power2_divisions=4).device()
    assert [rules.round_size(n * KiB) for n in (1024, 1200, 1281, 1793)] == [n * KiB for n in (1024, 1280, 1536, 2048)]
    assert rules.round_size(4 * 512) == 2048  # not above 512 B times the divisions: rounded to 512 B


def test_divisions_may_differ_from_interval_to_interval_as_in_the_allocator_config_test_of_pytorch():
    divisions = {64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, ">": 1}  # c10/test/core/AllocatorConfig_test.cpp
    chosen = Allocator(roundup_power2_divisions=divisions).divisions
    assert [chosen[int(math.log2(n))] for n in (32, 64, 128, 256, 512, 1024, 2048, 4096)] == [8, 8, 2, 4, 2, 4, 1, 1]


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(1, 2), (MiB, 2), (MiB + 1, 20), (10 * MiB - 512, 20), (10 * MiB, 10), (10 * MiB + 1, 12), (33 * MiB, 34)],
)
def test_the_segment_is_2_mib_or_20_mib_or_the_request_rounded_to_2_mib(asked, segment):
    assert Allocator().replay(timeline(asked)).peak_reserved == segment * MiB


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_a_large_remainder_of_one_mebibyte_stays_with_its_block_and_a_larger_one_is_split_off():
    rules = DeviceAllocator()
    assert rules.malloc(19 * MiB).size == 20 * MiB
    assert rules.malloc(19 * MiB - 512).size == 19 * MiB - 512


def test_small_requests_are_split_to_the_last_512_bytes():
    rules = DeviceAllocator()
    first, second = rules.malloc(MiB), rules.malloc(MiB - 512)
    assert (first.size, second.size, second.address - first.address) == (MiB, MiB - 512, MiB)
    assert rules.malloc(512).size == 512
    assert rules.reserved == 2 * MiB


def test_the_smallest_block_that_fits_is_taken_and_of_two_equal_ones_the_lower():
    large, fits, same = 12 * MiB, 4 * MiB, 4 * MiB
    run = Allocator().replay(
        timeline(f"a={large}", "w=10485760", f"b={fits}", "x=2097152", f"c={same}", "-a", "-c", "-b", 3 * MiB)
    )
    assert run.addresses[-1] == run.addresses[2]  # b, below c, and smaller than a


def test_what_a_stream_has_freed_no_other_stream_gets():
    recorder = eb.timeline.Recorder()
    recorder.free(recorder.alloc(30 * MiB, device="cuda:0", stream=0))
    recorder.alloc(30 * MiB, device="cuda:0", stream=1)
    assert Allocator().replay(recorder.finish({})).peak_reserved == 60 * MiB


def test_an_empty_storage_never_reaches_the_allocator():
    run = Allocator().replay(timeline("a=0", 512, "-a"))
    assert (run.peak_allocated, run.addresses.tolist()[0]) == (512, 0)


def naive(events):
    """Best fit by looking at every block: [start, size, taken, small] of each segment, in order of address."""
    segments, top, placed = [], 0x7F00_0000_0000, {}
    for name, size in events:
        if size is None:
            blocks, block = placed.pop(name)
            block[2] = False
            i = 0
            while i + 1 < len(blocks):
                if blocks[i][2] or blocks[i + 1][2]:
                    i += 1
                else:
                    blocks[i][1] += blocks.pop(i + 1)[1]
            continue
        size = max(512, -(-size // 512) * 512)
        small = size <= MiB
        free = [(b[1], b[0], blocks, b) for blocks in segments for b in blocks if not b[2] and b[3] == small]
        fits = sorted((entry for entry in free if entry[0] >= size), key=lambda entry: entry[:2])
        if not fits:
            segment = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
            segments.append([[top, segment, False, small]])
            top += segment
            fits = [(segment, top, segments[-1], segments[-1][0])]
        _, _, blocks, block = fits[0]
        rest = block[1] - size
        if rest >= 512 if small else rest > MiB:
            blocks.insert(blocks.index(block) + 1, [block[0] + size, rest, False, small])
            block[1] = size
        block[2] = True
        placed[name] = blocks, block
        yield block[0], block[1]


@given(timelines(streams=1))
def test_every_block_lies_where_a_plain_search_through_all_blocks_would_put_it(t):
    rows = t.frame()
    events = [(r.storage, r.nbytes if r.action == "alloc" else None) for r in rows.itertuples()]
    run = Allocator().replay(t)
    expected = [address for address, _ in naive(events)]
    assert run.addresses[(rows["action"] == "alloc").to_numpy()].tolist() == expected


SETTINGS = st.sampled_from(
    [
        {},
        {"max_split_size_mb": 20},
        {"roundup_power2_divisions": 8},
        {"expandable_segments": True},
        {"expandable_segments": True, "large_segment_size_mb": 11},
    ]
)


@given(timelines(), SETTINGS, st.none() | st.integers(40, 400))
def test_blocks_tile_their_segments_and_the_counts_are_their_sums(t, settings, total):
    settings = settings if total is None else {**settings, "total": total * MiB}
    rules = Allocator(**settings).device()
    live = {}
    for row in t.frame().itertuples():
        if row.action == "alloc":
            block = rules.malloc(row.nbytes, row.stream)
            if block is None:
                break
            live[row.storage] = block
        else:
            rules.free(live.pop(row.storage))
        segments = list(rules.segments())
        for segment in segments:
            ends = [block.address + block.size for block in segment.blocks]
            assert [block.address for block in segment.blocks] == [segment.address, *ends[:-1]]
            assert ends[-1] == segment.address + segment.size
            states = [block.state for block in segment.blocks]
            assert ("inactive", "inactive") not in pairwise(states)
        blocks = [(block, segment) for segment in segments for block in segment.blocks]
        assert rules.reserved == sum(segment.size for segment in segments) <= rules.total
        assert rules.allocated == sum(segment.allocated for segment in segments)
        assert rules.requested == sum(block.requested for block, _ in blocks if block.state != "inactive")
        assert rules.inactive_split == sum(
            block.size
            for block, segment in blocks
            if block.state == "inactive" and len(segment.blocks) > 1 and not segment.expandable
        )
        active = [block.address for block, _ in blocks if block.state != "inactive"]
        assert active == sorted(block.address for block in live.values())


@given(timelines(), SETTINGS)
def test_when_all_is_freed_each_segment_is_one_block_again_and_all_of_it_can_be_returned(t, settings):
    rules = Allocator(**settings).device()
    live = {}
    for row in t.frame().itertuples():
        if row.action == "alloc":
            live[row.storage] = rules.malloc(row.nbytes, row.stream)
        else:
            rules.free(live.pop(row.storage))
    for block in live.values():
        rules.free(block)
    assert all(len(segment.blocks) == 1 for segment in rules.segments())
    assert (rules.allocated, rules.requested, rules.inactive_split) == (0, 0, 0)
    rules.release_cached_blocks()
    assert (rules.reserved, list(rules.segments())) == (0, [])


@given(timelines(), SETTINGS)
def test_a_state_taken_over_goes_on_as_the_one_it_was_taken_from(t, settings):
    rules, rows = Allocator(**settings).device(), list(t.frame().itertuples())
    live = {}
    for row in rows[: len(rows) // 2]:
        if row.action == "alloc":
            live[row.storage] = rules.malloc(row.nbytes, row.stream)
        else:
            rules.free(live.pop(row.storage))
    other = Allocator(**settings).device(cuda_malloc=rules.next_address)
    active = other.restore(rules.segments())
    copied = {storage: active[block.address] for storage, block in live.items()}
    assert list(other.segments()) == list(rules.segments())
    for row in rows[len(rows) // 2 :]:
        if row.action == "alloc":
            live[row.storage] = rules.malloc(row.nbytes, row.stream)
            new = rules._heads.keys() - other._heads.keys()
            other.cuda_malloc = lambda size, new=new: new.pop()
            copied[row.storage] = other.malloc(row.nbytes, row.stream)
            assert copied[row.storage].address == live[row.storage].address
        else:
            rules.free(live.pop(row.storage))
            other.free(copied.pop(row.storage))
    assert (other.allocated, other.reserved, other.inactive_split) == (
        rules.allocated,
        rules.reserved,
        rules.inactive_split,
    )


# -- settings ----------------------------------------------------------------------------------------------------------


def test_an_oversize_block_is_not_split_and_serves_only_what_is_nearly_as_large():
    settings = Allocator(max_split_size_mb=64)
    run = settings.replay(timeline(f"a={100 * MiB}", "-a", 30 * MiB, 90 * MiB))
    assert run.reserved.tolist()[-2:] == [130 * MiB, 130 * MiB]  # 30 MiB got a segment of its own, 90 MiB the old one
    assert run.allocated[-1] == 130 * MiB  # all of it: nothing was split off
    assert settings.replay(timeline(f"a={100 * MiB}", "-a", 80 * MiB)).peak_reserved == 180 * MiB  # 20 MiB too large


def test_oversize_blocks_are_returned_largest_first_until_there_is_enough():
    settings = Allocator(total=400 * MiB, max_split_size_mb=64)
    run = settings.replay(timeline(f"a={70 * MiB}", f"b={90 * MiB}", f"c={110 * MiB}", "-a", "-b", "-c", 190 * MiB))
    returned = [event.size // MiB for event in run.segment_events if event.action == "segment_free"]
    assert returned == [110, 90]


def test_before_it_gives_up_the_allocator_returns_every_segment_that_no_block_holds():
    run = Allocator(total=100 * MiB).replay(timeline(f"a={40 * MiB}", "b=512", f"c={30 * MiB}", "-a", "-c", 90 * MiB))
    actions = [(event.action, event.size // MiB) for event in run.segment_events]
    assert actions[3:] == [("segment_free", 30), ("segment_free", 40), ("segment_alloc", 90)]
    assert run.out_of_memory is None


def test_an_expandable_segment_grows_to_any_request_where_memory_has_no_end():
    pages = 1 + -(-(2**40) // (20 * MiB))  # the second request has a segment of its own
    assert Allocator(expandable_segments=True).replay(timeline(3 * MiB, 2**40)).peak_reserved == pages * 20 * MiB


def test_garbage_collection_returns_free_segments_of_at_least_average_age():
    # Allowed are 100 MiB, collection starts above 50, and 66 are reserved when 30 more are asked for. Each request of
    # the large pool is a tick: the 20 MiB were freed two ticks before, the 22 MiB one; the average is one and a half.
    settings = Allocator(total=200 * MiB, per_process_memory_fraction=0.5, garbage_collection_threshold=0.5)
    run = settings.replay(timeline(f"a={20 * MiB}", f"b={22 * MiB}", "-a", 24 * MiB, "-b", 30 * MiB))
    returned = [event.size // MiB for event in run.segment_events if event.action == "segment_free"]
    assert returned == [20]


def test_garbage_collection_acts_only_where_a_fraction_limits_the_process():
    events = timeline(f"a={60 * MiB}", "-a", 80 * MiB)
    unlimited = Allocator(total=200 * MiB, garbage_collection_threshold=0.1)
    assert unlimited.replay(events).peak_reserved == 140 * MiB


def test_a_fraction_of_the_memory_runs_out_earlier():
    events = timeline(60 * MiB)
    assert Allocator(total=100 * MiB, per_process_memory_fraction=0.6).replay(events).out_of_memory is None
    failed = Allocator(total=100 * MiB, per_process_memory_fraction=0.5).replay(events).out_of_memory
    assert (failed.event, failed.requested, failed.free, failed.cause) == (0, 60 * MiB, 50 * MiB, "demand")


def test_an_expandable_segment_grows_by_pages_and_serves_what_separate_segments_could_not():
    growing = [f"a={30 * MiB}", "-a", f"b={36 * MiB}", "-b", 50 * MiB]
    apart, together = (Allocator(expandable_segments=on).replay(timeline(*growing)) for on in (False, True))
    assert apart.peak_reserved == (30 + 36 + 50) * MiB
    assert together.peak_reserved == 60 * MiB  # three pages of 20 MiB
    assert [event.size // MiB for event in together.segment_events] == [40, 20]
    assert len(set(together.addresses)) == 1


def test_free_pages_of_an_expandable_segment_are_returned_before_memory_runs_out():
    settings = Allocator(total=100 * MiB, expandable_segments=True)
    run = settings.replay(timeline(f"a={50 * MiB}", f"b={20 * MiB}", "-a", "c=512", "-c", 61 * MiB))
    assert [event[::2] for event in run.segment_events if event.action == "segment_unmap"] == [
        ("segment_unmap", 40 * MiB),
        ("segment_unmap", 2 * MiB),
    ]
    assert run.out_of_memory.cause == "fragmentation" if run.out_of_memory else run.reserved[-1] <= 100 * MiB


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_split_size_mb": 19}, "max_split_size_mb must be at least 20, not 19"),
        ({"max_split_size_mb": "64"}, "max_split_size_mb is a whole number of MiB, not '64'"),
        ({"max_non_split_rounding_mb": 19}, "max_non_split_rounding_mb must be at least 20"),
        ({"large_segment_size_mb": 10}, "large_segment_size_mb must be at least 11"),
        ({"roundup_power2_divisions": 3}, "divisions must be a power of two, not 3"),
        ({"roundup_power2_divisions": {3: 4}}, "an interval must be a power of two, not 3"),
        ({"roundup_power2_divisions": {0: 4}}, "an interval starts at 1 MiB"),
        ({"roundup_power2_divisions": -4}, "must be a power of two"),
        ({"garbage_collection_threshold": 1.0}, "garbage_collection_threshold lies between 0 and 1"),
        ({"garbage_collection_threshold": math.nan}, "garbage_collection_threshold lies between 0 and 1"),
        ({"per_process_memory_fraction": 1.5, "total": 1}, r"per_process_memory_fraction lies in \[0, 1\]"),
        ({"per_process_memory_fraction": 0.5}, "say total as well"),
        ({"expandable_segments": 1}, "expandable_segments is True or False, not 1"),
        ({"total": 0}, "total must be positive"),
        ({"total": "16 gigs"}, "'16 gigs' is not a size"),
        ({"max_split_size": 20}, "max_split_size"),
    ],
)
def test_a_setting_that_pytorch_refuses_is_refused(settings, error):
    with pytest.raises((ValueError, TypeError), match=error):
        Allocator(**settings)


def test_of_several_devices_one_must_be_chosen():
    recorder = eb.timeline.Recorder()
    for device in ("cuda:0", "cuda:1"):
        recorder.alloc(600, device=device)
    both = recorder.finish({})
    with pytest.raises(ValueError, match="cuda:0, cuda:1: say device="):
        Allocator().replay(both)
    with pytest.raises(ValueError, match="no device 'cuda:2'"):
        Allocator().replay(both, "cuda:2")
    assert Allocator().replay(both, "cuda:1").peak_allocated == 1024


def test_nothing_allocated_is_no_error():
    run = Allocator().replay(timeline())
    assert (run.peak_allocated, run.peak_reserved, run.fragmentation, run.out_of_memory) == (0, 0, None, None)
    assert run.explain() == "nothing was allocated"


# -- out of memory -----------------------------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_demand_and_the_event_is_named():
    failed = Allocator(total="1 GB").replay(timeline(600_000_000, 512, 600_000_000)).out_of_memory
    assert (failed.event, failed.cause, failed.requested) == (2, "demand", 600_000_000)
    assert str(failed).startswith("out of memory at event 2: 600,000,000 B")
    assert "the tensors themselves do not fit" in str(failed)


@given(timelines(), st.integers(20, 300))
def test_out_of_memory_is_demand_exactly_if_the_live_blocks_and_the_request_exceed_the_memory(t, mebibytes):
    run = Allocator(total=mebibytes * MiB).replay(t)
    failed = run.out_of_memory
    assert run.peak_reserved <= mebibytes * MiB
    assert len(run.reserved) == (failed.event if failed else len(t))
    if failed:
        needed = failed.allocated + max(512, -(-failed.requested // 512) * 512)
        assert failed.cause == ("demand" if needed > mebibytes * MiB else "fragmentation")
        assert failed.largest_free < failed.requested
        assert failed.free < failed.segment


def test_the_smallest_card_holds_what_is_live_at_once_not_what_is_reserved_where_memory_has_no_end():
    grown = timeline(f"a={30 * MiB}", "-a", 40 * MiB)
    assert Allocator().replay(grown).peak_reserved == 70 * MiB
    assert Allocator().smallest_card(grown) == 40 * MiB
    assert Allocator().smallest_card(timeline(512)) == 2 * MiB
    assert Allocator().smallest_card(timeline(21 * MiB)) == 22 * MiB
    assert Allocator(10**12, roundup_power2_divisions=2).smallest_card(timeline(21 * MiB)) == 24 * MiB


@given(timelines())
def test_a_run_ends_on_its_smallest_card_and_on_none_of_two_mebibytes_less(t):
    card = Allocator().smallest_card(t)
    assert Allocator(card).replay(t).out_of_memory is None
    assert card == 2 * MiB or Allocator(card - 2 * MiB).replay(t).out_of_memory


# -- field reports -----------------------------------------------------------------------------------------------------


def resnet18():
    """Names are of no matter, the order of the modules is: He et al. 2016, table 1, as torchvision builds it."""

    def block(width, n_in, *, down):
        layers = [nn.Conv2d(n_in, width, 3, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)]
        return layers + ([nn.Conv2d(n_in, width, 1, bias=False), nn.BatchNorm2d(width)] if down else [])

    layers = [nn.Conv2d(3, 64, 7, bias=False), nn.BatchNorm2d(64)]
    n_in = 64
    for width in (64, 128, 256, 512):
        layers += block(width, n_in, down=width != n_in) + block(width, width, down=False)
        n_in = width
    return nn.Sequential(*layers, nn.Linear(512, 1000))


def test_resnet_18_takes_44_69_mib_of_blocks_where_44_64_mib_are_its_rounded_tensors():
    with eb.trace(rules="cuda") as run:
        model = resnet18()
    allocations = run.timeline.rounded(512)
    assert len(list(model.parameters())) == 62
    assert len(list(model.buffers())) == 60
    assert round(allocations.live_bytes[-1] / MiB, 4) == 44.6436
    replay = Allocator().replay(run.timeline)
    assert replay.allocated[-1] == 44.6904296875 * MiB
    assert replay.reserved[-1] == 64 * MiB
    parts = replay.fragmentation_at(-1)
    assert parts.requested + parts.rounding == allocations.live_bytes[-1]
    assert parts.unsplit == replay.allocated[-1] - allocations.live_bytes[-1]
    assert f"{parts.unsplit:,} B (49.152 KB, 48.000 KiB) remainders too small to split off" in replay.explain()


def two_linears(rows, loss):
    """Bytes allocated after the forward pass, and all of them; input, loss and gradients are still held at the end."""
    with eb.trace(rules="cuda") as run:
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()
        x = torch.rand(4, rows, 1024).cuda()
        y = loss(model(x))
        forward = len(run.timeline)
        y.backward()
        assert x.grad is None and all(p.grad is not None for p in model.parameters())
    replay = Allocator().replay(run.timeline)
    return replay.allocated[forward - 1], replay


@pytest.mark.parametrize("loss", [torch.sum, torch.mean])
def test_bytes_match_by_hand_for_256_rows_and_before_backward_for_480(loss):
    forward, replay = two_linears(256, loss)
    assert forward == 16_777_728  # two weights, the input, the first layer's output, the loss
    assert replay.allocated[-1] == 20_972_032  # two gradients in place of that output
    assert two_linears(480, loss)[0] == 24_117_760


def test_a_gradient_of_4_mib_in_a_hole_of_4_5_mib_keeps_the_half_that_is_too_small_to_split_off():
    _, run = two_linears(480, torch.mean)
    by_hand = 4 * 4 * MiB + 4 * 480 * 1024 * 4 + 512
    assert by_hand == 24_642_048
    assert run.allocated[-1] == 25_166_336 == by_hand + MiB // 2
    assert run.fragmentation_at(-1).unsplit == MiB // 2
    assert "524,288 B (524.288 KB, 512.000 KiB) remainders too small to split off" in run.explain()
    assert "4,194,304 B (4.194 MB, 4.000 MiB) asked for lie in a free block of 4,718,592 B" in run.explain()


def test_where_the_loss_is_a_sum_the_other_gradient_keeps_a_whole_mebibyte_more():
    # A sum's gradient is one number, expanded: no tensor of 7.5 MiB stands beside the hidden layer's output, so the
    # gradient of that takes its place, and leaves 5 MiB, of which the first weight's gradient needs 4.
    _, run = two_linears(480, torch.sum)
    assert run.allocated[-1] == 24_642_048 + MiB // 2 + MiB
    assert run.fragmentation_at(-1).unsplit == MiB // 2 + MiB
    assert "4,194,304 B (4.194 MB, 4.000 MiB) asked for lie in a free block of 5,242,880 B" in run.explain()


def test_cublas_workspace_is_what_remains_when_the_model_is_gone():
    workspace = 2 * 4096 * KiB + 8 * 16 * KiB  # :4096:2:16:8, the default before Hopper
    run = Allocator().replay(timeline(f"model={300 * MiB}", workspace, "-model"))
    assert run.allocated[-1] == 8_519_680


def test_allocated_after_the_step_against_reserved_at_its_peak_is_no_fragmentation():
    # "occupied 2.47 GB, reserved 16.69 GB" (of 2**30): the one read after the step, the other from its fullest moment.
    weights, activations = [f"w{i}={16 * MiB}" for i in range(158)], [f"a{i}={20 * MiB}" for i in range(728)]
    run = Allocator().replay(timeline(*weights, *activations, *(f"-a{i}" for i in range(728))))
    assert (round(run.allocated[-1] / 2**30, 2), round(run.reserved[-1] / 2**30, 2)) == (2.47, 16.69)
    assert run.peak_allocated == run.peak_reserved
    assert run.fragmentation.inactive_split == 0
    assert "compare peak with peak" in run.explain()
    free = 728 * 20 * MiB
    assert f"{free:,} B (15.267 GB, 14.219 GiB) free and could be given back" in run.explain()


def test_a_segment_of_11_6_gb_split_by_small_live_blocks_cannot_be_returned():
    # 12420 MiB reserved, 1062 MiB allocated, and a segment of 11,643,387,904 B that 531 blocks of 2 MiB hold.
    segment, live = 11_643_387_904, 531
    others = [f"o{i}={MiB * n}" for i, n in enumerate((656, 660))]
    small = [f"s{i}={2 * MiB}" for i in range(live)]
    events = [*others, f"big={segment}", "-big", *small, "-o0", "-o1"]
    run = Allocator().replay(timeline(*events))
    assert (run.reserved[-1], run.allocated[-1]) == (12_420 * MiB, 1062 * MiB)
    failed = Allocator(total=12_440 * MiB).replay(timeline(*events, 11_000 * MiB)).out_of_memory
    assert failed.cause == "fragmentation"
    assert (failed.allocated, failed.reserved) == (1062 * MiB, segment)
    assert (failed.split_segment, failed.live_blocks, failed.live_bytes) == (segment, live, 1062 * MiB)
    assert "fragmentation, not demand" in str(failed)
    assert "has 11,643,387,904 B (11.643 GB, 10.844 GiB) and cannot be given back, for live blocks of together" in str(
        failed
    )
    apart = Allocator(total=12_440 * MiB, max_split_size_mb=1024).replay(timeline(*events, 11_000 * MiB))
    assert apart.out_of_memory is None  # the cure of pull request 44742: what is oversize is not split


def test_a_run_that_fragmentation_ends_is_not_said_to_fit_where_its_tensors_never_would():
    events = [f"a={11_643_387_904}", "-a", "b=1062000000", f"c={12_000_000_000}", f"d={6_000_000_000}"]
    failed = Allocator(total=16 * 2**30).replay(timeline(*events)).out_of_memory
    assert failed.event == 3
    assert failed.cause == "fragmentation"
    assert failed.needed == 1_062_000_128 + 12_000_000_000 + 6_000_000_000 > 16 * 2**30
    assert "demand all the same" in str(failed)
