"""The batch at which memory is full, against a loop that counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybyte.formulas.accumulation import first_too_large

epochs = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=6)


def counted(room, adds, leaves, most=1_500):
    live = 0
    for n in range(most):
        if live + adds[n % len(adds)] > room:
            return n + 1
        live += leaves[n % len(leaves)]
    return None


@given(st.integers(0, 200), epochs)
def test_the_batch_that_does_not_fit_is_the_one_that_a_count_comes_to(room, epoch):
    adds, leaves = zip(*epoch, strict=True)
    assert first_too_large(room, adds, leaves) == counted(room, adds, leaves)


def test_a_leak_of_one_byte_a_batch_is_found_after_sixteen_billion_of_them():
    assert first_too_large(16 * 10**9, [10], [1]) == 16 * 10**9 - 10 + 2


@pytest.mark.parametrize("adds, leaves", [([], []), ([1], [1, 2]), ([1], [-1])])
def test_batches_that_cannot_be_are_refused(adds, leaves):
    with pytest.raises(ValueError, match="none negative"):
        first_too_large(10, adds, leaves)
