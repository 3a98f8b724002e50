"""The paste box in a real Chromium: what it answers is what the library answers, and what is pasted is only text."""

from __future__ import annotations

import tomllib

import pytest
from press import BOOK

from everybyte.explain import Explanation, explain

MESSAGES = [
    (message["text"], message.get("gpu", ""))
    for path in sorted((BOOK.root / "tests" / "explain").glob("*.toml"))
    for message in tomllib.loads(path.read_text(encoding="utf-8"))["message"]
]
ANSWERS = "(pasted) => pasted.map(([text, gpu]) => explainMessage(text, gpu))"


@pytest.fixture(scope="module")
def box(page, address):
    page.goto(f"{address}/book/explain.html")
    page.wait_for_selector("#explain textarea")
    return page


def as_shown(found: Explanation | None) -> dict | None:
    if found is None:
        return None
    names = ("kind", "possible", "device", "index", "rows", "why", "next", "more")
    listed = {name: getattr(found, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in listed.items()} | {
        "rows": [list(row) for row in found.rows]
    }


def test_every_message_gets_the_librarys_answer(box):
    pasted = [
        *MESSAGES,
        ("", ""),
        ("ValueError: nothing of the kind", ""),
        ("\x1b[31m[rank0]:\r\n" + MESSAGES[0][0], ""),
    ]
    answers = box.evaluate(ANSWERS, pasted)
    for (text, gpu), answer in zip(pasted, answers, strict=True):
        assert answer == as_shown(explain(text, gpu or None)), text


def test_what_is_pasted_is_explained_as_it_is_typed_and_leaves_the_page_alone(box):
    text = next(text for text, _ in MESSAGES if explain(text).kind == "fragmentation")
    box.fetched.clear()
    box.get_by_label("The message, or the log that it stands in").fill(text)
    assert box.locator(".calculator-verdict").text_content().startswith("fragmentation: ")
    assert box.locator("#explain li code").first.text_content().endswith("python train.py")
    box.get_by_label("The message, or the log that it stands in").fill(
        "<img src=x onerror=alert(1)> CUDA error: out of memory"
    )
    assert box.locator(".calculator-verdict").text_content().startswith("outside the allocator: ")
    assert box.locator("#explain img").count() == 0
    box.get_by_label("The message, or the log that it stands in").fill("hello")
    assert box.locator("#explain").text_content().count("Not an out-of-memory message I know") == 1
    assert (box.fetched, box.said) == ([], [])


def test_the_answer_is_read_out_and_fits_a_phone_in_light_and_in_dark(box):
    from axe_playwright_python.base import AXE_SCRIPT

    box.get_by_label("The message, or the log that it stands in").fill(max((text for text, _ in MESSAGES), key=len))
    assert box.locator(".explain-answer[aria-live=polite] table").count() == 1
    assert box.evaluate("document.documentElement.scrollWidth") <= 390
    box.evaluate(AXE_SCRIPT)
    for theme in ("light", "dark"):
        box.emulate_media(color_scheme=theme)
        box.wait_for_function("(theme) => document.documentElement.dataset.theme === theme", arg=theme)
        faults = box.evaluate("axe.run('#explain').then(({ violations }) => violations.map(({ id }) => id))")
        assert faults == []
