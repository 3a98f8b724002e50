"""Thousands of random programs, each really run and traced: `python tests/fuzz_programs.py --count 5000 --seed 1`.

Not part of `make test`. Programs run in processes of their own, some to each, so that one which brings down its process
is seen as such. What became of each is kept in a file, from which an interrupted run goes on. A program that differs is
shrunk to a few lines and printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from random_programs import numbered, outcome, shrunk, warm

RESULTS: Final = Path(__file__).resolve().parent.parent / "_build" / "programs"
TOGETHER: Final = 100
"""Programs to a process."""
SECONDS: Final = 60
"""For each program."""

USES: Final = {
    "a backward pass": r"backward\(|autograd\.grad\(",
    "an optimizer": r"torch\.optim\.",
    "several optimizers": r"optim\.[A-Z].*\n(.*\n)*?.*optim\.[A-Z]",
    "parameter groups": r'\{"params"',
    "double backward": r"create_graph=True",
    "gradient accumulation": r"for _ in range\(2\):\n(        .*\n)*.*backward\(",
    "a retained graph": r"retain_graph=True",
    "writing in place": r"\w_\(|\] = |\w [+*/-]= |inplace=True",
    "out=": r"out=",
    "indexing or scatter": r"index|scatter|gather|\[\[|torch\.tensor\(\[|take",
    "views": r"\[.*:.*\]|transpose|view|select|narrow|split|chunk|unbind|expand|permute|diagonal|\.mT|unfold|squeeze",
    "control flow": r"^ {8,}(for|if) ",
    "a function": r"def x?f\d",
    "checkpointing": r"checkpoint\(|checkpoint_sequential",
    "hooks": r"register_\w*hook|saved_tensors_hooks|retain_grad",
    "a custom autograd function": r"\.apply\(",
    "tied parameters": r"\.weight = ",
    "a no_grad island": r"no_grad\(\)",
    "autocast": r"autocast\(",
    "clipping": r"clip_grad",
    "forward-mode differentiation or vmap": r"torch\.func\.",
}
"""What programs are counted by: a name -> a pattern of their text."""


def became(seed: int, number: int) -> dict[str, Any]:
    """What became of a program; a difference must be there twice."""
    text = numbered(seed, number)
    found = outcome(text)
    if found.difference and not found.explained:
        found = outcome(text)
    uses = [name for name, pattern in USES.items() if re.search(pattern, text, re.MULTILINE)]
    return {
        "number": number,
        "ran": found.ran,
        "difference": found.difference,
        "explained": found.explained,
        "lines": text.count("\n"),
        "uses": uses,
    }


def in_a_process(seed: int, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """What became of these programs; the one during which the process ended, if it did, is the last."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        try:
            with os.fdopen(writable, "w") as rows:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                for number in numbers:
                    signal.alarm(SECONDS)
                    print(json.dumps(became(seed, number)), file=rows, flush=True)
                    if number % 25 == 0:
                        gc.collect()
        finally:
            os._exit(0)
    os.close(writable)
    left = list(numbers)
    with os.fdopen(readable) as rows:
        for row in rows:
            yield json.loads(row)
            left.pop(0)
    _, status = os.waitpid(child, 0)
    if left:
        why = f"the process ended by signal {status}"
        yield {"number": left[0], "ran": False, "difference": "", "explained": why, "lines": 0, "uses": []}


def run(seed: int, count: int, kept: Path) -> list[dict[str, Any]]:
    """What became of the first `count` programs; those that the file has are not run again."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["number"] for row in rows}
    left = [number for number in range(count) if number not in done]
    began, at = time.monotonic(), len(rows)
    with kept.open("a") as file:
        while left:
            for row in in_a_process(seed, left[:TOGETHER]):
                print(json.dumps(row), file=file, flush=True)
                rows.append(row)
                left.remove(row["number"])
                if row["difference"] and not row["explained"]:
                    print(f"\nprogram {row['number']} of seed {seed}: {row['difference']}", flush=True)
            rate = (len(rows) - at) / (time.monotonic() - began)
            print(f"\r{len(rows):,} of {count:,}, {rate:.1f} a second", end="", flush=True)
    print()
    return [row for row in rows if row["number"] < count]


def smallest(seed: int, number: int) -> str:
    """The program with as few lines as still differ in the same way."""

    def kind(difference: str) -> str:
        return re.sub(r"event \d+ of \d+|\d+", "", difference)

    text = numbered(seed, number)
    wanted = kind(outcome(text).difference)

    def still(fewer: str) -> bool:
        try:
            found = outcome(fewer)
        except SyntaxError:
            return False
        return bool(found.difference) and not found.explained and kind(found.difference) == wanted

    return shrunk(text, still)


def summary(rows: list[dict[str, Any]]) -> str:
    ran = [row for row in rows if row["ran"]]
    differ = [row for row in ran if row["difference"]]
    explained = [row for row in differ if row["explained"]]
    causes = Counter(re.split(r"[:(]", row["explained"])[0] for row in rows if not row["ran"])
    lines = [
        f"{len(rows):,} programs, of which run {len(ran):,}, lines each {sum(r['lines'] for r in ran) / len(ran):.0f}",
        f"not run: {', '.join(f'{cause} {n}' for cause, n in causes.most_common())}",
        f"equal, allocation by allocation: {len(ran) - len(differ):,}",
        f"not equal where the trace says so: {len(explained)} "
        f"({', '.join(f'{why} {n}' for why, n in Counter(row['explained'] for row in explained).most_common())})",
        f"not equal otherwise: {len(differ) - len(explained)}",
    ]
    used = Counter(name for row in ran for name in row["uses"])
    return "\n".join([*lines, *(f"{used[name] / len(ran):6.1%}  {name}" for name in USES)])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--count", type=int, default=5_000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--kept", type=Path, help="the file of what became of each")
    asked.add_argument("--show", type=int, nargs="*", default=[], help="numbers of programs to print, and no more")
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    if given.show:
        print("\n\n".join(numbered(given.seed, number) for number in given.show))
        return
    warm()
    began = time.monotonic()
    rows = run(given.seed, given.count, given.kept or RESULTS / f"seed-{given.seed}.jsonl")
    print(f"{summary(rows)}\n{time.monotonic() - began:.0f} s")
    seen: set[str] = set()
    for row in rows:
        if row["difference"] and not row["explained"]:
            kind = re.sub(r"event \d+ of \d+|\d+", "", row["difference"])
            print(f"\n# program {row['number']}: {row['difference']}")
            if kind not in seen:
                print(smallest(given.seed, row["number"]), flush=True)
            seen.add(kind)


if __name__ == "__main__":
    main()
