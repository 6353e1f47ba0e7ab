"""Take the pictures of the playground in docs/images/: the packaged voice, speaking, in light and dark.

    .venv/bin/python tools/playground_pictures.py http://127.0.0.1:8000

needs a running `stagevox serve` and a Chromium. Pictures in which the player had a break are taken again: a busy machine is no
fault of the page.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
TRIES = 8


def take(browser: Browser, url: str, scheme: str) -> bytes:
    """The page while it plays the end of a sentence."""
    for _ in range(TRIES):
        size = {"width": 1000, "height": 800}
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        page.wait_for_selector("#voice option", state="attached")
        page.click("#speak")
        page.wait_for_selector("#timeline tr", state="attached")
        page.mouse.move(0, 0)
        page.wait_for_timeout(1500)
        whole = page.inner_text("#breaks") == "0"
        picture = page.screenshot(full_page=True)
        page.close()
        if whole:
            return picture
    sys.exit(f"the player had a break {TRIES} times: try again on a quiet machine")


def main(url: str) -> None:
    """Write both pictures, in 128 colours: half the size, and nobody sees it."""
    path = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if path is None:
        sys.exit("no Chromium here: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            picture = Image.open(io.BytesIO(take(browser, url, scheme))).convert("RGB").quantize(128)
            picture.save(IMAGES / f"playground-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
