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


def judge(timeline: Timeline, gpu: GPU, unsure: Sequence[str] = ()) -> Verdict:
    """Whether a run fits on a GPU.

    Args:
        timeline: What the allocator gets to see, workspaces included (`Timeline.with_workspaces`).
        gpu: The GPU.
        unsure: Why the timeline may not be that of a real run; any reason makes the verdict "cannot say".
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
    return Verdict(word, why, replay, needs, (least - needs, most - needs), failure)


def doubts(not_covered: Iterable[str], conditional: Iterable[str]) -> list[str]:
    """Why a trace may not be what a real run does, a reason a text (`Trace.not_covered`, `Trace.conditional`)."""
    reasons = []
    if names := ", ".join(sorted(not_covered)):
        reasons.append(f"no rule covers {names}: leave it out, or measure it on the GPU")
    if lines := ", ".join(conditional):
        reasons.append(
            f"at {lines} a value that no trace knows decides the way, or full memory; figures are of the way taken"
        )
    return reasons
