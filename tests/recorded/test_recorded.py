"""What the book stores of the public recordings is what the recordings say, and a copy is told by its content."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import everybyte as eb
from everybyte import recorded

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "data"
STORED = pd.read_parquet(FOLDER / recorded.STORED)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.pickle"
    with eb.trace(rules="cuda") as run:
        x = torch.ones(300, 300)
        y = [x + 1, x * 2]
        del y
        x.sum()
    run.timeline.to_snapshot(path)
    return path


@pytest.mark.parametrize("name", recorded.SOURCES)
def test_the_stored_row_is_what_the_file_says(snapshots, name):
    row = STORED.loc[name].to_dict()
    assert recorded.summary(eb.Snapshot.read(snapshots / f"{name}.pickle")) == row
    assert row["digest"] == recorded.SOURCES[name].content
    assert not any(count for what, count in row.items() if what.endswith("_mismatches"))


def test_the_stored_layout_is_the_recorded_one(snapshots):
    drawn = recorded.fullest(eb.Snapshot.read(snapshots / f"{recorded.DRAWN}.pickle"))
    pd.testing.assert_frame_equal(drawn, pd.read_parquet(FOLDER / recorded.LAYOUT))


@pytest.mark.parametrize("name", [recorded.STORED, recorded.LAYOUT])
def test_stored_tables_are_the_ones_their_provenance_describes(name):
    entry = json.loads((FOLDER / "provenance.json").read_text())[name]
    assert entry["sha256"] == hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
    assert list(entry["sources"]) == list(recorded.SOURCES) == list(STORED.index)


def test_a_recording_is_told_by_its_events_and_blocks_and_not_by_its_stacks(own):
    snapshot = eb.Snapshot.read(own)
    events = list(snapshot.traces[0])
    named = [event._replace(frames=({"name": "f"},), time_us=1) for event in events]
    assert recorded.digest(replace(snapshot, traces={0: named})) == recorded.digest(snapshot)
    for field in ("address", "size", "stream"):
        moved = [events[0]._replace(**{field: getattr(events[0], field) + 512}), *events[1:]]
        assert recorded.digest(replace(snapshot, traces={0: moved})) != recorded.digest(snapshot)
    assert recorded.digest(replace(snapshot, segments=snapshot.segments[1:])) != recorded.digest(snapshot)


def test_the_fullest_moment_holds_what_is_live_then(own):
    drawn = recorded.fullest(eb.Snapshot.read(own))
    assert drawn["requested"].tolist() == [360_000] * 3
    assert drawn["offset"].tolist() == [0, 360_448, 720_896]  # each rounded to 512 B
    assert set(drawn["reserved"]) == {2 * 2**20}


def test_the_recordings_of_a_folder_go_by_their_names(own, tmp_path):
    assert list(recorded.in_folder(own.parent)) == ["own"]
    assert recorded.in_folder(None) == {}
    with pytest.raises(ValueError, match="EVERYBYTE_SNAPSHOTS"):
        recorded.in_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"attention-small is not in .*: get mem_snapshot\.pickle from https:"):
        recorded.make(own.parent, tmp_path)
