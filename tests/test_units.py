import pytest

from everybyte.units import format_bytes, in_the_style_of, parse_bytes, round_up


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1,000 B (1.000 KB, 0.977 KiB)"),
        (2**20, "1,048,576 B (1.049 MB, 1.000 MiB)"),
        (2**30, "1,073,741,824 B (1.074 GB, 1.000 GiB)"),
        (-2_000_000, "-2,000,000 B (-2.000 MB, -1.907 MiB)"),
    ],
)
def test_bytes_come_first_and_both_units_follow(nbytes, text):
    assert format_bytes(nbytes) == text


def test_a_fraction_of_a_byte_is_refused():
    with pytest.raises(TypeError, match="whole number"):
        format_bytes(1.5)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16 GB", 16_000_000_000), ("16GiB", 17_179_869_184), ("1.5 MiB", 1_572_864), ("4,096 B", 4096), (7, 7), ("7", 7)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["16 gigs", "GB", "-3 MB", "", "1e9", None, True])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="16 GB"):
        parse_bytes(text)


def test_rounding_goes_up_and_leaves_multiples_alone():
    assert [round_up(n, 512) for n in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]


def test_a_number_is_written_in_the_unit_and_to_the_digits_of_another():
    assert in_the_style_of("1.05 GB", 1_048_576_000) == "1.05 GB"
    assert in_the_style_of("2 KiB", 1_535) == "1 KiB"
    with pytest.raises(ValueError, match="'much' is not a size"):
        in_the_style_of("much", 1)
