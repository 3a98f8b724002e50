"""The book as the tests see it: one run of all notebooks, the rendered pages, and a browser. Each is made once."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from filelock import FileLock
from press import BOOK, Run

try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    sync_playwright = None

ASKED = os.environ.get("EVERYBYTE_BROWSER", "")  # a browser's path, or "required": none is then a failure
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class Execution:
    """One run of all notebooks, and the digest of each file under `notebooks/` before and after it."""

    runs: list[Run]
    before: dict[str, str]
    after: dict[str, str]


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def execution() -> Execution:
    """All notebooks executed by papermill with their default parameters, as `make book` does."""
    before = digests(BOOK.notebooks)
    runs = BOOK.execute(jobs=2)
    return Execution(runs, before, digests(BOOK.notebooks))


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The pages rendered from the stored outputs, once for all workers; rendering fails on any warning."""
    base = tmp_path_factory.getbasetemp()
    html = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stored" / "html"
    with FileLock(html.parent.with_suffix(".lock")):
        return html if html.is_dir() else BOOK.render(html=html).parent


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """Where the pages are served, on this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")  # no longer: Playwright's event loop would stay under the tests that run a kernel
def browser() -> Iterator[Browser]:
    """The system's Chromium with no way out. Without one, tests are skipped, or fail where it is required."""
    found = ASKED if os.sep in ASKED else next(filter(None, map(shutil.which, NAMES)), None)
    if not (found and sync_playwright):
        why = "no browser found as any of " + ", ".join(NAMES) if sync_playwright else "Playwright is not installed"
        (pytest.fail if ASKED else pytest.skip)(f"{why}: pages were read, not looked at")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*FLAGS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser) -> Iterator[Page]:
    """A phone, with nothing stored, and `page.said` and `page.fetched` for what it says and fetches."""
    context = browser.new_context(viewport=PHONE)
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.said, page.fetched = [], []
    page.on("console", lambda message: message.type in ("error", "warning") and page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("requestfailed", lambda request: page.said.append(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: page.fetched.append(request.url))
    yield page
    context.close()
