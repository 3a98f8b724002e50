"""Takes the README's pictures of the rendered book: `make screenshots`, which renders it first if it is missing.

Each is the top of a page, or of one of its parts, in a window of one size, on a white page, in colours few enough for a
small file. It needs Playwright (requirements-test.txt) and a Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from press import BOOK

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURES = Path(__file__).with_name("_static") / "screenshots"
SHOTS = {
    "front": ("book/start_here.html", "h1"),
    "peak": ("notebooks/04_tft_step.html", "figure"),
    "layer": ("notebooks/11_one_layer.html", "#the-norms-keep-the-residual-stream-twice"),
}
"""For each picture the page, and what of it stands at the top."""

SIZE = {"width": 1280, "height": 800}
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTLED = "document.readyState === 'complete' && (!window.MathJax || MathJax.startup.promise.then(() => true))"
TO_TOP = "element => window.scrollTo(0, element.getBoundingClientRect().top + window.scrollY - 90)"


def take(page: Page, address: str, at: str) -> Image.Image:
    """The page as it is seen once it is laid out, its mathematics set, with the first such element near the top."""
    page.goto(address)
    page.wait_for_function(SETTLED)
    page.locator(f"article {at}").first.evaluate(TO_TOP)
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide")))
    return picture.convert("RGB").quantize(96, dither=Image.Dither.NONE)


def main() -> int:
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print(f"no browser found as any of {', '.join(NAMES)}: on Debian, apt install chromium", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--hide-scrollbars"])
        page = chromium.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        for name, (address, at) in SHOTS.items():
            path = PICTURES / f"{name}.png"
            take(page, (BOOK.html / address).as_uri(), at).save(path, optimize=True)
            print(f"{BOOK.shown(path)}: {path.stat().st_size:,} B")
        chromium.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
