"""The pages in a real Chromium with no way out: what they fetch and say, where they lead, whether all can read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from press import BOOK
from readable import AXE, FAINT, OF_COLOUR, SHORTEN

TOC = re.findall(r"(?:root|file): (\S+)", (BOOK.root / "_toc.yml").read_text(encoding="utf-8"))
PAGES = [f"{name}.html" for name in (*TOC, "genindex", "search")]
PHONE = 390

SETTLED = "document.readyState === 'complete' && (!window.MathJax || MathJax.startup.promise.then(() => true))"

READ = """() => ({
  width: document.documentElement.scrollWidth,
  math: document.querySelectorAll("article .math").length,
  set: document.querySelectorAll("article .math mjx-container").length,
  bad: [...document.querySelectorAll("article mjx-merror, article [data-mjx-error]")].map((e) => e.textContent),
  links: [...new Set([...document.links].map((link) => link.href))],
  ids: [...document.querySelectorAll("[id]")].map((element) => element.id),
})"""


@dataclass
class Visit:
    """What the browser said of one page."""

    read: dict[str, Any]
    said: list[str]
    fetched: list[str]
    faint: dict[str, list[str]]
    axe: dict[str, list[str]]


def open_page(page: Any, address: str) -> None:
    page.said.clear()
    page.fetched.clear()
    page.goto(address)
    page.wait_for_function(SETTLED)


@pytest.fixture(scope="module")
def visit(page, address) -> Callable[[str], Visit]:
    """Looks at a page, once, at a phone's width, in light and in dark."""
    from axe_playwright_python.base import AXE_SCRIPT

    @cache
    def look(name: str) -> Visit:
        page.emulate_media(color_scheme="light")
        open_page(page, f"{address}/{name}")
        read, faint, found = page.evaluate(READ), {}, {}
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.wait_for_function("(theme) => document.documentElement.dataset.theme === theme", arg=theme)
            faint[theme] = page.evaluate(FAINT)
        page.evaluate(SHORTEN)
        page.evaluate(AXE_SCRIPT)
        found["dark"] = page.evaluate(AXE, OF_COLOUR)
        page.emulate_media(color_scheme="light")
        found["light"] = page.evaluate(AXE, None)
        return Visit(read, [*page.said], [*page.fetched], faint, found)

    return look


def test_every_page_that_was_rendered_is_looked_at(site):
    rendered = {path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts}
    assert rendered == {"index.html", *PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_a_word_and_with_nothing_from_elsewhere(name, visit, address):
    seen = visit(name)
    assert seen.said == []
    assert len(seen.fetched) > 3, "the list of what was fetched is empty: the check checks nothing"
    assert [url for url in seen.fetched if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_from_a_file(name, page, site):
    open_page(page, (site / name).as_uri())
    assert page.said == []
    assert [url for url in page.fetched if not url.startswith((site.as_uri(), "data:", "blob:"))] == []
    read = page.evaluate(READ)
    assert read["set"] == read["math"], "mathematics that was not set"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_its_mathematics_is_set(name, visit):
    read = visit(name).read
    assert read["set"] == read["math"], "mathematics that was not set"
    assert not read["bad"]
    assert read["width"] <= PHONE, "the page is wider than a phone: something does not scroll by itself"


@pytest.mark.parametrize("name", PAGES)
def test_all_text_has_contrast_in_light_and_in_dark(name, visit):
    assert visit(name).faint == {"light": [], "dark": []}


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious_in_light_and_in_dark(name, visit):
    assert visit(name).axe == {"light": [], "dark": []}


def test_the_page_of_formulas_prints_on_one_sheet_of_paper(page, address):
    def sheets(name: str) -> int:
        open_page(page, f"{address}/book/{name}.html")
        return len(re.findall(rb"/Type\s*/Page\b(?!s)", page.pdf(prefer_css_page_size=True)))

    assert sheets("claims") > 3, "the count of sheets counts nothing"
    assert sheets("formulas") == 1


def test_every_link_and_anchor_leads_somewhere(visit, address, site):
    ids = {f"{address}/{name}": {*visit(name).read["ids"], ""} for name in PAGES}
    dead = []
    for name in PAGES:
        for link in visit(name).read["links"]:
            target, anchor = urldefrag(link)
            target = target.split("?")[0]
            if not target.startswith(address):
                continue
            there = (site / unquote(target.removeprefix(address)).lstrip("/")).is_file()
            if not there or (target in ids and unquote(anchor) not in ids[target]):
                dead.append(f"{name}: {link}")
    assert not dead


def test_the_address_of_the_book_leads_to_its_front_page(page, address):
    page.goto(f"{address}/index.html", wait_until="commit")
    page.wait_for_url(f"{address}/{PAGES[0]}")


def test_architectures_can_be_filtered_by_what_came_of_them(page, address):
    open_page(page, f"{address}/book/coverage.html")
    rows = page.locator("table.claims tbody tr")
    page.get_by_label("Result").select_option("does not train")
    seen = rows.filter(visible=True)
    assert 0 < seen.count() < rows.count()
    assert page.locator(".claims-filter output").text_content() == f"{seen.count()} of {rows.count()} architectures"


def test_claims_can_be_filtered_by_words_and_verdict_and_an_address_that_asks_for_none_shows_all(page, address):
    def shown() -> list[str]:
        rows = page.locator("table.claims tbody tr")
        seen = rows.filter(visible=True)
        said = page.locator(".claims-filter output").text_content()
        assert said == f"{seen.count()} of {rows.count()} claims"
        return seen.locator("td[data-name=stated]").all_text_contents()

    claims = f"{address}/book/claims.html"
    open_page(page, claims)
    every = shown()
    page.get_by_label("Verdict").select_option("unit mix")
    page.get_by_label("Words").fill("entries 960")
    assert shown() == ["960 MB"]
    open_page(page, f"{claims}?verdict=unit+mix&words=entries+960")
    assert shown() == ["960 MB"]
    open_page(page, f"{claims}?verdict=none+such")
    assert shown() == every
