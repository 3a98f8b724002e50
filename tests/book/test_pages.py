"""The rendered pages: nothing remote, no dead link, and what a phone needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from press import BOOK

# What makes a browser fetch something without being asked, by tag and attribute.
LOADS = {
    **dict.fromkeys(["script", "iframe", "embed", "audio", "track", "input"], ("src",)),
    **dict.fromkeys(["img", "source"], ("src", "srcset")),
    "video": ("src", "poster"),
    "object": ("data",),
}
FETCHING = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
REMOTE = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    # Under _static lie the theme's templates, which no reader opens.
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in paths}


def loads(page: BeautifulSoup) -> Iterator[str]:
    """Every address that a browser fetches to show the page."""
    for tag, attributes in LOADS.items():
        for element in page.find_all(tag):
            yield from (element[attribute] for attribute in attributes if element.get(attribute))
    for link in page.find_all("link", href=True):
        if FETCHING & set(link.get("rel", [])):
            yield link["href"]
    styles = [element.get_text() for element in page.find_all("style")]
    styles += [element["style"] for element in page.find_all(style=True)]
    yield from style_loads("\n".join(styles))
    for script in page.find_all("script", src=False):
        yield from re.findall(r"""(?:import|fetch|importScripts)\s*\(?\s*["']([^"']+)""", script.get_text())


def style_loads(css: str) -> Iterator[str]:
    yield from re.findall(r"""url\(\s*["']?([^"')]+)""", css)
    yield from re.findall(r"""@import\s+["']([^"']+)""", css)


def test_every_chapter_became_a_page(pages, site):
    shown = {path.relative_to(site).as_posix() for path in pages}
    assert {f"notebooks/{path.stem}.html" for path in BOOK.executed()} <= shown
    assert {"index.html", "book/start_here.html", "book/how_to_run.html"} <= shown


def test_every_chapter_s_page_has_at_its_head_the_command_that_runs_it(pages, site):
    for name in (path.stem for path in BOOK.executed()):
        commands = [block.get_text() for block in pages[site / "notebooks" / f"{name}.html"].select("pre")]
        assert f"notebooks/{name}.ipynb _build/{name[:2]}.ipynb" in commands[0], name


def test_no_page_loads_anything_remote(pages):
    remote = {str(path): [address for address in loads(page) if REMOTE.match(address)] for path, page in pages.items()}
    assert not {path: found for path, found in remote.items() if found}


def test_no_style_sheet_loads_anything_remote(site):
    for sheet in site.rglob("*.css"):
        addresses = style_loads(sheet.read_text(encoding="utf-8"))
        assert not [address for address in addresses if REMOTE.match(address)], sheet


def test_every_local_address_leads_somewhere(pages):
    ids = {path: {element["id"] for element in page.find_all(id=True)} for path, page in pages.items()}
    dead = []
    for path, page in pages.items():
        addresses = [*loads(page), *(link["href"] for link in page.find_all("a", href=True))]
        for address in addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor_missing = parts.fragment and target in ids and unquote(parts.fragment) not in ids[target]
            if not target.exists() or anchor_missing:
                dead.append(f"{path.name}: {address}")
    assert not dead


def test_every_picture_in_a_chapter_has_a_text(pages):
    for path, page in pages.items():
        assert not [img for img in page.select("article img") if not img.get("alt", "").strip()], path


def test_every_term_of_the_glossary_is_linked_from_elsewhere_and_every_chapter_links_some(pages, site):
    glossary = site / "book" / "glossary.html"
    terms = {term["id"] for term in pages[glossary].select("dl.glossary dt[id]")}
    linked = {}
    for path, page in pages.items():
        links = [link["href"].partition("#") for link in page.select("article a:has(> .std-term)")]
        linked[path] = {anchor for _, _, anchor in links}
        assert all((path.parent / to).resolve() == glossary for to, _, _ in links if to), path
    assert len(terms) > 50
    unlinked = terms - set().union(*(anchors for path, anchors in linked.items() if path != glossary))
    assert not unlinked
    few = [path.name for path in pages if re.match(r"[01]\d_", path.name) and len(linked[path]) < 5]
    assert not few


@pytest.mark.parametrize("term", ["storage", "saved set", "optimizer state"])
def test_a_term_is_linked_where_a_chapter_mentions_it_first(pages, term):
    anchor = f"#term-{term.replace(' ', '-')}"
    linked = 0
    for path, page in pages.items():
        paragraphs = page.select("article p:not(.admonition-title)") if path.parent.name == "notebooks" else []
        prose = [paragraph for paragraph in paragraphs if not paragraph.find_parent(class_="cell")]
        mentions = re.compile(rf"\b{term}s?\b", re.IGNORECASE)
        first = next((paragraph for paragraph in prose if mentions.search(own_words(paragraph, anchor))), None)
        if first is not None:
            assert first.select_one(f'a[href$="{anchor}"]'), path.name
            linked += 1
    assert linked > 1


def own_words(paragraph: Tag, anchor: str) -> str:
    """A paragraph without code, mathematics, pasted numbers, titles, and what leads elsewhere than to the anchor."""
    copy = BeautifulSoup(str(paragraph), "html.parser")
    for other in copy.select(f'code, em, .math, .pasted-text, .pasted-inline, a:not([href$="{anchor}"])'):
        other.decompose()
    return copy.get_text(" ")


def test_no_page_is_a_dead_end(pages, site):
    """Each leads on, in its text and by the bar under it, can be searched from, and a chapter can be taken home."""
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        if name in ("index.html", "genindex.html", "search.html", "py-modindex.html"):
            continue
        assert page.select_one(".prev-next-footer a"), name
        assert page.select_one(".search-button, .search-button__kbd-shortcut"), name
        assert page.select("article section section a.reference.internal, article p a.reference.internal"), name
        if name.startswith("notebooks/"):
            source = page.select_one("a[download], a.btn-download-source-button")
            assert source is not None and source["href"].endswith(".ipynb"), name
            assert (path.parent / source["href"]).exists(), name


def test_glued_numbers_are_on_the_page(pages):
    # A key that is pasted but never glued is a warning, and fails the build; a number that is glued empty is not.
    for path, page in pages.items():
        pasted = page.select("span.pasted-text, span.pasted-inline")
        assert not [span for span in pasted if not span.get_text(strip=True)], path
