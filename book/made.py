"""Tables of the book's pages that are made from what the library knows, as Markdown, for `{made} NAME`."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd
import torch

import everybyte
from everybyte import gpus
from everybyte.audit import MEANING
from everybyte.units import GiB

LIBRARY = Path(everybyte.__file__).parent
SOURCE = re.compile(r"\b(?:ATen|c10|tools/autograd|torch/(?:csrc|optim|utils|cuda))/[\w/]+\.(?:cpp|cuh?|h|py|yaml)\b")
THREAD = re.compile(r"\b(?P<of>[\w.-]+/[\w.-]+)(?:#| issue | pull request )(?P<number>\d+)\b")
"""An issue or a pull request on GitHub, as "pytorch/pytorch#86509" or "pytorch/pytorch issue 95668"."""


def threads(text: str, link: str) -> str:
    """The text with a link, as "[{text}]({address})", in place of each issue and pull request that it names."""

    def linked(match: re.Match[str]) -> str:
        return link.format(text=match[0], address=f"https://github.com/{match['of']}/issues/{match['number']}")

    return THREAD.sub(linked, text)


def gpu_table() -> str:
    """The GPUs that have a name, a row each."""
    head = ["GPU", "`gpu=`", "capability", "processors", "memory, B", "left to PyTorch, GiB"]
    rows = [head, ["---"] * len(head)]
    for gpu in gpus.TABLE:
        least, most = (nbytes / GiB for nbytes in gpu.usable)
        rows.append(
            [
                gpu.name,
                f"`{gpu.key}`",
                "{}.{}".format(*gpu.capability),
                str(gpu.processors),
                f"{'≥ ' if gpu.precision else ''}{gpu.total:,}",
                f"{least:.2f} to {most:.2f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def gpu_sources() -> str:
    """Who reported each GPU's figures."""
    return "\n\n".join(f"`{gpu.key}`\n: {threads(gpu.source, '[{text}]({address})')}" for gpu in gpus.TABLE)


def verdicts() -> str:
    """The seven verdicts on a claim, and what each means."""
    rows = [f"| [{name}]{{.verdict .verdict-{name.replace(' ', '-')}}} | {text} |" for name, text in MEANING.items()]
    return "\n".join(["| verdict | means |", "|---|---|", *rows])


def pytorch_sources() -> str:
    """The files of PyTorch that the library's docstrings and comments name, and the modules that do."""
    named: dict[str, list[str]] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
        for file in sorted(set(SOURCE.findall(path.read_text(encoding="utf-8")))):
            named.setdefault(file, []).append(module)
    version = torch.__version__.partition("+")[0]
    rows = ["| file | named in |", "|---|---|"]
    for file in sorted(named):
        folder = "aten/src/" if file.startswith("ATen") else ""
        address = f"https://github.com/pytorch/pytorch/blob/v{version}/{folder}{file}"
        rows.append(f"| [`{file}`]({address}) | {', '.join(f'`{module}`' for module in named[file])} |")
    return "\n".join(rows)


def peers() -> str:
    """What each tool said of the 1.3B decoder, from the table that `benchmarks/peers.py` stores."""
    with Path(__file__).with_name("peers.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    eager, fused, plain = (int(answer["activations"]) for answer in answers[:3])
    rows = ["| tool | asked | activations, B | of the traced | in all, B |", "|---|---|--:|--:|--:|"]
    for answer in answers:
        asked = answer["setting"]
        traced = plain if "no dropout" in asked else fused if re.search("fused|Flash|sdpa", asked) else eager
        activations, total = (int(answer[name] or 0) for name in ("activations", "total"))
        cells = f"{activations:,}" if activations else "–", f"{activations / traced:.2f}" if activations else "–"
        whole = f"{total:,}" if total else "–"
        rows.append(f"| {answer['tool']} {answer['version']} | {asked} | {' | '.join(cells)} | {whole} |")
    return "\n".join([*rows, "", f"Asked on {answers[-1]['date']}."])


def coverage() -> str:
    """By family, how many architectures of transformers train, are traced, and are exact, and what does not hold."""
    table = _coverage()
    rows = ["| family | train | traced | peak exact | each event | by CUDA's rules |", "|---|--:|--:|--:|--:|--:|"]
    wanted = {"traced": True, "difference": 0, "equal, without scratch": True, "traced by CUDA's rules": True}
    trained = table[table["peak measured"].notna()]
    for name, of in [*trained.groupby("family"), ("all", trained)]:
        counts = [int((of[column] == value).sum()) for column, value in wanted.items()]
        rows.append(f"| {name} | {len(of)} | {' | '.join(map(str, counts))} |")
    tried = f"{len(table)} architectures have been tried so far, and {len(trained)} of them train."
    return "\n".join([tried, "", *rows])


def coverage_rows() -> str:
    """A row for each architecture that trains."""
    table = _coverage()
    rows = ["| architecture | parameters | peak, B | difference, B |", "|---|--:|--:|--:|"]
    for row in table[table["peak measured"].notna()].to_dict("records"):
        numbers = [row["parameters"], row["peak measured"], row["difference"]]
        cells = ["–" if number != number else f"{int(number):,}" for number in numbers]
        rows.append(f"| {row['architecture']} | {' | '.join(cells)} |")
    first = table.iloc[0]
    return "\n".join([*rows, "", f"transformers {first['transformers']}, PyTorch {first['torch']}."])


def coverage_causes() -> str:
    """A row for each architecture that does not train, is not traced, or whose two runs differ in an event."""
    causes = {row["architecture"]: _cause(row) for row in _coverage().to_dict("records")}
    rows = [f"| {name} | {cause} |" for name, cause in causes.items() if cause]
    return "\n".join(["| architecture | what fails, or differs first |", "|---|---|", *rows])


def _coverage() -> pd.DataFrame:
    return pd.read_parquet(Path(__file__).with_name("coverage.parquet"))


def _cause(row: dict[str, Any]) -> str:
    """What ended an architecture, or else the first event in which it differs, in a line that a table can hold.

    Set as a quotation, for the words of an error message are no terms of the book; files without their folders.
    """
    told = [row["cause"], row["first differing"], row["difference"] and row["first differing, with scratch"]]
    text = next((text for text in told if isinstance(text, str) and text), "")
    text = shorten(re.sub(r"\btransformers/(?:\w+/)*", "", text), 160, placeholder=" …")
    return text and "*" + re.sub(r"([\\|`<>*_$\[\]])", r"\\\1", text) + "*"
