"""Tables of the book's pages that are made from what the library knows, as Markdown, for `{made} NAME`."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import torch

import everybyte
from everybyte import gpus
from everybyte.audit import MEANING
from everybyte.units import GiB, MiB

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


# -- benchmarks --------------------------------------------------------------------------------------------------------


UNFINISHED = "The stored run was ended before it came to this."


def benchmarks_found() -> str:
    """What the last run found, in a list."""
    table = _benchmarks()
    speed = table[table["part"] == "speed"]
    tracker = speed[speed["tool"] == "MemTracker"].iloc[-1]
    real, alone = (speed[speed["tool"] == how].iloc[0] for how in ("really run", "really run, on one core"))
    deepest = table[table["part"] == "depths"].sort_values("units").iloc[-1]
    largest = table.loc[table["memory"].fillna(0).idxmax()]
    exact = table[(table["evidence"] == "traced") & table["what"].isin(speed[speed["evidence"] == "measured"]["what"])]
    return "\n".join(
        [
            f"- {tracker['what']}: MemTracker's step takes {_ratio(tracker)} times as long as the trace's.",
            f"- {real['what']}: the step really run on one core takes {_ratio(alone)} times as long as its trace, "
            f"which uses one; on all cores, {_ratio(real)} times.",
            f"- A layer of a decoder with {deepest['units']} takes {_ratio(deepest)} times as long as one of 25.",
            f"- The trace that took the most memory itself took {largest['memory'] / MiB:.0f} MiB: {largest['what']}.",
            f"- Of {len(exact)} models that were really run, too, the trace stated the peak of "
            f"{int((exact['difference'] == 0).sum())} to the byte.",
        ]
    )


def benchmarks_machine() -> str:
    """The machine of the last run, and how long it took."""
    on = _benchmarks().attrs
    parts = "" if on.get("one run") else "part after part, "
    tools = ", ".join(f"{name} {version}" for name, version in on["tools"].items())
    return (
        f"Run on {on['date']} in {on['seconds'] / 60:.0f} minutes, {parts}on {on['cores']} cores of a machine of the "
        f"kind “{on['processor']}”; load averages at its end: {on['busy']}. "
        f"PyTorch {on['torch']}, Python {on['python']}, {tools}."
    )


def benchmarks_speed() -> str:
    return _benchmark_rows("speed", peaks=True)


def benchmarks_answers() -> str:
    return _benchmark_rows("answers", peaks=True, ratios=False)


def benchmarks_variants() -> str:
    return _benchmark_rows("variants", bytes_of="peak", named="peak beyond weights, B")


def benchmarks_memory() -> str:
    return _benchmark_rows("memory", bytes_of="memory", named="memory of its own, B")


def benchmarks_profile() -> str:
    return _benchmark_rows("profile")


def benchmarks_around() -> str:
    """Replay and sweep: what a second does of each."""
    rows = ["| what | by | times | a second | ratio of seconds |", "|---|---|--:|--:|--:|"]
    for row in _benchmarks().query("part in ('replay', 'sweep')").to_dict("records"):
        rate = _span(row["units"] / row["most"], row["units"] / row["least"])
        cells = [row["what"], row["tool"], str(row["times"]), rate, _ratio(row)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) if len(rows) > 2 else UNFINISHED


def benchmarks_depths() -> str:
    """Seconds against layers, with the line through them, as a picture."""
    import matplotlib.pyplot as plt

    rows = _benchmarks().query("part == 'depths'").sort_values("units")
    layers, seconds = rows["units"].to_numpy(), rows["least"].to_numpy()
    each, ends = np.polyfit(layers, seconds, 1)
    with plt.style.context("everybyte.book"), io.BytesIO() as file:
        figure, ax = plt.subplots(figsize=(6.4, 3))
        ax.plot(layers, ends + each * layers, color="C1", label=f"{ends:.2f} s + {each:.4f} s a layer")
        ax.vlines(layers, seconds, rows["most"], color="C0")
        ax.plot(layers, seconds, "o", color="C0", label="least of a trace's steps, up to the most")
        ax.set(xlabel="layers", ylabel="s", xlim=0, ylim=0)
        ax.legend()
        figure.savefig(file)
        plt.close(figure)
        drawn = base64.b64encode(file.getvalue()).decode()
    off = np.abs(ends + each * layers - seconds)[1:].max() / seconds[-1]
    text = (
        f"A trace grows linearly with the layers: {each:.4f} s for each, and {ends:.2f} s for the ends of the network; "
        f"no point is further from the line than {off:.1%} of the longest step."
    )
    image = f'<img src="data:image/png;base64,{drawn}" alt="Seconds of a traced step against layers: points on a line">'
    table = _benchmark_rows("depths")
    return f"```{{raw}} html\n<figure>{image}<figcaption>{text}</figcaption></figure>\n```\n\n{table}"


def _benchmark_rows(part: str, *, ratios: bool = True, peaks: bool = False, bytes_of: str = "", named: str = "") -> str:
    """The rows of a part: seconds and ratios with their spread, and bytes."""
    heads = ["what", "by", "times", "s", *(["ratio"] if ratios else [])]
    heads += ["peak, B", "less the true one, B"] if peaks else [named] if bytes_of else []
    rows = [f"| {' | '.join(heads)} |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for row in _benchmarks().query("part == @part").to_dict("records"):
        cells = [row["what"], row["tool"], str(row["times"]), _span(row["least"], row["most"])]
        cells += [_ratio(row)] if ratios else []
        cells += [_number(row[name]) for name in (("peak", "difference") if peaks else (bytes_of,) if bytes_of else ())]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) if len(rows) > 2 else UNFINISHED


def _benchmarks() -> pd.DataFrame:
    return pd.read_parquet(Path(__file__).with_name("benchmarks.parquet"))


def _span(least: float, most: float) -> str:
    return _short(most) if most < 0.001 else f"{_short(least)} to {_short(most)}"


def _short(number: float) -> str:
    return "< 0.001" if number < 0.001 else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{_short(row['ratio'])} ({_span(row['ratio least'], row['ratio most'])})"


def _number(number: Any) -> str:
    return "–" if pd.isna(number) else f"{int(number):,}"
