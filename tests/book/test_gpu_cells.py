"""What a chapter runs on a GPU, tried where there is none: under the trace, which answers to the name "cuda"."""

from __future__ import annotations

import nbformat
import torch
from press import BOOK

import everybyte as eb
from everybyte.formulas import transformer
from everybyte.formulas.terms import integer
from everybyte.models import GPT, GPTConfig
from everybyte.models.master import MasterWeights


def test_the_worked_example_s_cell_for_a_gpu_puts_all_it_makes_there_and_reads_the_graph_and_the_peak():
    cells = nbformat.read(BOOK.notebooks / "14_worked_example.ipynb", as_version=4).cells
    names = {"eb": eb, "torch": torch, "GPT": GPT, "MasterWeights": MasterWeights}
    for start in ("def train(", "def for_real("):
        (cell,) = (cell for cell in cells if cell.source.startswith(start))
        exec(cell.source, names)
    config, data, run = GPTConfig(layers=2, context=16), torch.zeros(2, 3, 16, dtype=torch.int64), eb.trace("cuda")
    graph, peak = names["for_real"](config, data, run)

    sizes = transformer.sizes(3, 16, config.hidden, config.heads, config.layers, config.vocabulary)
    assert graph == integer(transformer.stack(), sizes)
    assert peak == run.timeline.without("scratch").peak_bytes
    assert set(run.timeline.frame()["device"]) == {"cuda:0"}
