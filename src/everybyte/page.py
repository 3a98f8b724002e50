"""A run's report as one HTML file, which asks for nothing: no script, no network, no file beside it.

It is made of an answer, the JSON object of `everybyte trace --json` or `everybyte snapshot --json` that
`answer.schema.json` describes, and of the run's timeline, and opens with what matters most. Names in it come from
anywhere: each is escaped where it enters the page (`markup`), and the page forbids its reader's browser all but its own
style.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final

from . import answers, figures, otherwise, svg
from .account import replayed
from .allocator import Fragmentation, OutOfMemory
from .figures import amount, shortened
from .markup import Markup, join, tag
from .names import alike
from .places import led_there
from .timeline import Timeline
from .units import format_bytes

WIDTHS: Final = {"wide": 960, "narrow": 360}  # px that pictures are drawn for
MOST: Final = 12  # rows of a table
LONGEST: Final = 160  # letters of a name
_OUTSIDE: Final = "(outside any module)"
_KEPT: Final = ("torch", "plain PyTorch"), ("transformers", "Hugging Face"), ("lightning", "Lightning")
_HELPS: Final = {
    "demand": "The tensors themselves do not fit: make the batch smaller, recompute activations, or use a larger card.",
    "fragmentation": "What is free lies in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    "limit": "The driver still had memory, and the process was refused it: raise its limit, such as "
    "torch.cuda.set_per_process_memory_fraction.",
}
_TONES: Final = {"fits": "good", "tight": "unsure", "does not fit": "wrong", "cannot say": "unsure"}


def html(answer: Mapping[str, Any], timeline: Timeline) -> str:
    """The report of a traced or a recorded run.

    Args:
        answer: What `everybyte trace --json` or `everybyte snapshot --json` prints.
        timeline: The run that it is of, on one device.
    """
    sections = _of_trace(answer, timeline) if "verdict" in answer else _of_recording(answer, timeline)
    title, *body = sections
    rules = style()
    allowed = f"default-src 'none'; style-src 'sha256-{_digest(rules)}'; base-uri 'none'; form-action 'none'"
    data = json.dumps(answer, allow_nan=False).replace("<", "\\u003c")
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="referrer" content="no-referrer">'),
        tag("title", title),
        tag("style", Markup(rules)),
    )
    foot = tag(
        "footer",
        tag(
            "p",
            "Made by Every Byte. Sizes are bytes; GB is 10⁹, MB 10⁶. ",
            "This page loads nothing and sends nothing.",
        ),
        tag("script", Markup(data), type="application/json", id="answer"),
    )
    page = tag("html", tag("head", head), tag("body", tag("main", *body), foot), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def style() -> str:
    """The page's style, with the colours of `figures`."""
    colours = {svg.CLASSES[colour]: colour for colour in figures.COLOURS.values()}
    colours |= {f"group-{i}": colour for i, colour in enumerate(figures.GROUPS)}
    rules = [
        f".{kind}, .{kind} rect {{ fill: {colour}; }} .{kind} text {{ fill: {figures.ink(colour)}; }}"
        for kind, colour in colours.items()
    ]
    dark = {"kind-buffer": "#a3a9ae", "kind-workspace": "#e8edf1", "kind-parameter": "#3b97d3"}
    night = [
        f".{kind}, .{kind} rect {{ fill: {colour}; }} .{kind} text {{ fill: black; }}" for kind, colour in dark.items()
    ]
    plain = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join([plain, *rules, "@media screen and (prefers-color-scheme: dark) {", *night, "}"])


def _digest(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


# -- a traced run ------------------------------------------------------------------------------------------------------


def _of_trace(answer: Mapping[str, Any], timeline: Timeline) -> Iterator[Markup]:
    gpu, peak, verdict = answer["gpu"], answer["peak"], answer["verdict"]
    extent = answers.extent(answer)
    yield join(f"{verdict}: {answer['function']} on {gpu['name']}")
    yield tag(
        "header",
        tag("p", _name(answer["function"]), f" on {gpu['name']}, {extent} ", _chip("traced"), class_="about"),
        tag("h1", verdict, class_=_TONES.get(verdict)),
        tag("p", *_left(answer), class_="lead"),
        *_reason(answer),
        _card(answer),
        _facts(
            {
                "line of the code at the peak": _lines(peak),
                "module": _name(peak["module"], _OUTSIDE),
                "operation": join(_name(peak["op"]), tag("small", _when(peak))),
                "peak reserved": _size(answer["peak_reserved"]),
            }
        ),
    )
    yield from _largest(answer.get("largest"))
    yield from _levers(answer.get("levers"))
    yield from _life(timeline, gpu["usable_at_least"])
    if timeline.peak_bytes:
        yield tag("h2", "The peak by module")
        yield tag(
            "p",
            "Each module stands under the one it is in, as wide as its bytes; the lowest row says what they are for.",
        )
        yield _pictures(svg.icicle, timeline)
    yield _holders("module", answer["by_module"], _OUTSIDE)
    yield tag("h2", "The peak by category and by operation")
    yield _holders("category", answer["by_category"])
    yield _holders("op", answer["by_op"])
    yield from _saved(answer["saved_for_backward"])
    yield from _growth(answer["growth_per_step"])
    yield tag("h2", "What is counted")
    yield _peaks(answer)
    yield tag("p", f"When most is reserved: {Fragmentation(**answer['fragmentation'])}.")
    yield from _notes(
        {
            "Not covered by any rule": answer["not_covered"],
            "Decided by values that no trace knows": answer["conditional"],
            "Traced with other values": otherwise.notes(answer.get("worlds", ())),
            "Left out": answer["left_out"],
            "Workspaces, counted in allocated and reserved": [
                f"{format_bytes(w['nbytes'])}: {w['library']}, {w['thread']}, since {w['op']} at {w['line']}"
                for w in answer["workspaces"]
            ],
            "Worth knowing": answer["remarks"],
        }
    )


def _reason(answer: Mapping[str, Any]) -> Iterator[Markup]:
    if answer["verdict"] in ("cannot say", "tight"):
        yield tag("p", answer["reason"])
    elif answer["reason"]:
        yield tag("details", tag("summary", "The request that fails"), tag("p", answer["reason"]))


def _left(answer: Mapping[str, Any]) -> Iterator[object]:
    least, most = answer["left"]["at_least"], answer["left"]["at_most"]
    needs = amount(answer["needs"])
    if least >= 0:
        yield join(f"It needs {needs} at its fullest; {_range(least, most)} are left on the card.")
    elif most < 0:
        yield join(
            f"It needs {needs} at its fullest, ",
            tag("strong", f"{_range(-most, -least)} more"),
            " than the card leaves a process.",
        )
    else:
        yield join(
            f"It needs {needs} at its fullest. What a CUDA context takes decides: ",
            f"{amount(most)} may be left, or {amount(-least)} lack.",
        )


def _range(least: int, most: int) -> str:
    """Two amounts, the unit once where it is the same."""
    low, high = amount(least), amount(most)
    if low == high:
        return low
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def _card(answer: Mapping[str, Any]) -> Markup:
    """The card's memory, and what is reserved of it."""
    held = {row["category"]: row["bytes"] for row in answer["by_category"]}
    held = {kind: held[kind] for kind in figures.COLOURS if kind in held}
    classes = {kind: svg.CLASSES[figures.COLOURS[kind]] for kind in held}
    rest = "workspaces, rounding and what is cached"
    held[rest], classes[rest] = max(0, answer["peak_reserved"] - sum(held.values())), "kind-rest"
    gpu = answer["gpu"]
    usable = gpu["usable_at_least"], gpu["usable_at_most"]
    parts = {classes[kind]: nbytes for kind, nbytes in held.items()}
    drawn = _pictures(lambda width: svg.card(parts, usable, gpu["total"], width))
    return join(drawn, _legend((classes[kind], f"{kind} {amount(nbytes)}") for kind, nbytes in held.items() if nbytes))


def _largest(largest: Mapping[str, Any] | None) -> Iterator[Markup]:
    if not largest:
        return
    yield tag("h2", "The largest that fits")
    rows = [
        (
            name.replace("_", " "),
            _number(one["now"]),
            _number(one["fits"]),
            _exact(one["bytes"]),
            _exact(one["next_bytes"]),
        )
        for name, one in largest.items()
    ]
    yield _table(("", "now", "largest that fits", "bytes reserved with it", "with one more"), rows)


def _levers(levers: Sequence[Mapping[str, Any]] | None) -> Iterator[Markup]:
    if not levers:
        return
    yield tag("h2", "What would make it smaller")
    yield tag("p", "Each was traced again, alone. The one that saves most comes first.")
    rows = [
        (
            one["name"],
            amount(one["saves"]),
            amount(one["peak_reserved"]),
            "yes" if one["fits"] else "no",
            one["costs"] or "–",
        )
        for one in levers
    ]
    yield _table(("edit", "saves", "reserved with it", "fits", "costs"), rows, text=(4,))
    for one in levers:
        edits = [
            join(tag("h3", where), tag("pre", tag("code", join(*one["edit"][key].split("\n"), between="\n"))))
            for key, where in _KEPT
            if one["edit"].get(key)
        ]
        if edits:
            yield tag("details", tag("summary", f"{one['name']}: what to write"), *edits)


# -- a recorded run ----------------------------------------------------------------------------------------------------


def _of_recording(answer: Mapping[str, Any], timeline: Timeline) -> Iterator[Markup]:
    recorded, live = answer["recorded"], answer["live_at_peak"]
    failures = answer["out_of_memory"]
    watched = answer.get("run", {})
    what = watched.get("script", answer["file"])
    reserved = amount(recorded["peak_reserved"])
    headline = "ran out of memory" if failures else f"peak {amount(recorded['peak_allocated'])}"
    yield join(f"{headline}: {what}")
    largest = live[0] if live else {"line": "", "own": "", "op": "", "bytes": 0}
    facts = {
        "peak allocated": _size(recorded["peak_allocated"]),
        "peak reserved": _size(recorded["peak_reserved"]),
        "line that holds most at the peak": join(
            _lines(largest), tag("small", f"{largest['op']} {amount(largest['bytes'])}")
        ),
    }
    if failures:
        failed = failures[-1]
        facts = {"line that asked": join(_lines(failed), tag("small", failed["op"]))} | facts
    yield tag(
        "header",
        tag(
            "p",
            _name(what),
            f", GPU {answer['device']}, {answer['events']:,} events ",
            _chip("recorded"),
            class_="about",
        ),
        tag("h1", headline, class_="wrong" if failures else None),
        *(_failure(failures[-1]) if failures else [tag("p", f"{reserved} were reserved for it.", class_="lead")]),
        *([tag("p", f"Before it, {len(failures) - 1:,} other requests failed.")] if len(failures) > 1 else []),
        *_watched(watched),
        _facts(facts),
    )
    yield from _life(timeline, failures[-1]["reserved"] + failures[-1]["free"] if failures else None)
    yield tag("h2", "Live at the peak, by function and line")
    yield _table(
        ("line", "function", "size", "share", "bytes", "allocations"),
        _with_shares((_lines(r, _no_stack(r)), _name(r["op"]), r["bytes"], r["allocations"]) for r in live),
        text=(1,),
    )
    yield tag("h2", "Other settings of the allocator")
    yield tag("p", f"{replayed(answer.get('room'))}:")
    rows = []
    for replay in (answer["replayed"], *answer["what_if"]):
        settings = ", ".join(f"{name}={value}" for name, value in replay["settings"].items()) or "the recording's own"
        failure = replay["out_of_memory"]
        rows.append(
            (
                tag("code", settings),
                amount(replay["peak_reserved"]),
                amount(replay["peak_allocated"]),
                f"yes, {failure['cause']}" if failure else "no",
            )
        )
    yield _table(("settings", "reserved", "allocated", "out of memory"), rows)
    yield tag("h2", "What is counted")
    yield _peaks(recorded)
    if answer["fragmentation"]:
        yield tag("p", f"When most was reserved: {Fragmentation(**answer['fragmentation'])}.")
    exact = answer["allocations"] - answer["address_mismatches"]
    notes = [f"{exact:,} of {answer['allocations']:,} allocations lie where the allocator's rules put them."]
    yield from _notes({"How far the rules agree": [*notes, *answer["left_out"], *answer["as_recorded"]]})


def _no_stack(row: Mapping[str, Any]) -> str:
    return f"(no stack recorded, {row['bytes'] // row['allocations']:,} B each)"


def _watched(run: Mapping[str, Any]) -> Iterator[Markup]:
    """What was seen of the process beside the recording."""
    if not run:
        return
    kept = "from its first use of the GPU on" if run["whole"] else f"of its latest {run['most_events']:,} events"
    yield tag("p", "The program ended ", _ended(run["ended"]), f"; the history is {kept}.")
    for gpu in run["gpus"]:
        yield tag(
            "p",
            f"Over the whole run {gpu['name']}, of {amount(gpu['total'])}, had at most ",
            f"{amount(gpu['peak_allocated'])} allocated and {amount(gpu['peak_reserved'])} reserved.",
        )
    yield tag("p", f"Snapshots and reports took {run['seconds']:.1f} s of its time.", class_="about")


def _ended(how: str) -> object:
    return how if how == "without an error" else join("with ", tag("code", how))


def _failure(failed: Mapping[str, Any]) -> Iterator[Markup]:
    """The request that failed: in short, what would help, and all of it."""
    room = amount(failed["reserved"] + failed["free"])
    held = f"{amount(failed['requested'])} were asked for when {amount(failed['allocated'])} of {room} were allocated: "
    yield tag("p", held, tag("strong", failed["cause"]), ".", class_="lead")
    yield tag("p", _HELPS[failed["cause"]])
    yield tag("details", tag("summary", "The request that failed"), tag("p", f"{OutOfMemory(**failed)}."))


# -- parts of both -----------------------------------------------------------------------------------------------------


def _life(timeline: Timeline, limit: int | None) -> Iterator[Markup]:
    if not timeline.peak_bytes:
        return
    yield tag("h2", "Memory over the run")
    yield _pictures(svg.life, timeline, limit=limit)
    yield _legend(
        (kind, f"{shortened(name or 'other lines', LONGEST)} {amount(int(curve[timeline.peak]))}")
        for name, (kind, curve) in svg.series(timeline).items()
        if curve.max() >= timeline.peak_bytes / 1000
    )
    yield tag(
        "p",
        "Bytes asked for, in the order of allocations and releases; below, how much of each is live at the peak.",
        class_="about",
    )


def _pictures(draw: Any, *args: Any, **more: Any) -> Markup:
    return join(*(tag("figure", draw(*args, width=width, **more), class_=name) for name, width in WIDTHS.items()))


def _holders(key: str, rows: Sequence[Mapping[str, Any]], unnamed: str = "–") -> Markup:
    found = [(row["bytes"], row["storages"], row[key]) for row in rows]
    found = found if len(found) <= MOST else alike(found)
    named = "operation" if key == "op" else key
    cells = [
        (
            join(svg.swatch(svg.CLASSES[figures.COLOURS[name]]), " ", name)
            if key == "category"
            else _name(name, unnamed),
            nbytes,
            count,
        )
        for nbytes, count, name in found
    ]
    return _table((named, "size", "share", "bytes", "storages"), _with_shares(cells))


def _saved(saved: Mapping[str, Any]) -> Iterator[Markup]:
    yield tag("h2", "Saved for backward")
    if not saved["rows"]:
        yield tag("p", "Nothing that a forward pass made is kept for a backward pass.")
        return
    when = "at the peak" if saved["at_peak"] else f"when most is saved ({_when(saved)}; at the peak it is less)"
    yield tag(
        "p",
        f"{format_bytes(saved['bytes'])} made by forward passes are kept for backward {when}, by operation and line.",
    )
    rows = [
        (
            _name(row["op"]),
            _lines(row),
            _name(row["module"]),
            row["bytes"],
            row["storages"],
        )
        for row in saved["rows"]
    ]
    yield _table(("operation", "line", "module", "size", "share", "bytes", "storages"), _with_shares(rows), text=(1, 2))


def _growth(rows: Sequence[Mapping[str, Any]]) -> Iterator[Markup]:
    if not rows:
        return
    yield tag("h2", "Growth per step")
    yield tag("p", "A first step may leave the optimizer's state behind. What later steps leave behind is a leak.")
    cells = [(str(row["step"]), *(_exact(row[key]) for key in ("start", "peak", "end", "growth"))) for row in rows]
    yield _table(("step", "live at its start", "its peak", "live at its end", "growth, bytes"), cells)


def _peaks(figures: Mapping[str, int]) -> Markup:
    meanings = {
        "requested": "what was asked for",
        "rounded": "each request rounded to 512 B",
        "allocated": "whole blocks, as torch.cuda.max_memory_allocated reports",
        "reserved": "segments, as torch.cuda.max_memory_reserved reports",
    }
    rows = [
        (name, amount(figures[f"peak_{name}"]), _exact(figures[f"peak_{name}"]), text)
        for name, text in meanings.items()
    ]
    return _table(("peak", "size", "bytes", "counts"), rows, text=(3,))


def _notes(notes: Mapping[str, Sequence[str]]) -> Iterator[Markup]:
    for title, texts in notes.items():
        if texts:
            yield tag("h3", title)
            yield tag("ul", *(tag("li", text) for text in texts), class_="notes")


def _with_shares(rows: Iterable[tuple[Any, ...]], most: int = MOST) -> list[tuple[Any, ...]]:
    """Rows that end with bytes and a number, largest first, with the share of each; those beyond `most` as one."""
    rows = sorted(rows, key=lambda row: -row[-2])
    if len(rows) > most:
        rest = rows[most - 1 :]
        blank = [""] * (len(rest[0]) - 3)
        rows = [
            *rows[: most - 1],
            (f"{len(rest):,} others", *blank, sum(r[-2] for r in rest), sum(r[-1] for r in rest)),
        ]
    total = sum(row[-2] for row in rows) or 1
    return [
        (
            *names,
            amount(nbytes),
            join(svg.bar(nbytes / total), tag("span", f"{nbytes / total:.1%}", class_="share")),
            _exact(nbytes),
            _number(count),
        )
        for *names, nbytes, count in rows
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], text: Sequence[int] = ()) -> Markup:
    def cells(row: Sequence[Any]) -> Iterator[Markup]:
        yield tag("th", row[0], scope="row")
        for i, cell in enumerate(row[1:], 1):
            yield tag("td", cell, class_="text" if i in text else None)

    head = tag(
        "tr", *(tag("th", name, scope="col", class_="text" if i in text else None) for i, name in enumerate(columns))
    )
    body = tag("tbody", *(tag("tr", *cells(row)) for row in rows))
    return tag(
        "div",
        tag("table", tag("thead", head), body),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=f"by {columns[0]}" if columns[0] else "largest that fits",
    )


def _name(text: str, otherwise: str = "–") -> Markup:
    """A name of code, which may break after a dot, a dash and the like."""
    pieces = re.split(r"(?<=[./_:-])(?=[^./_:-])", shortened(text or otherwise, LONGEST))
    return tag("code", join(*pieces, between="<wbr>")) if text else tag("span", otherwise)


def _lines(row: Mapping[str, Any], otherwise: str = "–") -> Markup:
    """The line that asked for memory, and below it the user's own that led there, where that is another."""
    line = _name(row["line"], otherwise)
    return join(line, tag("small", "called from ", _name(row["own"]))) if led_there(row) else line


def _facts(facts: Mapping[str, Markup]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts")


def _legend(entries: Iterable[tuple[str, str]]) -> Markup:
    return tag("ul", *(tag("li", svg.swatch(kind), tag("span", text)) for kind, text in entries), class_="legend")


def _chip(evidence: str) -> Markup:
    return tag("span", evidence, class_="chip")


def _when(where: Mapping[str, Any]) -> str:
    return f"step {where['step']}, {where['phase']}" if where["step"] >= 0 else f"event {where['event']:,}"


def _size(nbytes: int) -> Markup:
    return join(amount(nbytes), tag("small", f"{nbytes:,} B"))


def _exact(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes:,}"


_number = _exact
