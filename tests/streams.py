"""Small timelines for tests: written by hand, or drawn by Hypothesis around the allocator's borders."""

from hypothesis import strategies as st

from everybyte.timeline import Recorder, Timeline
from everybyte.units import MiB

BORDERS = [1, 511, 512, 513, MiB - 512, MiB, MiB + 1, 2 * MiB, 10 * MiB - 512, 10 * MiB - 511, 10 * MiB, 20 * MiB]

sizes = st.one_of(
    st.sampled_from(BORDERS),
    st.integers(1, MiB),
    st.integers(MiB + 1, 10 * MiB),
    st.integers(10 * MiB, 60 * MiB),
)


def timeline(*events: int | str, device: str = "cuda:0", stream: int = 0) -> Timeline:
    """`timeline(512, "a=4096", "-a", "-0")`: sizes are allocated, under a name or their number; "-name" is released."""
    recorder, storages = Recorder(), {}
    for event in events:
        if isinstance(event, str) and event.startswith("-"):
            recorder.free(storages[event[1:]])
            continue
        name, _, nbytes = str(event).rpartition("=")
        storages[name or str(len(storages))] = recorder.alloc(int(nbytes), device=device, stream=stream)
    return recorder.finish({})


@st.composite
def timelines(draw, streams=2, most=80):
    """Allocations and releases in any order, of sizes around the borders."""
    recorder, live = Recorder(), []
    for _ in range(draw(st.integers(1, most))):
        if live and draw(st.booleans()):
            recorder.free(live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            stream = draw(st.integers(0, streams - 1))
            live.append(recorder.alloc(draw(sizes), device="cuda:0", stream=stream))
    return recorder.finish({})
