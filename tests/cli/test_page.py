"""The explorer page in headless Chromium: `make test-page`. Skipped where playwright or the browser is missing.

Screenshots, light and dark, wide and narrow, are left in `page_output` to be looked at.
"""

import math
import re
import threading
import xml.etree.ElementTree as ElementTree

import pytest

from dilated_attention_pytorch import BlockLayout, SlidingWindow
from dilated_attention_pytorch.cli import explore
from tests.browser import OUTPUT, chromium, needs_browser, until, violations

pytestmark = needs_browser


@pytest.fixture(scope="module")
def url():
    with explore.Server(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser, url):
    """The page, ready; whatever it logs as an error, or asks of anyone but the server, fails the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, permissions=["clipboard-read"])
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    own = (url, f"blob:{url}", "data:")
    page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(request.url))
    page.goto(url)
    settled(page)
    yield page
    context.close()
    assert [text for text in wrong if "400" not in text] == []  # Chromium logs a refused request


def settled(page):
    """Until the last question is answered."""
    page.wait_for_timeout(250)
    until(page, "document.getElementById('code').textContent && !document.body.hasAttribute('aria-busy')")


def show(page, url, **words):
    """The page at an address with these choices."""
    page.goto("about:blank")
    page.goto(url + "#" + "&".join(f"{name}={value}" for name, value in words.items()))
    settled(page)


def colours(page, *tokens):
    """Of the canvas at these (query, key) tokens."""
    return page.evaluate(
        """tokens => {
            const canvas = document.getElementById("mask"), scale = canvas.width / view.span;
            const place = (token, first) => (token + .5 - first) * scale, context = canvas.getContext("2d");
            return tokens.map(([query, key]) =>
                [...context.getImageData(place(key, view.key), place(query, view.query), 1, 1).data.slice(0, 3)]);
        }""",
        tokens,
    )


FULL, PARTIAL, EMPTY, ROW = [31, 78, 140], [245, 167, 66], [236, 239, 243], [179, 22, 107]


def mask_point(page, query, key):
    """Where on the screen a pair of tokens is."""
    box = page.locator("#mask").bounding_box()
    view = page.evaluate("view")
    return tuple(
        start + side * (token + 0.5 - view[name]) / view["span"]
        for start, side, token, name in (
            (box["x"], box["width"], key, "key"),
            (box["y"], box["height"], query, "query"),
        )
    )


def test_it_shows_the_mask_and_the_figures(page):
    page.get_by_label("Left").fill("200")
    settled(page)
    layout = BlockLayout.from_pattern(SlidingWindow(200, 0), 4096, block_size=128)
    assert page.get_by_label("In words").input_value() == "window:200/0"
    assert f"{layout.num_active_blocks:,}" in page.locator("#big").inner_text()
    assert "pattern = SlidingWindow(left=200, right=0)" in page.locator("#code").inner_text()
    assert colours(page, (1216, 1216), (1216, 1088), (1216, 2600)) == [PARTIAL, PARTIAL, EMPTY]
    assert "Fits this CPU" in page.locator("#memory").inner_text()


def test_patterns_combine(page):
    page.get_by_role("button", name="Combine with another").click()
    settled(page)
    assert page.get_by_label("In words").input_value() == "window:512/0 | global:64/queries/300,301"
    page.locator(".joiner select").select_option("&")
    settled(page)
    assert (
        "SlidingWindow(left=512, right=0) & GlobalTokens(count=64, queries=True, at=(300, 301))"
        in page.locator("#code").inner_text()
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
    page.keyboard.press("Enter")
    settled(page)
    assert page.get_by_label("Query", exact=True).input_value() == "16"
    page.keyboard.press("+")
    page.keyboard.press("Shift+ArrowDown")
    settled(page)
    assert page.evaluate("view") == {"query": 1536, "key": 1024, "span": 2048}
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    settled(page)
    assert page.evaluate("view") == {"query": 0, "key": 0, "span": 4096}
    assert page.get_by_label("Query", exact=True).input_value() == ""


def test_every_control_is_reached_by_tab_and_named(page):
    wanted = page.evaluate(
        "[...document.querySelectorAll('input, select, button, canvas[tabindex], pre, summary')]"
        ".filter(each => !each.disabled && each.offsetParent).length"
    )
    seen = set()
    for _ in range(wanted + 2):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("e => [...document.querySelectorAll('*')].indexOf(document.activeElement)", None))
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none" or page.evaluate("document.activeElement === document.body")
    body = page.evaluate("[...document.querySelectorAll('*')].indexOf(document.body)")
    assert len(seen - {body, -1}) == wanted


def test_zoom_and_pan_with_the_mouse(page):
    x, y = mask_point(page, 2048, 1024)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    for _ in range(4):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    settled(page)
    view = page.evaluate("view")
    assert view["span"] == pytest.approx(4096 / 1.25**4, abs=4)
    query, key = (view[name] + (position - side) / size * view["span"] for name, position, side, size in (
        ("query", y, page.locator("#mask").bounding_box()["y"], page.locator("#mask").bounding_box()["height"]),
        ("key", x, page.locator("#mask").bounding_box()["x"], page.locator("#mask").bounding_box()["width"]),
    ))  # fmt: skip
    assert (query, key) == pytest.approx((2048, 1024), abs=8)  # what was under the pointer still is
    size = page.locator("#mask").bounding_box()["width"]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y - 30, steps=5)
    page.mouse.up()
    settled(page)
    moved = page.evaluate("view")
    assert moved["key"] == pytest.approx(view["key"] - 40 * view["span"] / size, abs=8)
    assert moved["query"] == pytest.approx(view["query"] + 30 * view["span"] / size, abs=8)
    assert page.get_by_label("Query", exact=True).input_value() == ""  # a drag is no click
    page.get_by_role("button", name="Whole").click()
    settled(page)
    assert page.evaluate("view.span") == 4096


def test_near_enough_every_pair_of_tokens_is_drawn(page, url):
    show(page, url, pattern="window:100/0", tokens=2048, first_query=1000, first_key=900, span=200)
    assert colours(page, (1010, 1005), (1010, 1012), (1010, 1023), (1010, 1030)) == [FULL, PARTIAL, PARTIAL, EMPTY]
    assert "masked inside an active block" in page.locator("#legend").inner_text()
    for _ in range(6):
        page.get_by_role("button", name="Zoom in").click()
    settled(page)
    assert page.evaluate("view.span") == 16
    for _ in range(9):
        page.get_by_role("button", name="Zoom out").click()
    settled(page)
    assert page.evaluate("view") == {"query": 0, "key": 0, "span": 2048}


def test_full_blocks_stay_full_when_a_cell_has_many(page, url):
    show(page, url, pattern="random:1", tokens=1 << 19)
    used = page.evaluate(
        """() => {
            const canvas = document.getElementById("mask"), found = new Set();
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
            return [...found];
        }"""
    )
    tints = [list(map(int, tint.split(","))) for tint in used]
    assert EMPTY in tints
    assert len(tints) > 1
    for tint in tints:  # between empty and full, never towards the orange of partial blocks
        assert all(low <= value <= high for low, value, high in zip(FULL, tint, EMPTY, strict=True))
    assert all(tint == EMPTY or tint[0] < 236 - 0.3 * (236 - 31) for tint in tints)  # and none is lost


def test_a_query_and_what_it_reaches(page, url):
    show(page, url, pattern="window:100/0", tokens=1000, block_size=16)
    page.mouse.click(*mask_point(page, 700, 300))
    settled(page)
    query = int(page.get_by_label("Query", exact=True).input_value())
    assert abs(query - 700) <= 2
    assert page.locator("#sees").inner_text() == f"Query {query} of head 0 sees 101 keys: {query - 100}–{query}."
    assert colours(page, (query, query - 50), (query, query - 200)) == [ROW, [255, 255, 255]]
    page.get_by_label("Layers").fill("3")
    settled(page)
    rows = page.locator("#reach tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        [str(n), str(100 * n + 1), str(query - 100 * n), str(query)] for n in (1, 2, 3)
    ]
    strip = page.evaluate(
        """query => {
            const canvas = document.getElementById("strips"), scale = canvas.width / view.span;
            const x = (query - 250 - view.key) * scale, high = canvas.height / 3, context = canvas.getContext("2d");
            return [0, 1, 2].map(layer => [...context.getImageData(x, (layer + .5) * high, 1, 1).data.slice(0, 3)]);
        }""",
        query,
    )
    assert strip == [EMPTY, EMPTY, ROW]  # 250 tokens back takes three layers
    page.get_by_label("Query", exact=True).fill("")
    settled(page)
    assert not page.locator("#reach").is_visible()


def test_grouped_heads_and_batch(page):
    page.get_by_label("Key heads").fill("2")
    page.get_by_label("Batch").fill("3")
    settled(page)
    assert "k, v = (torch.randn(3, 4096, 2, 64" in page.locator("#code").inner_text()
    assert "3 × 4,096 × 8 (keys 2) × 64" in page.locator("#rows").inner_text()
    dense = page.locator("#dense").inner_text()
    assert "Dense forward\n103.1 GFLOP" in dense.replace("\t", "\n")


def test_blocks_chosen_from_the_content(page):
    assert page.get_by_label("Budget").is_disabled()
    page.locator("#tokens").fill("1024")
    page.locator("#block_size").select_option("32")
    page.get_by_label("Causal: no query").check()
    page.get_by_label("Scorer").select_option("patches")
    settled(page)
    assert "Mass kept by the choice" in page.locator("#rows").inner_text()
    assert "select_blocks(q, k" in page.locator("#code").inner_text()
    before = page.locator("#big").inner_text()
    page.get_by_label("Blocks kept, %").fill("60")
    settled(page)
    assert page.locator("#big").inner_text() != before
    page.get_by_role("button", name="Hugging Face").click()
    assert page.locator("#code").inner_text().startswith("# register takes patterns")


def test_python_can_be_copied_and_runs(page):
    page.locator("#tokens").fill("300")
    page.locator("#dtype").select_option("float32")
    settled(page)
    page.get_by_role("button", name="Copy").click()
    until(page, "document.getElementById('copy').textContent !== 'Copy'")
    made = {}
    exec(page.locator("#code").inner_text(), made)
    assert made["out"].shape == (1, 300, 8, 64)


def test_the_code_for_a_model_of_transformers(page):
    page.get_by_role("button", name="Hugging Face").click()
    assert page.get_by_role("button", name="Hugging Face").get_attribute("aria-pressed") == "true"
    code = page.locator("#code").inner_text()
    assert 'register("my_pattern", pattern)' in code
    compile(code, "page", "exec")


def test_the_address_restores_everything(page, url):
    page.get_by_role("button", name="Combine with another").click()
    page.locator(".joiner select").select_option("&")
    for label, value in (("Key heads", "4"), ("Batch", "2"), ("Head width", "32"), ("Layers", "7"), ("Head", "5")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Causal: no query").check()
    page.get_by_label("Training").check()
    page.get_by_label("Device").select_option("H200")
    page.get_by_label("Numbers").select_option("float16")
    page.get_by_label("Scorer").select_option("mean")
    page.get_by_label("Budget").select_option("shared")
    page.get_by_label("Blocks kept, %").fill("40")
    page.get_by_role("button", name="Hugging Face").click()
    settled(page)
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_label("Query", exact=True).fill("1500")
    settled(page)

    def state():
        fields = page.evaluate(
            "[...document.querySelectorAll('input, select')].map(e => e.type === 'checkbox' ? e.checked : e.value)"
        )
        return (
            fields,
            page.evaluate("[view, tab]"),
            page.locator("#code").inner_text(),
            page.locator("#sees").inner_text(),
        )

    before, shared = state(), page.url
    page.goto("about:blank")
    page.goto(shared)
    settled(page)
    assert state() == before
    assert page.evaluate("view") == {"query": 1024, "key": 1024, "span": 2048}


def test_the_address_holds_a_pattern_that_was_written_by_hand(page):
    page.get_by_label("Write it myself").check()
    page.get_by_label("In words").fill("causal & (window:77 | global:3)")
    page.get_by_label("Causal: no query").check()
    settled(page)
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    settled(page)
    assert page.get_by_label("Write it myself").is_checked()
    assert page.get_by_label("In words").input_value() == "causal & (window:77 | global:3)"
    assert "SlidingWindow(left=77, right=77)" in page.locator("#code").inner_text()


def test_what_was_written_by_hand_becomes_fields_again_where_it_can(page):
    page.get_by_label("Write it myself").check()
    page.get_by_label("In words").fill("window:9/3 + global:5 & causal")
    page.get_by_label("Write it myself").uncheck()
    settled(page)
    assert page.get_by_label("In words").input_value() == "window:9/3 | global:5 & causal"
    assert page.get_by_label("Kind").input_value() == "window"
    assert page.get_by_label("Left").input_value() == "9"


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("zoomed", [False, True])
def test_pictures_can_be_saved(page, url, zoomed):
    region = {"first_query": 1000, "first_key": 900, "span": 200} if zoomed else {}
    show(page, url, pattern="window:100/0", tokens=2048, query=1100, **region)
    OUTPUT.mkdir(exist_ok=True)
    made = {}
    for ending in ("svg", "png"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save as {ending.upper()}").click()
        assert download.value.suggested_filename == f"window-100-0.{ending}"
        made[ending] = OUTPUT / f"saved{'_zoomed' * zoomed}.{ending}"
        download.value.save_as(made[ending])
    root = ElementTree.parse(made["svg"]).getroot()
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == "window:100/0, head 0"
    assert {"keys", "queries", "seen by query 1,100"} <= set(words)
    assert {"1,000", "1,200", "900", "1,100"} <= set(words) if zoomed else {"0", "2,048"} <= set(words)
    scale = 640 / (200 if zoomed else 2048)
    area = dict.fromkeys(("full", "row"), 0.0)
    tints = {"rgb(31 78 140)": "full", "rgb(179 22 107)": "row"}
    for box in list(root.iter(f"{SVG}rect"))[1:]:
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 70 - 1e-6
        assert x + width <= 710.1
        if box.get("fill") in tints and y < 64 + 640:
            area[tints[box.get("fill")]] += width * height
    if zoomed:  # pairs: a query of 1,000–1,199 sees 101 keys, of which those below 1,100 are drawn
        seen = sum(min(101, max(0, 1100 - (query - 100))) for query in range(1000, 1200))
        assert area["full"] == pytest.approx(seen * scale**2, rel=0.01)
        assert area["row"] == pytest.approx(100 * scale * max(8, scale), rel=0.01)
    image = made["png"].read_bytes()
    assert image.startswith(b"\x89PNG")
    sizes = [float(root.get(name)) for name in ("width", "height")]
    assert [int.from_bytes(image[at : at + 4]) for at in (16, 20)] == [2 * size for size in sizes]
    assert math.prod(sizes) > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["first", "query", "error", "content"])
def test_everyone_can_use_it(page, url, scheme, state):
    page.emulate_media(color_scheme=scheme)
    words = {
        "first": {},
        "query": {"query": 900, "tab": "register"},
        "error": {"pattern": "windo:3"},
        "content": {"tokens": 512, "scorer": "mean", "pattern": "window:100 | global:3"},
    }[state]
    if state == "error":
        page.get_by_label("Write it myself").check()
        page.get_by_label("In words").fill("windo:3")
        settled(page)
    elif words:
        show(page, url, **words)
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshots(page, url, scheme):
    """Nothing to scroll sideways, and dark is dark."""
    OUTPUT.mkdir(exist_ok=True)
    page.emulate_media(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark")
    show(page, url, pattern="window:512/0 | global:64", tokens=8192, causal=1, query=5000, training=1)
    for name, width in (("wide", 1400), ("middle", 900), ("narrow", 420)):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=OUTPUT / f"{scheme}_{name}.png", full_page=True)
