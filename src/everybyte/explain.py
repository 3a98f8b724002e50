"""What kind of out-of-memory error a message reports, from the message alone: which of six causes, by arithmetic.

PyTorch's allocator prints what it asked of the driver, what the GPU has, and what the process holds
(`c10/cuda/CUDACachingAllocator.cpp`, `malloc` and `reportProcessMemoryInfo`; `c10/xpu` likewise). A cause is what would
have let the request through had it been gone, but only where it is a twentieth of the GPU or more: else the next
request fails all the same. Sizes are printed with two decimals (`format_size`), so each stands for an interval; where
its ends lead to different answers, the answer is that the message cannot say.

The patterns and the sentences are in `messages.toml`. The book's page `explain` has them, too, and its script follows
the functions here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import product
from typing import Any, Final

from . import gpus
from .gpus import CONTEXT, GPU
from .units import GiB, KiB, MiB

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    resources.files("everybyte").joinpath("messages.toml").read_text(encoding="utf-8")
)
KINDS: Final[dict[str, str]] = _TABLES["kinds"]
"""Each kind, in a few words."""

SHARE: Final = 20  # a cause is worth one part in so many of the GPU at least: less than that left is "tight"
UNKNOWN: Final = 2**44  # where NVML does not know what a process holds it says 2**64 - 1 (Windows, WSL)
LONGEST: Final = 4_000  # characters of a message, without blanks; the longest lists tens of processes

_PATTERNS: Final = _TABLES["patterns"]


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("{size}", _PATTERNS["size"]), re.ASCII)


_STARTS: Final = {form: _pattern(text) for form, text in _TABLES["starts"].items()}
_OTHERS: Final = [(kind, who, _pattern(text)) for kind, who, text in _TABLES["messages"]["others"]]
_LAST: Final = [(kind, who, _pattern(text)) for kind, who, text in _TABLES["messages"]["last"]]
_FIELDS: Final = {name: _pattern(text) for name, text in _TABLES["fields"].items()}
_PROCESS: Final = _pattern(_PATTERNS["process"])
_PREFIX: Final = re.compile(_PATTERNS["prefix"], re.MULTILINE | re.ASCII)
_SUFFIX: Final = re.compile(_PATTERNS["suffix"], re.MULTILINE | re.ASCII)
_ESCAPES: Final = re.compile(_PATTERNS["escapes"])
_INDEX, _ALLOC_CONF = (re.compile(_PATTERNS[name], re.ASCII) for name in ("index", "settings"))
_LABELS, _MISSING, _WHY, _NEXT, _SMI = (_TABLES[name] for name in ("labels", "missing", "why", "next", "smi"))

_UNITS: Final = {"bytes": 1, "K": KiB, "M": MiB, "G": GiB}
_WIDTHS: Final = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
_SETTINGS: Final = "PYTORCH_CUDA_ALLOC_CONF"  # every version reads it
_KIND_OF: Final = {
    "largest": "one tensor",
    "full": "demand",
    "limit": "smaller card",
    "unified": "outside the allocator",
    "unexplained": "cannot say",
}
_WEAKER: Final = ("full", "largest")  # of two reasons of one kind the one that claims less


@dataclass(frozen=True)
class Size:
    """A count of bytes that lies between two, both included; `text` is how the message has it, if it does."""

    least: int
    most: int
    text: str = field(default="", compare=False)

    @classmethod
    def said(cls, number: str, unit: str) -> Size:
        """What PyTorch printed so, to as many decimals."""
        width = _UNITS[unit if unit == "bytes" else unit[0]]
        whole, _, decimals = number.partition(".")
        twice, scale = 2 * int(whole + decimals) * width, 2 * 10 ** len(decimals)
        if width == 1:
            return cls(int(whole), int(whole), f"{number} {unit}")
        return cls(max(0, -((width - twice) // scale)), (twice + width) // scale, f"{number} {unit}")

    def __add__(self, other: Size) -> Size:
        return Size(self.least + other.least, self.most + other.most)

    def __sub__(self, other: Size) -> Size:
        """The difference, or 0: what is there is not negative."""
        return Size(max(0, self.least - other.most), max(0, self.most - other.least))

    def __str__(self) -> str:
        """As the message has it, or both ends, rounded outwards as it writes sizes."""
        if self.text:
            return self.text
        width, unit = next((pair for pair in _WIDTHS if self.most >= pair[0]), (1, "bytes"))
        if width == 1:
            return f"{self.least} to {self.most} bytes" if self.least < self.most else f"{self.most} bytes"
        least, most = (f"{n // 100}.{n % 100:02}" for n in (self.least * 100 // width, -(-self.most * 100 // width)))
        return f"{least} to {most} {unit}" if least != most else f"{most} {unit}"

    @classmethod
    def exactly(cls, nbytes: int) -> Size:
        """A size that is known, to two decimals."""
        return cls(nbytes, nbytes, str(cls(nbytes, nbytes)) if nbytes < KiB else _rounded(nbytes))


def _rounded(nbytes: int) -> str:
    width, unit = next(pair for pair in _WIDTHS if nbytes >= pair[0])
    hundredths = (nbytes * 200 + width) // (2 * width)
    return f"{hundredths // 100}.{hundredths % 100:02} {unit}"


NONE: Final = Size(0, 0, "0 bytes")


@dataclass(frozen=True)
class Explanation:
    """What a message says, and what follows. Made by `explain`.

    Attributes:
        kind: One of `KINDS`.
        possible: The kinds that the figures leave open, where `kind` is "cannot say".
        device: "CUDA", "HIP", "XPU", "NPU" or "MPS"; "" where it is the host.
        index: Which of them, if the message says so.
        sizes: What the message says, and what follows from it: what `others` hold, and this process `outside` the
            allocator; `unknown` where nobody says whose it is.
        gpus: Keys of the GPUs that report so much memory.
        rows: Labels and sizes, to be shown.
        why: Sentences.
        next: Steps, commands and advice; behind two blanks and a "#" stands what a command is for.
        more: How many messages follow this one, the first.
    """

    kind: str
    possible: tuple[str, ...]
    device: str
    index: int | None
    sizes: Mapping[str, Size]
    gpus: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    why: tuple[str, ...]
    next: tuple[str, ...]
    more: int


def explain(text: str, gpu: GPU | str | None = None) -> Explanation | None:
    """Explains the first out-of-memory message in a text; None if it has none that is known.

        >>> log = "CUDA out of memory. Tried to allocate 36.70 GiB. GPU 0 has a total capacity of 15.89 GiB of which "
        >>> found = eb.explain(log + "14.94 GiB is free.")
        >>> found.kind, found.sizes["total"].least
        ('one tensor', 17056388875)

    Args:
        text: A log, or part of one: colours, prefixes of ranks and broken lines are seen through.
        gpu: The GPU that was thought to be there; the one that the log names before the message unless given.

    Raises:
        ValueError: If no GPU is called so.
    """
    thought = None if gpu is None else gpus.find(gpu)
    plain = compact(text)
    found = _starts(plain)
    if not found:
        return None
    (at, form), more = found[0], len(found) - 1
    end = found[1][0] if more else len(plain)
    section, before = plain[at : min(end, at + LONGEST)], plain[max(0, at - 100_000) : at]
    if form not in _STARTS:
        return _of_a_library(section, int(form), more)
    return _of_an_allocator(Message.read(section, before, form), thought or _named(before), more)


def compact(text: str) -> str:
    """A log without colours, frames, prefixes and blanks, so that it reads alike however its lines were broken."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    return "".join(_PREFIX.sub("", _SUFFIX.sub("", text.replace("\r", "\n"))).split())


def _starts(plain: str) -> list[tuple[int, str]]:
    """Where messages begin, in order, each with its form: a key of `_STARTS`, or a number in `_OTHERS` and `_LAST`."""
    others = [(str(number), pattern) for number, (_, _, pattern) in enumerate(_OTHERS + _LAST)]
    for forms in ([*_STARTS.items(), *others[: len(_OTHERS)]], others[len(_OTHERS) :]):
        if found := [(match.start(), form) for form, pattern in forms for match in pattern.finditer(plain)]:
            return sorted(found)
    return []


def _named(before: str) -> GPU | None:
    """The GPU that a log names, if it names one."""
    names = {"".join(row.name.split()): row for row in gpus.TABLE}
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = set(re.findall(longest_first, before))
    return names[found.pop()] if len(found) == 1 else None


def _of_a_library(section: str, number: int, more: int) -> Explanation:
    kind, who, pattern = (_OTHERS + _LAST)[number]
    asked = next(iter(pattern.match(section).groups()), None)
    sizes = {"tried": Size.exactly(int(asked))} if asked else {}
    device = "" if kind == "host memory" else "HIP" if "HIP" in who else "CUDA"
    why = _WHY["host" if kind == "host memory" else "library"].format(who=who[0].upper() + who[1:])
    words = {"smi": _SMI.get(device, ""), "gpu": " --gpu NAME", "pids": "", "settings": _SETTINGS}
    rows = tuple((_LABELS[name], str(size)) for name, size in sizes.items())
    return Explanation(kind, (), device, None, sizes, (), rows, (why,), _steps(kind, words), more)


@dataclass(frozen=True)
class Message:
    """What a message of an allocator says.

    Attributes:
        form: "caching", "async" or "unified", by who writes it.
        device: As `Explanation` has it.
        index: As `Explanation` has it.
        sizes: By name, as far as they are known to whoever wrote the message.
        processes: Those that it lists, but for this one: number and size.
        settings: The environment variable for settings of the allocator.
    """

    form: str
    device: str
    index: int | None
    sizes: Mapping[str, Size]
    processes: tuple[tuple[str, Size], ...]
    settings: str

    @classmethod
    def read(cls, section: str, before: str, form: str) -> Message:
        """Reads a message without blanks; the device stands before its start."""
        sizes = {}
        for name, pattern in _FIELDS.items():
            if match := pattern.search(section):
                sizes[name] = Size.said(*(group for group in match.groups() if group))
        sizes = {name: size for name, size in sizes.items() if size.most < UNKNOWN}
        if form == "unified" and {"total", "allocated", "other"} <= sizes.keys():
            sizes["this"], sizes["unallocated"] = sizes["allocated"] + sizes.pop("other"), NONE
            sizes["free"] = sizes["total"] - sizes["this"]
        if {"allocated", "reserved"} <= sizes.keys():
            sizes["unallocated"] = sizes.pop("reserved") - sizes["allocated"]
        device = "MPS" if form == "unified" else next((name for name in _SMI if before.endswith(name)), "CUDA")
        index = next((group for match in _INDEX.finditer(section) for group in match.groups() if group), None)
        settings = _ALLOC_CONF.search(section)
        return cls(
            form=form,
            device=device,
            index=None if index is None else int(index) if index.isdecimal() else ord(index),
            sizes=sizes,
            processes=tuple((pid, Size.said(*size)) for pid, *size in _PROCESS.findall(section)),
            settings=settings[0] if settings else _SETTINGS,
        )

    @cached_property
    def own(self) -> Size | None:
        """What this process holds of the GPU, if the message tells.

        In a container a process does not know its own number and stands in the list under another: it is the only one
        that can hold what the allocator has. Where NVML may not look it says 0.
        """
        own, reserved = self.sizes.get("this"), self._allocated + self._unallocated
        if own is not None:
            return own if own.most >= reserved.least else None
        able = [size for size in self._known if size.most >= reserved.least]
        alone = len(able) == 1 and "allocated" in self.sizes and able[0].most <= reserved.least + CONTEXT[1]
        return able[0] if alone else None

    @cached_property
    def state(self) -> dict[str, Size]:
        """All that decides, by the names that `reason` has; what is not said is the range that it can be in."""
        sizes, reserved = self.sizes, self._allocated + self._unallocated
        most = max((size.most for size in self._known), default=self._used.most)
        state = {"tried": sizes["tried"], "total": sizes["total"], "free": self._free}
        state |= {"allocated": self._allocated, "unallocated": self._unallocated}
        state |= {"private": sizes.get("private", NONE)}
        state |= {"own": self.own or Size(reserved.least, max(reserved.least, most))}
        return state | ({"allowed": sizes["allowed"]} if "allowed" in sizes else {})

    @cached_property
    def derived(self) -> dict[str, Size]:
        """Whose the rest is, or how much it is if nobody says whose."""
        if not {"free", "allocated", "unallocated"} <= self.sizes.keys():
            return {}
        rest, reserved = self._used, self._allocated + self._unallocated
        if self.own is None:
            return {"unknown": rest - reserved}
        return {"outside": self.own - reserved, "others": rest - self.own}

    @property
    def _known(self) -> list[Size]:
        return [size for _, size in self.processes if size.most < UNKNOWN]

    @cached_property
    def _free(self) -> Size:
        return self.sizes.get("free", Size(0, self.sizes["total"].most))

    @cached_property
    def _used(self) -> Size:
        return self.sizes["total"] - self._free

    @cached_property
    def _allocated(self) -> Size:
        return self.sizes.get("allocated", Size(0, self._used.most))

    @cached_property
    def _unallocated(self) -> Size:
        known = self.sizes.get("allocated", NONE)
        return self.sizes.get("unallocated", Size(0, (self._used - known).most))


def reason(x: Mapping[str, int], form: str = "caching", thought: GPU | None = None) -> tuple[str, ...]:
    """Why a request failed, if all figures are known: the first cause, and those that it takes together with it.

    A cause is what would have let the request through, had it been gone; the one that holds most comes first.

    Args:
        x: Bytes: `tried`, of the GPU `total` and `free`, of this process `own`, of its allocator `allocated`,
            `unallocated` and `private` (which counts as allocated), and `allowed` where it has a limit.
        form: Whose message it is, as in `Message`.
        thought: The GPU that was thought to be there.

    Returns:
        Keys of the sentences in `messages.toml`.
    """
    tried, total, free, private = (x[name] for name in ("tried", "total", "free", "private"))
    reserved, context = x["allocated"] + x["unallocated"], (0, 0) if form == "unified" else CONTEXT
    own = max(x["own"], reserved)  # ends of two ranges need not go together
    whole = max(total, thought.total if thought else 0)
    if tried > whole - context[0]:
        return ("one tensor",)
    counted = x["allocated"] if form == "async" else reserved  # against the limit
    limited = "allowed" in x and free >= tried and counted + tried > x["allowed"]
    left = max(0, x["allowed"] - counted) if limited else free
    if not limited and free >= tried:
        if free * SHARE >= total:
            return ("unexplained",)
        left = 0  # refused, whatever the driver says
    holders = {"fragmentation": x["unallocated"], "private pools": private}
    if limited:
        holders["limit"] = free - left
    else:
        holders["another process"] = total - free - own
        holders["unified" if form == "unified" else "outside the allocator"] = own - reserved - context[1]
        holders["smaller card"] = whole - total
    causes: list[str] = []
    could = left + sum(max(0, nbytes) for nbytes in holders.values())
    for name in sorted(holders, key=holders.get, reverse=True):
        if left < tried and holders[name] * SHARE >= total:
            left += holders[name]
            causes.append(name)
    if left >= tried:
        return tuple(causes)
    if max(could, free + x["unallocated"]) >= tried:
        return ("full",)
    return ("largest",) if tried > x["allocated"] - private else ("demand",)


def _of_an_allocator(message: Message, thought: GPU | None, more: int) -> Explanation:
    sizes, reasons = {**message.sizes}, {("unexplained",)}
    if decided := {"tried", "total"} <= sizes.keys():
        sizes |= message.derived
        total = message.state["total"]
        thought = thought if thought and (thought.total - total.most) * SHARE >= total.most else None
        reasons = set(_corners(message, thought))
    kinds = {_KIND_OF.get(first, first) for first, *_ in reasons}
    kinds = kinds - {"cannot say"} or kinds  # what was refused has a cause
    (kind,) = kinds if len(kinds) == 1 else ("cannot say",)
    possible = tuple(name for name in KINDS if name in kinds - {"cannot say"}) if kind == "cannot say" else ()
    # Of two reasons of one kind, the one that claims less.
    fitting = [found for found in reasons if _KIND_OF.get(found[0], found[0]) == kind]
    chosen = max(fitting, key=lambda found: (found[0] in _WEAKER, len(found), found), default=("open",))
    near = _near(sizes["total"]) if "total" in sizes and message.device == "CUDA" else []
    pids = [pid for pid, size in message.processes if size != message.own][:8]
    steps = "async" if message.form == "async" and kind == "cannot say" else kind  # it cannot be recorded
    words = {
        "smi": _SMI[message.device],
        "settings": message.settings,
        "gpu": f" --gpu {near[0].key if len(near) == 1 else 'NAME'}",
        "pids": f": process {', '.join(pids)}" if pids else "",
    }
    shown = {**sizes}
    if "allocated" in sizes:
        shown["live"] = sizes["allocated"] - sizes["private"] if "private" in sizes else sizes["allocated"]
    rows = {label: str(shown[name]) for name, label in _LABELS.items() if name in shown}
    if near:
        rows[_LABELS["total"]] += f" ({', '.join(gpu.key for gpu in near)})"
    return Explanation(
        kind=kind,
        possible=possible,
        device=message.device,
        index=message.index,
        sizes=sizes,
        gpus=tuple(gpu.key for gpu in near),
        rows=tuple(rows.items()),
        why=tuple(_why(message, chosen, possible, thought, shown) if decided else (_missing(sizes),)),
        next=(*_steps(steps, words), *(_steps("full", words) if chosen == ("full",) else ())),
        more=more,
    )


def _corners(message: Message, thought: GPU | None) -> Iterator[tuple[str, ...]]:
    """The reason at every corner of what the rounded figures allow.

    What this process does not hold others do, so of its range those places count, too, where either comes to matter, or
    to hold more than something else does.
    """
    state = dict(message.state)
    refused = state["free"].least < state["tried"].most
    own = state.pop("own")
    for corner in product(*({size.least, size.most} for size in state.values())):
        x = dict(zip(state, corner, strict=True))
        beyond, used = x["allocated"] + x["unallocated"] + CONTEXT[1], x["total"] - x["free"]
        lacking = x["tried"] - x["free"]
        borders = {0, x["total"] // SHARE, x["unallocated"], x["private"], lacking}
        borders |= {lacking - x["unallocated"], lacking - x["private"]}
        within = {place for border in borders for place in (beyond + border, used - border, used - border + 1)}
        within |= {(used + beyond) // 2}
        for x["own"] in {own.least, own.most} | {place for place in within if own.least < place < own.most}:
            found = reason(x, message.form, thought)
            if found == ("unexplained",) and refused:  # by rounding alone more is free than was asked for
                found = reason({**x, "free": x["tried"] - 1}, message.form, thought)
            yield found


def _near(total: Size) -> list[GPU]:
    """GPUs that report so much memory; where none does just that, those within 3 %, as drivers differ."""
    exact = [gpu for gpu in gpus.TABLE if total.least <= gpu.total + gpu.precision and gpu.total <= total.most]
    return exact or [gpu for gpu in gpus.TABLE if abs(gpu.total - total.most) * 100 <= 3 * gpu.total]


def _why(
    message: Message, chosen: tuple[str, ...], possible: tuple[str, ...], thought: GPU | None, shown: Mapping[str, Size]
) -> Iterator[str]:
    state, limited = message.state, chosen[0] == "limit"
    counted = state["allocated"] if message.form == "async" else state["allocated"] + state["unallocated"]
    room = state["allowed"] - counted if "allowed" in state else NONE
    words = {name: str(size) for name, size in {**state, **shown}.items()} | {
        "left": f"{room} left of its limit" if limited else f"{state['free']} free",
        "room": str(room),
        "sum": str(state["free"] + state["unallocated"]),
        "live": str(shown.get("live", state["allocated"])),
        "others": str(state["total"] - state["free"] - state["own"]),
        "outside": str(state["own"] - state["allocated"] - state["unallocated"]),
        "context": str(Size.exactly(CONTEXT[1])),
        "name": thought.name if thought else "",
        "wanted": str(Size.exactly(thought.total)) if thought else "",
        "possible": " or ".join(possible),
        "more": " and ".join(_KIND_OF.get(name, name) for name in chosen[1:]),
    }
    yield _WHY[chosen[0]].format(**words)
    if chosen[1:]:
        yield _WHY["together"].format(**words)
    if chosen[0] in ("open", "unexplained"):
        if "unknown" in shown:
            yield _WHY["whose"].format(**words)
        if lacking := _missing(message.sizes):
            yield lacking
    if state["allocated"].least > state["total"].most:
        yield _WHY["lent"]
    if message.form == "caching" and words["tried"] in ("2.00 MiB", "20.00 MiB"):
        yield _WHY["segment"]


def _missing(sizes: Mapping[str, Size]) -> str:
    names = [text for name, text in _MISSING.items() if name not in sizes]
    return _WHY["missing"].format(missing=", ".join(names)) if names else ""


def _steps(kind: str, words: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(step.format(**words) for step in _NEXT[kind])
