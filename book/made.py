"""Tables of the book's pages that are made from what the library knows, as Markdown, for `{made} NAME`."""

from __future__ import annotations

import csv
import re
from html import escape
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
    of_all = [f"{counts[i] / len(trained):.0%} {what}" for i, what in enumerate(("are traced", "have an exact peak"))]
    plain = (trained["scratch that differs"] == "").sum()
    told = (
        f"{len(table)} architectures were tried, and {len(trained)} of them train; of these {' and '.join(of_all)}. In "
        f"{plain} of the {counts[0]} traced, what kernels take for themselves is the same, too, size by size."
    )
    return "\n".join([told, "", *rows, "", _made_by(table)])


def _made_by(table: pd.DataFrame) -> str:
    versions = [", ".join(sorted(table[name].dropna().unique())) for name in ("transformers", "torch", "machine")]
    seconds = [table[f"seconds {how}"].median() for how in ("measured", "traced")]
    return (
        f"With transformers {versions[0]} and PyTorch {versions[1]}, on {versions[2]}, where other programs ran, too: "
        f"half of the runs took less than {seconds[0]:.1f} s measured, and {seconds[1]:.1f} s traced."
    )


def coverage_by_cuda() -> str:
    """How what is live at the peak by CUDA's rules compares with a closed form, where that is in AdamW's step."""
    table = _coverage()
    table = table[table["phase of CUDA's peak"] == "optimizer"]
    weights, gradients, moments = (
        table[f"{kind}s by CUDA's rules"] for kind in ("parameter", "gradient", "optimizer state")
    )
    counts = {
        "the peak lies in AdamW's step": len(table),
        "there, weights are 4 B a parameter": (weights == 4 * table["parameters"]).sum(),
        "gradients are as large as the weights": (gradients == weights).sum(),
        "moments are twice the gradients": (moments == 2 * gradients).sum(),
    }
    return "\n".join(
        ["| by CUDA's rules | architectures |", "|---|--:|", *(f"| {k} | {n} |" for k, n in counts.items())]
    )


def coverage_rows() -> str:
    """A row for each architecture: what was measured, what CUDA's rules say, how the two runs on the CPU compare."""
    names = ("architecture", "measured", "by CUDA's rules", "result")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return "\n".join(
        [
            "```{raw} html",
            '<table class="table claims" data-things="architectures" data-kind="Result" data-usual="each event exact" '
            'data-example="vision, mamba, convolution">',
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *(_coverage_row(row) for row in _coverage().to_dict("records")),
            "</tbody>",
            "</table>",
            "```",
        ]
    )


_RESULTS = {
    "each event exact": "holds",
    "peak exact": "holds",
    "peak differs": "arithmetic-slip",
    "not traced": "arithmetic-slip",
    "does not train": "cannot-be-known",
}
"""What came of an architecture, and the verdict whose colour it has."""


def _coverage_row(row: dict[str, Any]) -> str:
    name = row["architecture"]
    if row["peak measured"] != row["peak measured"]:
        result = "does not train"
    elif row["traced"] != 1:
        result = "not traced"
    elif row["difference"] != 0:
        result = "peak differs"
    else:
        result = "each event exact" if row["equal, without scratch"] else "peak exact"
    about = escape(row["model"])
    if row["parameters"] == row["parameters"]:
        about += f", {row['family']}, {int(row['parameters']):,} parameters"
    first = f'<th scope="row">{name} <small>{about}</small></th>'
    told = _cause(row)
    if row["scratch that differs"] and isinstance(row["scratch that differs"], str):
        told = f"{told} <small>scratch: {escape(shorten(row['scratch that differs'], 160, placeholder=' …'))}</small>"
    chip = f'<span class="verdict verdict-{_RESULTS[result]}">{result}</span>'
    cells = {
        "measured": _peak(row, "measured"),
        "by CUDA's rules": _peak(row, "by CUDA's rules"),
        "verdict": f"{chip} {told}{_seconds(row)}",
    }
    rest = "".join(f'<td data-name="{escape(title)}">{text}</td>' for title, text in cells.items())
    return f'<tr id="architecture-{name}" data-verdict="{result}">{first}{rest}</tr>'


def _peak(row: dict[str, Any], how: str) -> str:
    peak = row[f"peak {how}"]
    return f"{int(peak):,} B" if peak == peak else "–"


def _seconds(row: dict[str, Any]) -> str:
    seconds = [f"{row[f'seconds {how}']:.1f} s {how}" for how in ("measured", "traced") if row[f"seconds {how}"] > 0]
    return f" <small>{', '.join(seconds)}</small>" if seconds else ""


def _coverage() -> pd.DataFrame:
    return pd.read_parquet(Path(__file__).with_name("coverage.parquet"))


def _cause(row: dict[str, Any]) -> str:
    """What ended an architecture, or else the first event in which its two runs differ, in a line of HTML.

    Files are named without their folders.
    """
    told = [row["cause"], row["first differing"], row["difference"] and row["first differing, with scratch"]]
    text = next((text for text in told if isinstance(text, str) and text), "")
    if text and isinstance(row["conditional"], str) and row["conditional"]:
        text += f"; decided by values that no trace knows, at {row['conditional']}"
    return escape(shorten(re.sub(r"\btransformers/(?:\w+/)*", "", text), 300, placeholder=" …"))
