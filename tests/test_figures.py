"""Figures: that a height, a width and an area are the bytes, and that no run is too strange to be drawn."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex, to_rgb

from everybyte import Timeline, figures, saved, trace
from everybyte.timeline import CATEGORIES, SCHEMA, Recorder


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def timeline(*events: tuple[int, str, str]) -> Timeline:
    """A run that allocates (bytes > 0) with a category and a module, and releases what event -n allocated."""
    recorder, storages = Recorder(), []
    for size, category, module in events:
        if size < 0:
            recorder.free(storages[-size - 1])
            continue
        storages.append(recorder.alloc(size, module=module, op="made"))
        recorder.label(storages[-1], category)
    return recorder.finish({})


def stacks(ax) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The events that are drawn, and of each category the height of its area at each of them."""
    heights, events = {}, None
    for area in ax.collections:
        name = area.get_label().removeprefix("_")
        if name not in figures.COLOURS:
            continue
        (path,) = area.get_paths()
        points = path.vertices[1 : len(path.vertices) // 2]  # there on the lower line, back on the upper
        back = path.vertices[-2 : len(path.vertices) // 2 : -1]  # the last closes it
        both = {}
        for (x, low), (_, high) in zip(points, back, strict=True):
            both[int(x)] = high - low  # of the two points at a step the later
        events = np.array(list(both))[:-1]
        heights[name] = np.array(list(both.values()))[:-1]
    return events, heights


def boxes(ax) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(x=p.get_x(), y=p.get_y(), width=p.get_width(), height=p.get_height(), colour=p.get_facecolor())
        for p in ax.patches
    ]


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 10**13),
        st.sampled_from(CATEGORIES),
        st.sampled_from(["", "head", "blocks.0.mlp", "blocks.1.mlp", "blocks.1", "a.b.c.d"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=20)
@given(EVENTS, st.lists(st.integers(1, 12), unique=True))
def test_the_heights_of_a_life_are_the_live_bytes_of_each_category_after_each_event(events, released):
    run = timeline(*events, *((-n, "", "") for n in released if n <= len(events)))
    ax = figures.life(run)
    drawn, heights = stacks(ax)
    assert drawn.tolist() == list(range(len(run)))
    assert (sum(heights.values()) == run.live_bytes).all()
    for kind, height in heights.items():
        assert int(height[run.peak]) == run.by("category")["nbytes"].get(kind, 0)
    (marker,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (run.peak, run.peak_bytes)
    plt.close("all")


def test_a_life_of_seventy_thousand_events_keeps_its_peak_though_that_lasts_for_one_of_them():
    recorder = Recorder()
    for number in range(35_000):
        storage = recorder.alloc(1_000_000 if number == 20_011 else number % 7)
        recorder.free(storage)
    run = recorder.finish({})
    ax = figures.life(run)
    drawn, heights = stacks(ax)
    assert len(run) == 70_000 and len(drawn) <= 6_000
    total = sum(heights.values())
    assert drawn[total.argmax()] == run.peak == 40_022 and total.max() == 1_000_000
    assert (total == run.live_bytes[drawn]).all()


def test_a_life_names_its_peak_and_the_passes_and_ends_with_the_last_step():
    recorder = Recorder()
    recorder.label(recorder.alloc(5_000), "parameter")
    recorder.label(recorder.alloc(5), "buffer")
    recorder.label(recorder.alloc(6), "input")
    recorder.begin_step(0)
    storage = recorder.alloc(489)
    recorder.enter_phase(backward=True, optimizer=False, module="")
    recorder.free(recorder.alloc(500, op="square", module="net"))
    recorder.free(storage)
    recorder.begin_step(1, over=True)
    for storage in range(3):
        recorder.free(storage)
    ax = figures.life(recorder.finish({}))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "input",
        "temporary",
        "activation",
        "parameter",
    ]
    assert ax.get_xlim() == (3, 7)
    texts = [text.get_text() for text in ax.texts]
    assert "peak 6,000 B\nstep 0, backward\nsquare in net" in texts and {"forward", "backward"} <= {*texts}


def test_a_peak_before_the_steps_is_drawn_and_one_outside_the_asked_for_events_is_not_marked_elsewhere():
    recorder = Recorder()
    recorder.free(recorder.alloc(9_000, op="load"))
    recorder.begin_step(0)
    recorder.free(recorder.alloc(10))
    run = recorder.finish({})
    ax = figures.life(run)
    assert ax.get_xlim()[0] == 0 and "peak 9,000 B\nother, before the steps\nload" in [t.get_text() for t in ax.texts]
    assert not figures.life(run, start=2).lines


@pytest.mark.parametrize("run", [(), ((0, "input", ""),), ((0, "input", "a"), (0, "buffer", "b")), ((7, "input", ""),)])
def test_nothing_and_next_to_nothing_can_be_drawn(run):
    run = timeline(*run)
    for draw in figures.life, figures.icicle:
        draw(run).figure.draw_without_rendering()
    figures.overview(run).draw_without_rendering()


def test_modules_that_are_no_text_and_names_without_end_are_drawn():
    import pyarrow as pa

    rows = [dict.fromkeys(SCHEMA.names) | {"action": "alloc", "storage": n, "nbytes": 5, "step": -1} for n in (0, 1)]
    rows[0] |= {"category": "input"}
    rows[1] |= {"module": "x" * 3_000, "op": "y" * 3_000, "category": "temporary", "phase": "other"}
    run = Timeline(pa.Table.from_pylist(rows, SCHEMA))
    for draw in figures.life, figures.icicle:
        ax = draw(run)
        ax.figure.draw_without_rendering()
        assert max(len(line) for text in ax.texts for line in text.get_text().split("\n")) < 150


def test_every_row_of_an_icicle_is_as_wide_as_the_peak_and_its_modules_as_wide_as_their_bytes():
    run = timeline(
        (600, "parameter", "blocks.0.mlp.up"),
        (300, "activation", "blocks.1.mlp.up"),
        (250, "activation", "blocks.1.mlp"),
        (50, "gradient", "blocks.1"),
        (400, "activation", "head"),
        (100, "optimizer state", ""),
    )
    ax = figures.icicle(run)
    drawn = boxes(ax)
    assert ax.get_xlim() == (0, run.peak_bytes) and run.peak_bytes == 1_700
    for row in range(5):
        crossing = sorted((b.x, b.width) for b in drawn if b.y <= row + 0.5 < b.y + b.height)
        assert sum(width for _, width in crossing) == 1_700
        assert all(x + width == after for (x, width), (after, _) in itertools.pairwise(crossing))
    texts = {text.get_text() for text in ax.texts}
    assert {"peak\n1,700 B", "2 × blocks\n1,200 B", "mlp\n1,150 B", "up\n900 B", "itself\n250 B"} <= texts
    of_kind = {kind: sum(b.width for b in drawn if b.y == 0 and b.colour[:3] == to_rgb(figures.COLOURS[kind]))
               for kind in CATEGORIES}  # fmt: skip
    assert {kind: n for kind, n in of_kind.items() if n} == run.by("category")["nbytes"].to_dict()
    one_by_one = {text.get_text() for text in figures.icicle(run, numbered=True).texts}
    assert {"blocks\n1,200 B", "0\n600 B", "1\n600 B"} <= one_by_one


def test_thousands_of_modules_are_one_beside_the_large_ones():
    run = timeline((10**6, "activation", "large"), *((10, "activation", f"m{n}.part") for n in range(3_000)))
    ax = figures.icicle(run)
    assert "other, 3,000 modules" in {text.get_text() for text in ax.texts}
    assert len(ax.patches) < 10
    assert sum(b.width for b in boxes(ax) if b.y == 0) == run.peak_bytes


def test_the_areas_of_saved_tensors_are_their_bytes_and_fill_the_drawing():
    layer, wide = torch.nn.Linear(48, 96), torch.nn.Linear(96, 480)
    kept = saved(lambda: wide(layer(torch.ones(7, 48)).relu()).sigmoid())
    ax = figures.tensors(kept)
    areas = sorted(b.width * b.height for b in boxes(ax))
    assert areas == pytest.approx(sorted(row["nbytes"] for row in kept.rows), rel=1e-12)
    assert ax.get_xlim()[1] * ax.get_ylim()[1] == pytest.approx(kept.total_bytes, rel=1e-12)
    grouped = figures.tensors(kept, group=lambda row: "all")
    assert [t.get_text() for t in grouped.get_legend().get_texts()] == [f"all, {kept.total_bytes:,} B"]


def test_what_keeps_nothing_is_drawn_as_nothing():
    x = torch.ones(3, requires_grad=True)
    assert figures.tensors(saved(lambda: x + 1)).texts[0].get_text() == "nothing is kept"


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60), st.floats(0.1, 10))
def test_rectangles_have_their_areas_and_neither_overlap_nor_leave_the_whole(areas, shape):
    areas = sorted(areas, reverse=True)
    width, height = (sum(areas) * shape) ** 0.5, (sum(areas) / shape) ** 0.5
    cut = list(figures._squares(areas, 0.0, 0.0, width, height))
    assert [w * h for _, _, w, h in cut] == pytest.approx(areas, rel=1e-6)
    for x, y, w, h in cut:
        assert x >= 0 and y >= 0 and x + w <= width * (1 + 1e-9) and y + h <= height * (1 + 1e-9)
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(cut, 2):
        over = min(x + w, x2 + w2) - max(x, x2), min(y + h, y2 + h2) - max(y, y2)
        assert min(over) <= 1e-6 * max(width, height)


def test_lives_draws_each_run_to_its_own_peak_over_the_same_progress():
    runs = {}
    for n in 1_000, 3_000:
        with trace(rules="cpu") as run:
            for _ in run.steps(2):
                torch.ones(n).square()
        runs[f"{n} numbers"] = run.timeline
    ax = figures.lives(runs, plt.figure().gca())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(runs)
    assert [line.get_ydata().max() for line in ax.lines] == [8_000, 24_000]
    assert all(line.get_xdata()[[0, -1]].tolist() == [0, 1] for line in ax.lines)
    assert len({line.get_linestyle() for line in ax.lines}) == 2


def test_the_pieces_of_each_bar_are_what_is_live_at_that_peak():
    runs = {
        "one": timeline((700, "parameter", ""), (20, "activation", "")),
        "two": timeline((5, "activation", ""), (60, "scratch", ""), (-2, "", ""), (7, "buffer", "")),
    }
    ax = figures.peaks(runs)
    drawn = {(round(b.y + b.height / 2), to_hex(b.colour)): b.width for b in boxes(ax) if b.width}
    wanted = {(0, "parameter"): 700, (0, "activation"): 20, (1, "activation"): 5, (1, "scratch"): 60}
    assert drawn == {(row, figures.COLOURS[kind].lower()): nbytes for (row, kind), nbytes in wanted.items()}


# -- colours -----------------------------------------------------------------------------------------------------------

SIGHT = {  # Machado, Oliveira and Fernandes (2009), severity 1: of linear RGB what someone sees
    "trichromat": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}  # fmt: skip
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65), in which a distance of 2.3 can just be noticed."""
    x, y, z = (XYZ @ np.clip(light, 0, 1)) / XYZ.sum(axis=1)
    f = [t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("colours", [[*figures.COLOURS.values()], figures.GROUPS], ids=["categories", "groups"])
def test_no_two_colours_are_alike_to_the_colour_blind(sight, colours):
    seen = [lab(SIGHT[sight] @ linear(colour)) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 4 * 2.3


@pytest.mark.parametrize("colour", [*figures.COLOURS.values(), *figures.GROUPS, "white"])
def test_text_on_every_colour_can_be_read(colour):
    luminance = sorted(XYZ[1] @ linear(c) + 0.05 for c in (colour, figures.ink(colour)))
    assert luminance[1] / luminance[0] >= 4.5
