"""The explorer page in headless Chromium: `make test-page`. Skipped where playwright or the browser is missing.

Screenshots, light and dark, wide and narrow, are left in `page_output` to be looked at.
"""

import os
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from dilated_attention_pytorch import BlockLayout, SlidingWindow
from dilated_attention_pytorch.cli import explore

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    find_spec("playwright") is None or BROWSER is None,
    reason="needs playwright and Chromium: make test-page, after `apt-get install chromium`",
)

OUTPUT = Path(__file__).parents[2] / "page_output"


@pytest.fixture(scope="module")
def url():
    with explore.Server(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, url):
    """The page, ready; whatever it logs as an error, or asks of anyone but the server, fails the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, permissions=["clipboard-read"])
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    page.goto(url)
    settled(page)
    yield page
    context.close()
    assert [text for text in wrong if "400" not in text] == []  # Chromium logs a refused request


def settled(page):
    """Until the last question is answered."""
    page.wait_for_timeout(250)
    until(page, "document.getElementById('code').textContent && !document.body.hasAttribute('aria-busy')")


def until(page, truth):
    """`wait_for_function` would have the page evaluate a string, which its policy forbids."""
    for _ in range(600):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {truth}")


def colours(page, *cells):
    """Of the canvas at the middles of these (row, column) cells."""
    return page.evaluate(
        """cells => {
            const canvas = document.getElementById("mask"), context = canvas.getContext("2d");
            const [stepQ, stepK] = steps(canvas.width);
            const at = ([row, column]) => context.getImageData((column + .5) * stepK, (row + .5) * stepQ, 1, 1);
            return cells.map(cell => [...at(cell).data]);
        }""",
        cells,
    )


def test_it_shows_the_mask_and_the_figures(page):
    page.get_by_label("Left").fill("200")
    settled(page)
    layout = BlockLayout.from_pattern(SlidingWindow(200, 0), 4096, block_size=128)
    assert page.get_by_label("In words").input_value() == "window:200/0"
    assert f"{layout.num_active_blocks:,}" in page.locator("#big").inner_text()
    assert "pattern = SlidingWindow(left=200, right=0)" in page.locator("#code").inner_text()
    diagonal, before, empty = colours(page, (9, 9), (9, 8), (9, 20))
    assert diagonal == before == [245, 167, 66, 255]  # partial
    assert empty == [236, 239, 243, 255]
    assert "Fits this CPU" in page.locator("#memory").inner_text()


def test_patterns_combine(page):
    page.get_by_role("button", name="Combine with another").click()
    settled(page)
    assert page.get_by_label("In words").input_value() == "window:512/0 | global:64/queries"
    page.locator(".joiner select").select_option("&")
    settled(page)
    assert (
        "SlidingWindow(left=512, right=0) & GlobalTokens(count=64, queries=True)" in page.locator("#code").inner_text()
    )
    page.get_by_label("Remove this pattern").click()
    settled(page)
    assert page.get_by_label("In words").input_value() == "window:512/0"


def test_an_error_is_shown_and_goes_away(page):
    page.locator("#tokens").fill("64000000")
    settled(page)
    alert = page.get_by_role("alert")
    assert alert.inner_text() == "tokens must be from 1 to 1,048,576 on this page, got 64,000,000"
    page.locator("#tokens").fill("512")
    settled(page)
    assert not alert.is_visible()
    assert "torch.randn(1, 512, 8, 64" in page.locator("#code").inner_text()


def test_by_keyboard_alone(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "kind0"
    page.keyboard.type("longnet")
    settled(page)
    assert page.locator("#expression").input_value().startswith("longnet:1024,2048,4096/1,2,4")
    page.locator("#mask").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#under").inner_text() == "queries 16–31, keys 16–31: full"


def test_python_can_be_copied_and_runs(page):
    page.locator("#tokens").fill("300")
    page.locator("#dtype").select_option("float32")
    settled(page)
    page.get_by_role("button", name="Copy").click()
    until(page, "document.getElementById('copy').textContent !== 'Copy'")
    made = {}
    exec(page.locator("#code").inner_text(), made)
    assert made["out"].shape == (1, 300, 8, 64)


def test_the_address_holds_the_choices(page, url):
    page.get_by_label("Write it myself").check()
    page.get_by_label("In words").fill("causal & window:77")
    page.get_by_label("Causal: no query").check()
    settled(page)
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    settled(page)
    assert page.get_by_label("In words").input_value() == "causal & window:77"
    assert "SlidingWindow(left=77, right=77)" in page.locator("#code").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshots(page, scheme):
    """Nothing to scroll sideways, and dark is dark."""
    OUTPUT.mkdir(exist_ok=True)
    page.emulate_media(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) < 200) == (scheme == "dark")
    for name, width in (("wide", 1400), ("middle", 900), ("narrow", 420)):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=OUTPUT / f"{scheme}_{name}.png", full_page=True)
