import pandas as pd
import pyarrow as pa
import pytest

from everybyte.timeline import CATEGORIES, SCHEMA, Recorder, Timeline


def small_run():
    """100 live before the loop; step 0 peaks at 100 + 700 + 50 and leaves 20 behind, step 1 leaves nothing more."""
    recorder = Recorder()
    weight = recorder.alloc(100, op="empty", module="net")
    recorder.label(weight, "parameter")
    recorder.begin_step(0)
    recorder.enter_phase(backward=False, optimizer=False, module="net")
    kept = recorder.alloc(700, op="mm", module="net")
    temporary = recorder.alloc(50, op="mul", module="net")
    recorder.free(temporary)
    recorder.enter_phase(backward=True, optimizer=False, module="")
    gradient = recorder.alloc(20, op="mm", module="net")
    recorder.label(gradient, "gradient")
    recorder.free(kept)
    recorder.begin_step(1)
    recorder.enter_phase(backward=False, optimizer=False, module="net")
    recorder.free(recorder.alloc(30, op="mm", module="net"))
    recorder.begin_step(2, over=True)
    return recorder.finish({"evidence": "traced", "steps": 2})


def test_the_peak_is_the_largest_sum_of_live_bytes_and_the_start_is_what_lived_before_step_0():
    run = small_run()
    assert (run.start_bytes, run.peak_bytes, run.peak_above_start) == (100, 850, 750)
    assert run.frame().loc[run.peak, "op"] == "mul"


def test_what_forward_leaves_for_backward_is_activation_and_what_dies_before_is_temporary():
    assert small_run().by("category")["nbytes"].to_dict() == {"activation": 700, "parameter": 100, "temporary": 50}


@pytest.mark.parametrize("key", sorted({*SCHEMA.names} - {"action", "nbytes"}))
def test_every_grouping_of_the_peak_sums_to_the_peak(key):
    run = small_run()
    assert run.by(key)["nbytes"].sum() == run.peak_bytes


def test_growth_per_step_is_what_a_step_leaves_behind():
    growth = small_run().growth_per_step()
    assert growth["growth"].to_dict() == {0: 20, 1: 0}
    assert growth["peak"].to_dict() == {0: 850, 1: 150}


def test_live_lists_what_was_made_and_not_yet_released():
    run = small_run()
    assert run.live(run.peak)["nbytes"].tolist() == [700, 100, 50]
    assert run.live(-1)["category"].tolist() == ["parameter", "gradient"]
    with pytest.raises(IndexError, match="event 99"):
        run.live(99)


def test_rounding_raises_every_size_and_leaving_a_category_out_moves_the_start_with_it():
    run = small_run()
    assert run.rounded(512).peak_bytes == 512 + 1024 + 512
    bare = run.without("parameter")
    assert (bare.start_bytes, bare.peak_bytes) == (0, 750)
    assert (bare.info["end_event"], len(bare)) == (len(run) - 1, len(run) - 1)  # the weight was not released


def test_more_live_bytes_than_64_bits_can_say_are_refused_and_not_wrapped():
    recorder = Recorder()
    for _ in range(3):
        recorder.alloc(2**61)
    assert recorder.finish({}).peak_bytes == 3 * 2**61
    recorder.alloc(2**61)
    with pytest.raises(ValueError, match=r"more than 2\*\*63 - 1 bytes are live"):
        _ = recorder.finish({}).peak_bytes


def test_a_timeline_survives_parquet_with_everything_it_knows(tmp_path):
    run = small_run()
    run.to_parquet(tmp_path / "run.parquet")
    again = Timeline.from_parquet(tmp_path / "run.parquet")
    pd.testing.assert_frame_equal(again.frame(), run.frame())
    assert again.info == run.info
    assert again.peak_above_start == run.peak_above_start


def test_a_file_that_is_no_timeline_is_refused_by_name(tmp_path):
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"text\.parquet is not a Parquet file"):
        Timeline.from_parquet(tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="column 'step' is missing"):
        Timeline(pa.table({"nbytes": [1]}))
    with pytest.raises(FileNotFoundError):
        Timeline.from_parquet(tmp_path / "absent.parquet")


def test_an_empty_timeline_has_no_peak_and_no_rows():
    empty = Recorder().finish({})
    assert (len(empty), empty.peak, empty.peak_bytes, empty.start_bytes) == (0, -1, 0, 0)
    assert empty.by("category").empty
    assert empty.growth_per_step().empty


def test_unknown_columns_and_categories_are_named_in_the_error():
    with pytest.raises(ValueError, match="no column 'colour'"):
        small_run().by("colour")
    with pytest.raises(ValueError, match="no category 'weights'"):
        small_run().without("weights")


def test_the_categories_are_those_of_the_vocabulary():
    assert {*small_run().frame()["category"]} <= {*CATEGORIES}
