"""When a run that leaves bytes behind, batch after batch, no longer fits."""

from __future__ import annotations

from collections.abc import Sequence


def first_too_large(room: int, adds: Sequence[int], leaves: Sequence[int]) -> int | None:
    """The first batch that does not fit, counted from 1 over all epochs; None if every batch does.

    Args:
        room: Bytes that are free before the first batch.
        adds: For each batch of an epoch the bytes that it adds at its fullest moment.
        leaves: For each batch of an epoch the bytes that it leaves behind.

    Raises:
        ValueError: If an epoch has no batches, the two are not of one length, or bytes are negative.
    """
    if not adds or len(adds) != len(leaves) or min(*adds, *leaves) < 0:
        raise ValueError(f"{len(adds)} batches add and {len(leaves)} leave bytes: give both of each, none negative")
    # What an epoch leaves is the same each time, so whole epochs that surely fit are passed over at once.
    lost = sum(leaves)
    epochs = max(0, (room - max(adds)) // lost - 1) if lost else 0
    live = epochs * lost
    for epoch in range(epochs, epochs + 3 if lost else 1):
        for n, (more, left) in enumerate(zip(adds, leaves, strict=True), start=1):
            if live + more > room:
                return epoch * len(adds) + n
            live += left
    return None
