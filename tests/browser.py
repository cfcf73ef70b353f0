"""Chromium for tests of pages, and axe, which looks for what people with a screen reader or weak eyes could not use."""

import os
import shutil
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    find_spec("playwright") is None or find_spec("axe_playwright_python") is None or BROWSER is None,
    reason="needs playwright, axe-playwright-python and Chromium: make test-page, after `apt-get install chromium`",
)
OUTPUT = Path(__file__).parents[1] / "page_output"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def until(page, truth):
    """`wait_for_function` would have the page evaluate a string, which its policy may forbid."""
    for _ in range(600):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {truth}")


@cache
def axe():
    return (Path(find_spec("axe_playwright_python").origin).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(page):
    """What axe finds on the page as it is: rule, reason and the first elements."""
    page.evaluate(axe())
    found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
    assert len(found["passes"]) > 10  # it looked
    return [
        f"{each['id']}: {each['help']}: "
        + "; ".join(node["html"][:120] + " " + node["failureSummary"] for node in each["nodes"][:3])
        for each in found["violations"]
    ]
