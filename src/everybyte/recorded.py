"""The public recordings of real GPUs that the book is held against, and what it says of each without the files.

The recordings belong to those who made them and are not part of the book. What is stored of each is the outcome of
`Snapshot.compare` and two digests: of the whole recording, so that a reader's copy can be told by its content whatever
its name and stack traces, and of the sizes that it allocates in order, which a trace can be held against.

    python -m everybyte.recorded FOLDER     makes the stored tables anew from a folder that holds the six files
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from .data import record
from .rewind import INACTIVE
from .snapshot import Snapshot

STORED: Final = "recordings.parquet"
LAYOUT: Final = "recording_layout.parquet"
DRAWN: Final = "attention-small"  # the recording whose fullest moment is stored, block by block


@dataclass(frozen=True)
class Source:
    """Where a recording is public.

    Attributes:
        label: What a page calls it.
        repository: On GitHub.
        commit: Of the repository, in which the file was seen.
        path: Of the file, by its name; two names where it alone does not tell.
        ran: What was recorded, and from which state.
        content: Its `digest`, by which a copy is known whatever its name.
    """

    label: str
    repository: str
    commit: str
    path: str
    ran: str
    content: str

    @property
    def address(self) -> str:
        return f"https://github.com/{self.repository}/tree/{self.commit}"


_MEDIUM = "Wedsonlin/assignment2-systems", "8630bcfe2d6f1c1f4b30a13bd611319d0329ec74"
_LARGE = "kkaitlyn111/cs336-a2-systems", "c1c174d195a52578ae28961723438628c8dcbb2d"
_ATTENTION = "silmont2000/assignment2-systems", "133f0643dd71416aa44409daafcf97e11078f3b9"

SOURCES: Final[Mapping[str, Source]] = {
    DRAWN: Source(
        "attention",
        *_ATTENTION,
        "mem_snapshot.pickle",
        "attention by hand, from an empty process",
        "4625cad5105a88e0ff43694e454a53a2104eb5ec54e08b438e896e9fba0246ef",
    ),
    "lm-medium-ctx128-inference": Source(
        "medium, inference",
        *_MEDIUM,
        "results/medium_128_inference_memory_snapshot.pickle",
        "423 M parameters: a forward pass, after others",
        "f8e53475105b89d1df1b2557f5848fa957c4a0588b6d885ae40d95dee700376c",
    ),
    "lm-medium-ctx128-train-fp32": Source(
        "medium, fp32",
        *_MEDIUM,
        "results/medium_128_training_memory_snapshot.pickle",
        "the same: a training step in fp32",
        "8abefbaf092d0af6be46039c0a2d111ff75a229793ad3f7ecbe96a16b98656d6",
    ),
    "lm-medium-ctx1024-train-amp": Source(
        "medium, autocast",
        *_MEDIUM,
        "results/medium_1024_training_memory_snapshot.pickle",
        "the same: a training step under bf16 autocast",
        "bb9f41fd01bd2cde01cee1030fb480fad3e23d0dc40024124bb6163c28d09041",
    ),
    "lm-2.7b-ctx128-forward-fp32": Source(
        "large, forward",
        *_LARGE,
        "memory_files/memory_ctx128_forward[_].pickle",
        "3.4 B parameters: a forward pass, the model loaded",
        "20055c26d3391f8746e62704602c1c8c50c3c2d33371fdb6c8555ced48c262ab",
    ),
    "lm-2.7b-ctx128-train-fp32": Source(
        "large, training",
        *_LARGE,
        "memory_files/memory_ctx128_fullstep[_].pickle",
        "the same: the first training step",
        "8de584fc68aeec214f01f9cb726baa4db983e3540558b3c0411bc59828751606",
    ),
}


def digest(snapshot: Snapshot) -> str:
    """SHA-256 of all that a recording says of memory: every event and, at its end, every block; no stacks, no times."""
    content = hashlib.sha256()
    for device, events in sorted(snapshot.traces.items()):
        for event in events:
            content.update(f"{device} {event.action} {event.address} {event.size} {event.stream}\n".encode())
    for segment in snapshot.segments:
        for block in segment.blocks:
            content.update(f"{segment.device} {segment.stream} {block.address} {block.size} {block.state}\n".encode())
    return content.hexdigest()


def digest_of_sizes(sizes: Iterable[int]) -> str:
    """SHA-256 of the sizes of allocations, in order."""
    return hashlib.sha256("\n".join(map(str, sizes)).encode()).hexdigest()


def summary(snapshot: Snapshot) -> dict[str, Any]:
    """What the book keeps of a recording.

    Returns:
        The figures of `Snapshot.compare`, `recorded_…` and `modelled_…`; how many allocations, segment events and
        bytes reserved differ; `peak_above_start` in bytes, each size rounded to 512 B; the two digests.
    """
    comparison, timeline = snapshot.compare(), snapshot.timeline.rounded(512)
    figures = {"recorded": comparison.recorded, "modelled": comparison.modelled}
    made = timeline.frame()[timeline.info["start_event"] :].query("action == 'alloc'").index
    sizes = snapshot.timeline.frame()["nbytes"][made]
    return {
        "allocations": comparison.allocations,
        **{f"{kind}_{name}": n for kind, one in figures.items() for name, n in asdict(one).items()},
        **{
            f"{what}_mismatches": getattr(comparison, f"{what}_mismatches")
            for what in ("address", "segment", "reserved")
        },
        "undetermined": len(comparison.undetermined),
        "peak_above_start": timeline.peak_above_start,
        "sizes": digest_of_sizes(sizes),
        "digest": digest(snapshot),
    }


def fullest(snapshot: Snapshot, device: int = 0) -> pd.DataFrame:
    """Where everything lies when most is allocated: a row for each live block.

    Returns:
        `segment`, numbered in the order in which they were taken; its bytes, `reserved`; the block's `offset` in it and
        what was `requested`.
    """
    recording = snapshot.recording(device)
    segments = {segment.address: segment.size for segment in recording.start}
    live = {b.address: b.requested for segment in recording.start for b in segment.blocks if b.state != INACTIVE}
    events = snapshot.traces.get(device, ())
    for i, event in enumerate(events[: int(recording.allocated.argmax())]):
        if event.action == "alloc":
            live[event.address] = event.size
        elif i in recording.releases:
            del live[event.address]
        elif event.action == "segment_alloc":
            segments[event.address] = event.size
        elif event.action == "segment_free":
            del segments[event.address]
    rows = [
        (number, size, at - start, live[at])
        for number, (start, size) in enumerate(segments.items())
        for at in sorted(live)
        if start <= at < start + size
    ]
    return pd.DataFrame(rows, columns=["segment", "reserved", "offset", "requested"])


def in_folder(folder: str | Path | None) -> dict[str, Snapshot]:
    """The recordings of a folder, by file name without its ending; none where no folder is given.

    Raises:
        ValueError: If there is no such folder, or a file in it is no recording.
    """
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder: let EVERYBYTE_SNAPSHOTS name one that holds *.pickle, or unset it")
    return {path.stem: Snapshot.read(path) for path in sorted(Path(folder).glob("*.pickle"))}


def make(snapshots: Path, folder: Path) -> pd.DataFrame:
    """Makes the stored tables from the six files, whatever their names.

    Returns:
        The table of summaries, a row for each recording.

    Raises:
        ValueError: If one of the six is not in the folder.
    """
    by_content = {digest(snapshot): snapshot for snapshot in in_folder(snapshots).values()}
    missing = [name for name, source in SOURCES.items() if source.content not in by_content]
    if missing:
        source = SOURCES[missing[0]]
        raise ValueError(f"{missing[0]} is not in {snapshots}: get {source.path} from {source.address}")
    found = {name: by_content[source.content] for name, source in SOURCES.items()}
    table = pd.DataFrame({name: summary(snapshot) for name, snapshot in found.items()}).T
    table = table.infer_objects().rename_axis("recording")
    notes = {
        "made_by": "python -m everybyte.recorded FOLDER",
        "sources": {name: f"{source.address} {source.path}" for name, source in SOURCES.items()},
        "terms": "the recordings are their authors'; none is in here",
    }
    fullest(found[DRAWN]).to_parquet(folder / LAYOUT)
    record(folder, LAYOUT, {**notes, "content": f"live blocks of {DRAWN} when most is allocated: numbers only"})
    table.to_parquet(folder / STORED)
    record(folder, STORED, {**notes, "content": "outcome of Snapshot.compare for each recording, and digests"})
    return table


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "notebooks/data")).T.to_string())
