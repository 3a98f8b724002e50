"""`everybyte snapshot FILE`: what a recording from a GPU says, and what other settings would have done to it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import page
from ..account import Account
from . import BAD_INPUT, Answer, Stop, new_file, written


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of `everybyte snapshot`."""
    parser = commands.add_parser(
        "snapshot",
        help="explain a memory snapshot recorded on a GPU",
        description="What was live at the peak of a recorded run and whose it was, how far memory was fragmented, and "
        "what other settings of the allocator would have reserved. FILE is never trusted: nothing in it is run.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    parser.add_argument("--device", type=int, metavar="N", help="which GPU; the one with most events unless given")
    parser.add_argument(
        "--what-if",
        action="append",
        type=_settings,
        metavar="SETTING=VALUE[,...]",
        help="other settings of PYTORCH_CUDA_ALLOC_CONF, or total=16GiB; may be given several times",
    )
    parser.add_argument(
        "--html", type=new_file, metavar="OUT", help="write a report, one file that opens in any browser"
    )
    parser.set_defaults(command=_answer)
    return parser


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


def _divisions(text: str) -> int | dict[str, int]:
    if not text.startswith("["):
        return int(text)
    pairs = [entry.split(":") for entry in text[1:-1].split(",")]
    return {start.strip(): int(steps) for start, steps in pairs}


_SETTINGS: Final[Mapping[str, Callable[[str], Any]]] = {
    "expandable_segments": _switch,
    "max_split_size_mb": int,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": float,
    "per_process_memory_fraction": float,
    "max_non_split_rounding_mb": int,
    "large_segment_size_mb": int,
    "total": str,
    "gpu": str,
}


def _settings(text: str) -> dict[str, Any]:
    """Settings as `PYTORCH_CUDA_ALLOC_CONF` has them, with "=" or ":" between name and value."""
    settings = {}
    for entry in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) or [text]:
        name, _, value = re.sub(r"^(\w+):", r"\1=", entry.strip()).partition("=")
        if name not in _SETTINGS:
            raise argparse.ArgumentTypeError(f"no setting {name!r}; there are {', '.join(_SETTINGS)}")
        try:
            settings[name] = _SETTINGS[name](value)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{name} cannot be {value!r}") from None
    return settings


def _answer(args: argparse.Namespace) -> Answer:
    try:
        account = Account.read(args.file, args.device, args.what_if or ())
    except (ValueError, TypeError, OSError) as error:
        message = f"{args.file}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise Stop(BAD_INPUT, message) from None
    written(args.html, lambda path: path.write_text(page.html(account.answer, account.timeline), encoding="utf-8"))
    return account.answer, account.lines(), None
