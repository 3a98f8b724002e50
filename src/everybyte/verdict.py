"""Does a traced run fit on a GPU? Fits, tight, does not fit, or cannot say; never "fits" where that is not known.

The timeline, with the workspaces of cuBLAS in it, goes through the allocator beside the smallest and beside the largest
CUDA context reported for the GPU. Only where both agree is the answer yes or no.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .allocator import Allocator, OutOfMemory, Replay
from .gpus import GPU
from .timeline import Timeline
from .units import format_bytes

FITS, TIGHT, DOES_NOT_FIT, CANNOT_SAY = "fits", "tight", "does not fit", "cannot say"

MARGIN: Final = 20
"""A run that fits is tight if it would not with a twentieth of the GPU's memory less."""

LONGEST_RUN: Final = 10**6
"""A growth that so many steps more do not turn into a full GPU is no reason to doubt that a run fits."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits on a GPU, and why.

    Attributes:
        word: "fits", "tight", "does not fit" or "cannot say".
        why: What decides it, and how to mend it, in a line; empty where it fits.
        replay: What the allocator does on a GPU that never runs out.
        needs: Bytes for the allocator: what it reserves there, or, if there is less, the least in which the run ends.
        left: Bytes that remain of the GPU, at least and at most, by what the context takes; negative ones are missing.
        failure: The request that fails; None where none does.
    """

    word: str
    why: str
    replay: Replay
    needs: int
    left: tuple[int, int]
    failure: OutOfMemory | None


def judge(timeline: Timeline, gpu: GPU, unsure: Sequence[str] = (), *, goes_on: bool = False) -> Verdict:
    """Whether a run fits on a GPU.

    Args:
        timeline: What the allocator gets to see, workspaces included (`Timeline.with_workspaces`).
        gpu: The GPU.
        unsure: Why the timeline may not be that of a real run; any reason makes the verdict "cannot say".
        goes_on: Whether the program was cut off after some steps and has more: what grows with each then fills the GPU.
    """
    least, most = gpu.usable

    def fails(total: int, **settings: bool) -> OutOfMemory | None:
        return Allocator(total=total, **settings).replay(timeline).out_of_memory

    replay = Allocator().replay(timeline)
    failure = fails(least)
    needs = Allocator().smallest_card(timeline) if replay.peak_reserved > least else replay.peak_reserved
    word, why = FITS, ""
    if unsure:
        word, why = CANNOT_SAY, f"cannot say whether it fits: {'; '.join(unsure)}"
    elif failure and (always := fails(most)):
        word, failure = DOES_NOT_FIT, always
        mend = f"it needs {format_bytes(needs)}: make the batch smaller, recompute, or choose another GPU"
        if not fails(least, expandable_segments=True):
            mend = "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits"
        why = f"does not fit on {gpu.name}: {failure}; {mend}"
    elif failure:
        few, many = (format_bytes(nbytes) for nbytes in gpu.context)
        word = CANNOT_SAY
        why = (
            f"cannot say whether it fits on {gpu.name}: it does if the CUDA context takes {few}, and not if it takes "
            f"{many}; make the batch a little smaller"
        )
    elif fails(least - gpu.total // MARGIN):
        word = TIGHT
        why = f"fits on {gpu.name} with less than 5 % of it to spare, which another process or a longer batch may take"
    more = steps_until(least - needs, timeline) if goes_on and word in (FITS, TIGHT) else None
    if more is not None:
        word = CANNOT_SAY
        why = (
            f"cannot say whether it fits: each step leaves {format_bytes(growth(timeline))} behind, and about {more:,} "
            "more fill the GPU; free what they keep (everybyte.leaks says who holds it), or trace with as many --steps "
            "as there will be"
        )
    return Verdict(word, why, replay, needs, (least - needs, most - needs), failure)


def growth(timeline: Timeline) -> int:
    """Bytes that each step leaves behind, at least; 0 if one leaves none. The first makes the optimizer's state."""
    later = timeline.growth_per_step()["growth"].to_list()[1:]
    return max(min(later), 0) if len(later) > 1 else 0


def steps_until(left: int, timeline: Timeline) -> int | None:
    """About how many steps more take what is left of a GPU; None if more than a run has, or they leave nothing."""
    grows = growth(timeline)
    more = left // grows if grows else LONGEST_RUN
    return more if more < LONGEST_RUN else None


def doubts(
    not_covered: Iterable[str], conditional: Iterable[str], way: str = "figures are of the way taken"
) -> list[str]:
    """Why a trace may not be what a real run does, a reason a text (`Trace.not_covered`, `Trace.conditional`).

    Args:
        way: What is known of the other way.
    """
    reasons = []
    if names := ", ".join(sorted(not_covered)):
        reasons.append(f"no rule covers {names}: leave it out, or measure it on the GPU")
    if lines := ", ".join(conditional):
        reasons.append(f"at {lines} a value that no trace knows decides the way, or full memory; {way}")
    return reasons
