"""Reports: that they say what the answer says, that every answer is as its schema, that no name in one can act."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import re
import xml.etree.ElementTree as ET
from contextlib import redirect_stdout
from html.parser import HTMLParser

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import timeline, timelines

from everybyte import Snapshot, Timeline, answers, figures, page, plain_pickle, schema, svg
from everybyte.allocator import Allocator
from everybyte.cli import main
from everybyte.markup import Markup, markup, tag
from everybyte.timeline import CATEGORIES, Recorder
from everybyte.units import MiB

SCHEMA = schema.read()
WHAT = "step", "phase", "op", "module", "line", "own"

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x):
        return self.blocks(x).square().mean()

def build():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.zeros(64, 256)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def large():
    return lambda kept=torch.empty(20 * 10**9, dtype=torch.uint8): None

def branches():
    weight = torch.randn(8)
    return lambda: weight.mul_(2) if weight.sum().item() > 0 else None

def lstm():
    layer = nn.LSTM(8, 8)
    def hostile():
        layer(torch.zeros(2, 3, 8))[0].sum().backward()
    return hostile
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("traced") / "train.py"
    path.write_text(SCRIPT)
    return path


def ask(*args):
    """The JSON that the command line prints."""
    with redirect_stdout(io.StringIO()) as out:
        main([*map(str, args), "--json"])
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def traced(script):
    """The answer of three steps of a small network."""
    return ask("trace", "--quick", f"{script}:build", "--gpu", "a4000")


@pytest.fixture
def recorded(tmp_path):
    """A function that writes events as a snapshot of a card of so many bytes, with hostile or harmless frames."""

    def recorded(*events, total=None, name="step", filename="train.py"):
        path = tmp_path / "snapshot.pickle"
        timeline(*events).to_snapshot(path, Allocator(total=total))
        data, _ = plain_pickle.load(path)
        for entry in data["device_traces"][0]:
            entry["frames"] = [{"name": name, "filename": filename, "line": 7}]
        path.write_bytes(pickle.dumps(data, 4))
        return path

    return recorded


class Reader(HTMLParser):
    """The elements and attributes of a page, the rows of its tables, and the text of its elements by name."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.texts, self.open = [], [], [], {}, []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *one) for one in attributes]
        if name not in ("meta", "wbr"):
            self.open.append(name)
        if name == "tr":
            self.rows.append([])
        if name in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, name):
        assert self.open.pop() == name, "an element is closed that is not the last opened"

    def handle_data(self, data):
        self.texts[self.open[-1] if self.open else ""] = self.texts.get(self.open[-1] if self.open else "", "") + data
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data


def closed(part):
    """The schema with every key that it does not describe refused."""
    if isinstance(part, list):
        return [closed(one) for one in part]
    if not isinstance(part, dict):
        return part
    more = {"additionalProperties": False} if "properties" in part and part.get("type") == "object" else {}
    return {key: closed(one) for key, one in part.items()} | more


def check(answer, which):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(answer, SCHEMA, jsonschema.Draft202012Validator)
    jsonschema.validate(answer, {**closed(SCHEMA)["$defs"][which], "$defs": closed(SCHEMA["$defs"])})


# -- the schema --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "gpu", "verdict"),
    [
        ("large", "t4", "does not fit"),
        ("branches", "a4000", "cannot say"),
    ],
)
def test_every_key_of_a_traced_answer_is_described_and_as_described(script, function, gpu, verdict):
    answer = ask("trace", "--quick", f"{script}:{function}", "--gpu", gpu)
    assert answer["verdict"] == verdict
    check(answer, "trace")


def test_an_answer_that_fits_is_as_described_too(traced):
    assert (traced["verdict"], traced["reason"]) == ("fits", None)
    check(traced, "trace")


@pytest.mark.parametrize("total", [None, 100 * MiB], ids=["fits", "runs out"])
def test_every_key_of_a_recorded_answer_is_described_and_as_described(recorded, total):
    path = recorded(30 * MiB, 60 * MiB, 30 * MiB, total=total)
    answer = ask("snapshot", path, "--what-if", "expandable_segments=1", "--what-if", "total=40MiB")
    assert bool(answer["out_of_memory"]) == (total is not None)
    check(answer, "snapshot")


def test_a_recording_of_nothing_is_as_described_and_has_a_report(tmp_path):
    path, out = tmp_path / "snapshot.pickle", tmp_path / "report.html"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}, 4))
    check(ask("snapshot", path, "--html", out), "snapshot")
    assert Reader(out.read_text(encoding="utf-8")).texts["h1"] == "peak 0 B"


LARGEST = {
    "batch_size": {"now": 8, "fits": 23, "bytes": 15_000_000_000, "next_bytes": 15_900_000_000, "next_reason": "x"},
    "sequence": {"now": 2048, "fits": 3000, "bytes": 15_100_000_000, "next_bytes": None, "next_reason": None},
}
LEVERS = [
    {
        "name": "checkpoint the blocks",
        "saves": 6_000_000_000,
        "peak_reserved": 9_000_000_000,
        "fits": True,
        "costs": "about a third more time",
        "edit": {"torch": "first line\nsecond <line>", "transformers": "gradient_checkpointing=True"},
    }
]


def test_what_fits_and_what_makes_it_smaller_stand_before_the_pictures(traced):
    answer = {**traced, "largest": LARGEST, "levers": LEVERS}
    check(answer, "trace")
    text = page.html(answer, timeline(512))
    read = Reader(text)
    assert ["batch size", "8", "23", "15,000,000,000", "15,900,000,000"] in read.rows
    assert ["sequence", "2,048", "3,000", "15,100,000,000", "–"] in read.rows
    assert ["checkpoint the blocks", "6.00 GB", "9.00 GB", "yes", "about a third more time"] in read.rows
    assert "first line\nsecond &lt;line&gt;</code></pre>" in text
    assert "Lightning" not in text
    assert (
        text.index("largest that fits") < text.index("What would make it smaller") < text.index("Memory over the run")
    )


# -- what a report says ------------------------------------------------------------------------------------------------


def test_a_traced_report_has_the_answer_s_numbers_and_the_answer_itself(script, tmp_path):
    out, kept = tmp_path / "report.html", tmp_path / "run.parquet"
    answer = ask("trace", "--quick", f"{script}:build", "--gpu", "a4000", "--html", out, "--parquet", kept)
    text = out.read_text(encoding="utf-8")
    read = Reader(text)
    assert read.open == []
    assert json.loads(read.texts["script"]) == answer
    assert read.texts["h1"] == "fits"
    assert answer["peak"]["line"] in "".join(read.texts["code"])
    rows = {row[0].strip(): row for row in read.rows}
    for row in answer["by_category"]:
        assert rows[row["category"]][-2:] == [f"{row['bytes']:,}", f"{row['storages']:,}"]
    for name in ("requested", "rounded", "allocated", "reserved"):
        assert rows[name][2] == f"{answer[f'peak_{name}']:,}"
    for row in answer["growth_per_step"]:
        assert rows[str(row["step"])] == [
            str(row["step"]),
            *(f"{row[k]:,}" for k in ("start", "peak", "end", "growth")),
        ]
    run = Timeline.from_parquet(kept)
    assert answer["left"]["at_least"] == answer["gpu"]["usable_at_least"] - answer["peak_reserved"]
    assert sum(row["bytes"] for row in answer["by_line"]) == run.peak_bytes
    saved = answer["saved_for_backward"]
    live = run.live(saved["event"])
    assert saved["bytes"] == live[live["category"] == "activation"]["nbytes"].sum() > 0
    assert sum(row["bytes"] for row in saved["rows"]) == saved["bytes"]


def test_a_report_of_a_recording_names_the_failed_request_and_who_asked(recorded, tmp_path):
    out = tmp_path / "report.html"
    path = recorded(30 * MiB, 60 * MiB, 30 * MiB, total=100 * MiB)
    answer = ask("snapshot", path, "--html", out)
    read = Reader(out.read_text(encoding="utf-8"))
    assert read.texts["h1"] == "ran out of memory"
    assert "31.5 MB were asked for" in read.texts["p"]
    assert "train.py:7" in read.texts["code"]
    assert json.loads(read.texts["script"]) == answer


def test_under_a_framework_a_recording_names_the_library_s_line_and_the_user_s_own(recorded, tmp_path, capsys):
    path, out = recorded(30 * MiB, 60 * MiB, 30 * MiB, total=100 * MiB), tmp_path / "report.html"
    data, _ = plain_pickle.load(path)
    site = "/opt/conda/lib/python3.11/site-packages"
    frames = [
        {"name": "linear", "filename": f"{site}/torch/nn/modules/linear.py", "line": 5},
        {"name": "forward", "filename": f"{site}/transformers/models/gpt2/modeling_gpt2.py", "line": 312},
        {"name": "train", "filename": f"{site}/transformers/trainer.py", "line": 99},
        {"name": "main", "filename": "/home/me/train.py", "line": 31},
    ]
    for entry in data["device_traces"][0]:
        entry["frames"] = frames
    path.write_bytes(pickle.dumps(data, 4))
    answer = ask("snapshot", path, "--html", out)
    line, own = "transformers/models/gpt2/modeling_gpt2.py:312", "/home/me/train.py:31"
    for row in (*answer["out_of_memory"], *answer["live_at_peak"]):
        assert (row["op"], row["line"], row["own"]) == ("linear", line, own)
    shown = "".join(Reader(out.read_text(encoding="utf-8")).texts["code"])
    assert line in shown and own in shown
    main(["snapshot", str(path)])
    assert f"asked for by linear at {line}, called from {own}, but" in capsys.readouterr().out


def test_a_timeline_written_as_a_recording_keeps_both_lines(tmp_path):
    recorder = Recorder()
    for line, own in (("net/layers.py:3", "train.py:9"), ("train.py:8", "train.py:8"), ("notebook:2", "notebook:2")):
        recorder.alloc(4096, op="linear", line=line, own=own, device="cuda:0")
    run = recorder.finish({})
    run.to_snapshot(tmp_path / "written.pickle")
    read = Snapshot.read(tmp_path / "written.pickle").timeline.frame()
    assert read[["line", "own"]].astype(str).equals(run.frame()[["line", "own"]].astype(str))


def test_what_is_saved_is_asked_for_where_most_of_it_is_if_none_is_at_the_peak():
    recorder = Recorder()
    recorder.begin_step(0)
    kept = [
        recorder.alloc(100, op="linear", module="blocks.0", line="a.py:1"),
        recorder.alloc(50, op="linear", module="blocks.1", line="a.py:1"),
    ]
    recorder.enter_phase(backward=True, optimizer=False, module="")
    for storage in kept:
        recorder.free(storage)
    recorder.enter_phase(backward=False, optimizer=True, module="")
    recorder.alloc(1_000, op="zeros_like")
    saved = answers.saved_for_backward(recorder.finish({"steps": 1}))
    assert (saved["event"], saved["at_peak"], saved["bytes"]) == (1, False, 150)
    made = {"op": "linear", "line": "a.py:1", "own": "", "module": "blocks.*"}
    assert saved["rows"] == [{**made, "bytes": 150, "storages": 2}]


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_the_height_of_a_life_is_its_bytes_and_its_highest_point_the_peak():
    run = timeline("a=1000000", "b=3000000", "-a", "c=500000", "-b", "-c")
    picture = ET.fromstring(svg.life(run, 960))
    (area,) = [path for path in picture.iter("path") if path.get("class") == "kind-temporary"]
    levels = [float(y) for y in re.findall(r"V([\d.]+)", area.get("d"))]
    zero = float(re.match(r"M[\d.]+ ([\d.]+)", area.get("d"))[1])
    scale = (zero - min(levels)) / run.peak_bytes
    live = [1_000_000, 4_000_000, 3_000_000, 3_500_000, 500_000, 0]
    assert [zero - level for level in levels] == pytest.approx([scale * nbytes for nbytes in [*live, 0]], abs=0.11)
    assert "peak 4.00 MB" in "".join(picture.itertext())


def test_the_boxes_of_a_peak_are_as_wide_as_their_bytes():
    recorder = Recorder()
    for module, size in {"a.x": 100, "a.y": 300, "b": 400}.items():
        recorder.label(recorder.alloc(size, module=module), "parameter")
    picture = ET.fromstring(svg.icicle(recorder.finish({}), 800))
    wide = {group.find("title").text: float(group.find("rect").get("width")) for group in picture.iter("g")}
    assert wide["peak, 800 B"] == 800
    assert (wide["a, 400 B"], wide["b, 400 B"], wide["x, 100 B"], wide["y, 300 B"]) == (400, 400, 100, 300)


def test_a_card_is_drawn_to_scale_and_what_a_process_cannot_have_of_it_too():
    picture = ET.fromstring(svg.card({"kind-parameter": 30, "kind-rest": 20}, (80, 90), 100, 1000))
    found = {rect.get("class"): (float(rect.get("x")), float(rect.get("width"))) for rect in picture.iter("rect")}
    assert found == {"room": (0, 1000), "kind-parameter": (0, 300), "kind-rest": (300, 200), "context": (800, 200)}


@settings(max_examples=10)
@given(timelines())
def test_any_run_is_drawn_in_well_formed_pictures_none_of_which_leaves_its_frame(run):
    if not run.peak_bytes:
        return
    for picture in (svg.life(run, 360), svg.life(run, 960, limit=run.peak_bytes), svg.icicle(run, 360)):
        drawn = ET.fromstring(picture)
        width = float(drawn.get("viewBox").split()[2])
        for path in drawn.iter("path"):
            across = [float(x) for x in re.findall(r"[MH]([-\d.]+)", path.get("d"))]
            assert all(0 <= x <= width for x in across)
        for rect in drawn.iter("rect"):
            assert float(rect.get("x")) >= 0
            assert float(rect.get("x")) + float(rect.get("width")) <= width + 0.2


def test_the_lines_of_a_recording_are_its_series_and_sum_to_what_is_live(recorded):
    run = Snapshot.read(recorded(4 * MiB, 512, "-0", 3 * MiB)).timeline.on("cuda:0")
    curves = svg.series(run)
    assert list(curves) == ["train.py:7"]
    assert np.array_equal(sum(curve for _, curve in curves.values()), run.live_bytes)


def test_every_category_has_a_colour_in_the_page():
    style = page.style()
    assert all(f".{svg.CLASSES[figures.COLOURS[kind]]} " in style for kind in CATEGORIES)


# -- hostile names -----------------------------------------------------------------------------------------------------

HOSTILE = {
    "an image": "<img src=x onerror=alert(1)>",
    "a script": "</script><script>alert(2)</script>",
    "an attribute": '" onmouseover="alert(3)" x="',
    "a comment": "<!--<script>",
    "a style": "</style><style>*{background:url(http://127.0.0.1:9/x)}</style>",
    "an escape": "\x1b[2J\x1b]0;owned\x07",
    "backwards": "\u202egnp.exe\u2066",
    "half": "\ud800",
    "breaks": "a\nb\r\0c",
    "huge": "x" * 10**5,
}
ELEMENTS = set(
    re.findall(
        r"\w+",
        "html head meta title style body main header footer p h1 h2 h3 code span wbr small strong dl div dt dd table "
        "thead tbody tr th td ul li figure svg desc path line text tspan rect g details summary pre script",
    )
)


def assert_nothing_acts(text):
    read = Reader(text)
    assert read.open == [], "an element stays open"
    assert set(read.tags) <= ELEMENTS
    assert not [one for one in read.attributes if one[1].startswith("on") or one[1] in ("href", "src", "style")]
    assert read.tags.count("script") == 1
    assert ("script", "type", "application/json") in read.attributes
    assert all(c.isprintable() for c in text.replace("\n", "")), "a character that acts on a terminal or on writing"
    (policy,) = (
        value for name, key, value in read.attributes if (name, key) == ("meta", "content") and "default" in value
    )
    digest = base64.b64encode(hashlib.sha256(read.texts["style"].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return read


def hostile_answers(traced, recorded, name):
    """A traced and a recorded answer, with their runs, in which every name that a user can choose is `name`."""
    recorder = Recorder()
    recorder.begin_step(0)
    for category in CATEGORIES:
        encoded = name.encode("utf-8", "replace").decode()  # a timeline takes nothing else
        made = recorder.alloc(10**6, op=encoded, module=f"a.{encoded}", line=encoded, own=f"{encoded}:1")
        recorder.label(made, category)
    run = recorder.finish({"steps": 1})
    traced = dict(traced)
    for key in ("module", "op", "line"):
        traced[f"by_{key}"] = answers.by(run, key)
    traced |= {"function": name, "peak": answers.moment(run, run.peak, *WHAT)}
    traced |= {"saved_for_backward": answers.saved_for_backward(run), "remarks": [name], "conditional": [name]}
    traced |= {"reason": name, "largest": {name: LARGEST["sequence"]}}
    traced["levers"] = [{**LEVERS[0], "name": name, "costs": name, "edit": {"torch": name}}]
    path = recorded(30 * MiB, 60 * MiB, 30 * MiB, total=100 * MiB, name=name, filename=name)
    return {
        "traced": (traced, run),
        "recorded": (ask("snapshot", path) | {"file": name}, Snapshot.read(path).timeline.on("cuda:0")),
    }


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_no_name_can_make_a_page_do_or_fetch_anything(traced, recorded, name):
    for answer, run in hostile_answers(traced, recorded, name).values():
        read = assert_nothing_acts(page.html(answer, run))
        assert json.loads(read.texts["script"]) == answer


@settings(max_examples=50)
@given(st.text(), st.text())
def test_text_stays_text_in_elements_and_in_attributes(inside, attribute):
    read = Reader(tag("p", inside, title=attribute))
    assert read.tags == ["p"]
    shown = Reader(Markup(f"<p>{markup(inside)}</p>")).texts.get("p", "")
    assert shown.isprintable()
    assert [key for _, key, _ in read.attributes] == ["title"]


# -- the option --------------------------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_is_refused_in_one_line(script, recorded, tmp_path, capsys):
    for command in (["trace", "--quick", f"{script}:build"], ["snapshot", str(recorded(512))]):
        assert main([*command, "--html", str(tmp_path / "missing" / "x.html")]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"everybyte: .*cannot be written: there is no folder .*\n", err)
