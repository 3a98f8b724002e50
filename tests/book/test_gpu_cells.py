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


def test_the_worked_example_s_cell_for_a_gpu_puts_all_it_makes_there_and_reads_the_graph_and_the_peak(monkeypatch):
    cells = nbformat.read(BOOK.notebooks / "14_worked_example.ipynb", as_version=4).cells
    names = {"eb": eb, "torch": torch, "GPT": GPT, "MasterWeights": MasterWeights}
    names["data"] = torch.zeros(2, 3, 16, dtype=torch.int64)
    for start in ("def train(", "def for_real("):
        (cell,) = (cell for cell in cells if cell.source.startswith(start))
        exec(cell.source, names)
    config = GPTConfig(layers=2, context=16)

    with eb.trace(rules="cuda") as run:
        live_at_reset = []
        monkeypatch.setattr(
            torch.cuda, "reset_peak_memory_stats", lambda: live_at_reset.append(run.timeline.live_bytes[-1])
        )
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: run.timeline.peak_bytes)
        graph, peak = names["for_real"](config, names["data"])

    sizes = transformer.sizes(3, 16, config.hidden, config.heads, config.layers, config.vocabulary)
    assert graph == integer(transformer.stack(), sizes)
    assert peak > live_at_reset[0] == names["data"].nbytes  # the model that was looked at is gone, the batch is there
    assert set(run.timeline.frame()["device"]) == {"cuda:0"}
