"""A report in a real Chromium: with hostile names in it nothing runs and nothing is fetched, and all can read it."""

from __future__ import annotations

import pytest
from readable import AXE, FAINT, OF_COLOUR
from test_page import HOSTILE, hostile_answers, recorded, script, traced  # noqa: F401

from everybyte import page as report


@pytest.fixture
def opened(page, tmp_path):
    """A function that opens an answer's report from a file, and gives the browser's page."""

    def opened(answer, run):
        out = tmp_path / "report.html"
        out.write_text(report.html(answer, run), encoding="utf-8")
        page.said.clear()
        page.fetched.clear()
        page.goto(out.as_uri())
        return page

    return opened


@pytest.mark.parametrize("kind", ["traced", "recorded"])
def test_a_report_full_of_hostile_names_runs_nothing_and_fetches_nothing(traced, recorded, opened, page, kind):  # noqa: F811
    page.on("dialog", lambda dialog: page.said.append(dialog.message))
    for name in (HOSTILE[what] for what in ("an image", "a script", "an attribute", "a style", "backwards")):
        seen = opened(*hostile_answers(traced, recorded, name)[kind])
        for element in seen.query_selector_all("summary"):
            element.click()
        seen.mouse.move(200, 400)
        assert seen.said == [], name
        assert len(seen.fetched) == 1, seen.fetched
        assert seen.evaluate("document.querySelectorAll('img, iframe, object, embed, link, a, form, base').length") == 0


@pytest.mark.parametrize("kind", ["traced", "recorded"])
def test_a_report_can_be_read_by_all_on_a_phone_in_light_and_in_dark(traced, recorded, opened, kind):  # noqa: F811
    from axe_playwright_python.base import AXE_SCRIPT

    seen = opened(*hostile_answers(traced, recorded, "blocks.0.a_name_of_some_length")[kind])
    assert seen.evaluate("document.documentElement.scrollWidth") <= 390
    for theme in ("light", "dark"):
        seen.emulate_media(color_scheme=theme)
        assert seen.evaluate(FAINT) == []
        seen.evaluate(AXE_SCRIPT)
        assert seen.evaluate(AXE, OF_COLOUR if theme == "dark" else None) == []
