"""A headless Chromium, if this machine has one."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "STAGEVOX_TEST_BROWSER"


def find_browser():
    """The path of a Chromium: ``STAGEVOX_TEST_BROWSER``, or one on the path; None without."""
    return os.environ.get(VARIABLE) or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched():
    """A running browser; skips the test, saying why, where there is none."""
    path = find_browser()
    if path is None:
        pytest.skip(f"no Chromium here: `apt-get install chromium`, or name one in {VARIABLE}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers have no user namespaces for the sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
