"""The pages in a real browser with no way out: what it fetches, whether mathematics is set, whether a phone scrolls."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from bs4 import BeautifulSoup
from press import BOOK

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: pages were read, not looked at")

PAGES = ["start_here", "how_to_run", "claims", "cli", "glossary"]
PAGES = [f"book/{name}" for name in PAGES] + [f"notebooks/{path.stem}" for path in BOOK.executed()]

# A page in a frame of a phone's width; a headless window itself cannot be that narrow.
FRAME = """<!doctype html>
<iframe src="/{page}.html" style="border:0;width:390px;height:844px"></iframe><pre id="said"></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {{
  const {{ document: page, performance, MathJax }} = frame.contentWindow;
  document.querySelector("#said").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
    math: page.querySelectorAll("article .math").length,
    set: page.querySelectorAll("article .math mjx-container").length,
    bad: [...page.querySelectorAll("article mjx-merror, article [data-mjx-error]")].map((e) => e.textContent),
  }});
}}, 3000);
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the pages, and at /-/PAGE the page in its frame."""

    def do_GET(self) -> None:
        if not self.path.startswith("/-/"):
            return super().do_GET()
        body = FRAME.format(page=self.path.removeprefix("/-/")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look(address: str, page: str, profile: Path) -> dict:
    """What the browser says of a page at a phone's width."""
    shown = dump(f"{address}/-/{page}", profile)
    found = re.search(r'<pre id="said">(.+?)</pre>', shown, flags=re.DOTALL)
    assert found, "the browser did not finish"
    return json.loads(unescape(found[1]))


def dump(address: str, profile: Path) -> str:
    """A page after its scripts have run, every other host being out of reach."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, address], capture_output=True, text=True, timeout=120)
    assert done.stdout, f"the browser said nothing: {done.stderr[-500:]}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_a_page_stands_alone_on_a_phone(page, address, tmp_path):
    said = look(address, page, tmp_path)
    assert [name for name in said["fetched"] if not name.startswith((address, "data:", "blob:"))] == []
    assert len(said["fetched"]) > 3, "the list of what was fetched is empty: the check checks nothing"
    assert said["set"] == said["math"], "mathematics that was not set"
    assert not said["bad"]
    assert said["width"] <= 390, "the page is wider than a phone: something does not scroll by itself"


def test_claims_can_be_filtered_by_words_and_verdict_and_an_address_that_asks_for_none_shows_all(address, tmp_path):
    def shown(query: str) -> list:
        page = BeautifulSoup(dump(f"{address}/book/claims.html{query}", tmp_path), "html.parser")
        rows = page.select("table.claims tbody tr")
        seen = [row for row in rows if not row.has_attr("hidden")]
        assert page.select_one(".claims-filter output").get_text() == f"{len(seen)} of {len(rows)} claims"
        return seen

    assert len(shown("")) == len(shown("?verdict=none+such"))
    seen = shown("?verdict=unit+mix&words=entries+960")
    assert {row["data-verdict"] for row in seen} == {"unit mix"}
    assert [row.select_one("td").get_text() for row in seen] == ["960 MB"]
