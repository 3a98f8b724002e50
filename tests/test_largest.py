"""The largest size that fits, whatever the bytes do between, and the sizes among a program's arguments."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybyte import sizes
from everybyte.largest import largest


@given(
    st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**7), st.integers(1, 500), st.integers(0, 2**20),
    st.integers(0, 3),
)  # fmt: skip
def test_the_answer_fits_and_one_more_does_not(constant, each, room, now, noise, power):
    tries = []

    def need(size):
        return constant + each * size ** max(power, 1) + (size * 7919) % (noise + 1)

    def tried(size):
        tries.append(size)
        return SimpleNamespace(fits=need(size) <= room, nbytes=need(size), why="")

    found = largest(tried, now, room, 2**16)
    if found.size:
        assert need(found.size) <= room
        assert found.nbytes == need(found.size)
    if found.next_nbytes is None:
        assert found.size == 2**16
    else:
        assert found.next_nbytes == need(found.size + 1) > room
    assert len(tries) == len(set(tries)) <= 6 + 17


def test_few_tries_are_needed_where_bytes_follow_a_line():
    tries = []

    def tried(size):
        tries.append(size)
        nbytes = 3_000_000_000 + 512 * ((size * 171_000_001) // 512)
        return SimpleNamespace(fits=nbytes <= 16_000_000_000, nbytes=nbytes, why="")

    assert largest(tried, 8, 16_000_000_000, 2**16).size == 76
    assert len(tries) <= 5


def test_a_size_outside_of_its_range_is_refused():
    with pytest.raises(ValueError, match="now=9 lies outside of 1 to 8"):
        largest(lambda size: None, 9, 1, 8)


@pytest.mark.parametrize(
    ("arguments", "kind", "now", "then"),
    [
        (["--batch-size", "8", "--lr", "1"], "batch_size", 8, ["--batch-size", "16", "--lr", "1"]),
        (["--lr=1", "--batch_size=8"], "batch_size", 8, ["--lr=1", "--batch_size=16"]),
        (["-b", "4"], "batch_size", 4, ["-b", "16"]),
        (["batch_size=4", "x={}"], "batch_size", 4, ["batch_size=16", "x={}"]),
        (["train.batch_size=4"], "batch_size", 4, ["train.batch_size=16"]),
        (["--per_device_train_batch_size", "2"], "batch_size", 2, ["--per_device_train_batch_size", "16"]),
        (["--seq-len", "512"], "sequence", 512, ["--seq-len", "16"]),
        (["--batch-size", "8", "--batch-size", "9"], "batch_size", 9, ["--batch-size", "8", "--batch-size", "16"]),
    ],
)
def test_sizes_are_found_among_arguments_and_replaced(arguments, kind, now, then):
    found = sizes.among(arguments)
    assert {kind: size.now for kind, size in found.items()} == {kind: now}
    assert [*found[kind].to(16, arguments)] == then


@pytest.mark.parametrize("words", ["", "--batch-size", "--batch-size auto", "8", "b 8", "--lr 8", "-b -1", "-b 0"])
def test_what_is_no_size_is_none(words):
    assert sizes.among(words.split()) == {}
