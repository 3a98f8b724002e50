"""The page of formulas: what the library has, nothing left unexplained, nothing typed."""

from __future__ import annotations

import re

import pytest
import sympy as sp
from formulas_page import PAGE, beyond, decoder, page, peak, post_mortem, running, state, symbols

from everybyte.formulas import tft, transformer
from everybyte.formulas.terms import L, P, V, b, h, integer, s, total


def formulas() -> list[sp.Expr]:
    two = [total(formula) for part in (decoder, beyond, running) for _, formula in part()]
    return [*two, *(total(formula) for _, *both in state() for formula in both), peak()]


def test_the_page_is_what_the_library_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python book/formulas_page.py"


def test_every_symbol_on_the_page_is_explained_and_every_explained_one_is_on_it():
    used = set().union(*(formula.free_symbols for formula in formulas()))
    used |= set().union(*(total(formula).free_symbols for _, formula in post_mortem())) - {tft.c}
    used |= total(transformer.parameters()).free_symbols
    assert used <= set(symbols())
    assert {symbol.name for symbol in set(symbols()) - used} <= {"d_head"}


def test_the_peak_of_a_step_is_that_of_the_worked_example():
    seed = transformer.sizes(4, 2048, 2048, 16, 24, 32_000)
    kept = integer(transformer.stack(), seed)
    numbers = seed | {P: integer(transformer.parameters(), seed)}
    (symbol,) = peak().free_symbols - set(numbers)
    assert (
        integer(peak() - symbol, numbers) + kept
        == 67_015_303_176
        == (14 * 1_278_332_928 + kept + 8 * 4 * 2048 * 32_000 + 4)
    )


def test_the_published_sum_is_on_the_page_in_its_own_widths():
    cell = re.search(r"\*\*a layer\*\*, eager \| \$(.*?)\$ \|", page())[1]
    assert cell == "34 s b h + 5 a s^{2} b + 16 s b"


@pytest.mark.parametrize(("name", "linear"), [("full recomputation", 2), ("selective recomputation", 34)])
def test_recomputation_keeps_what_the_paper_says(name, linear):
    kept = total(dict(decoder())[name]).subs(transformer.BF16_ON_CUDA)
    assert kept.coeff(h) == linear * b * s
    assert kept.free_symbols.isdisjoint({L, V})
