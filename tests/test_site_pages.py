"""The built site in headless Chromium, opened from the disk: `make test-page`. Skipped where there is none.

Every page, light and dark, wide and narrow, is looked at for contrast, labels and keyboard; screenshots are left in
`page_output` to be looked at by a person.
"""

from pathlib import Path

import pytest

from tests.browser import OUTPUT, chromium, needs_browser, until, violations

SITE = Path(__file__).parents[1] / "site"
# 404.html is served at any address, so it finds its style sheets on a server alone.
HTML = [path for path in SITE.rglob("*.html") if path.parent.name != "repository" and path.name != "404.html"]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in HTML)
SIZES = {"wide": (1280, 900), "narrow": (390, 800)}

pytestmark = [needs_browser, pytest.mark.skipif(not PAGES, reason="needs the site: make test-page")]


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture(params=SIZES)
def size(request):
    return request.param


@pytest.fixture
def page(browser, scheme, size):
    """Whatever a page logs as an error, or asks of another site, fails the test."""
    width, height = SIZES[size]
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
    )
    yield page
    context.close()
    assert wrong == []


def opened(page, name):
    page.goto((SITE / name).as_uri())
    until(page, "document.documentElement.classList.contains('js')")


# Narrow, where tables scroll and the navigation folds.
TRIED_NARROW = {"index.html", "performance.html", "concepts.html", "cli.html", "huggingface.html", "api/operators.html"}


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in PAGES for size in SIZES if size == "wide" or name in TRIED_NARROW],
    indirect=["size"],
)
def test_everybody_can_use_it(page, name, scheme, size):
    opened(page, name)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll by themselves
    assert page.evaluate("[...document.images].every(image => image.alt !== '')")
    if name in ("index.html", "performance.html", "concepts.html", "cli.html"):
        OUTPUT.mkdir(exist_ok=True)
        page.screenshot(path=OUTPUT / f"site-{Path(name).stem}-{scheme}-{size}.png", full_page=True)


def test_pictures_are_those_of_the_scheme(page, scheme):
    opened(page, "index.html")
    shown = page.evaluate("[...document.images].filter(each => each.offsetWidth).map(each => each.src)")
    assert [Path(source.split("#")[0]).name for source in shown] == [
        "patterns.png" if scheme == "light" else "patterns-dark.png"
    ]
    assert page.evaluate("[...document.images].every(each => each.complete && each.naturalWidth > 500)")


def test_search_finds_from_the_disk_and_by_the_keyboard(page, size):
    opened(page, "index.html")
    page.keyboard.press("/")
    until(page, "document.activeElement.matches('.md-search__input')")
    page.keyboard.type("dilation")
    until(page, "document.querySelectorAll('.md-search-result__item').length > 2")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*.html?h=dilation*")  # another page, with what was searched marked, and loaded
    until(page, "/dilation/i.test(document.body.textContent)")


def test_the_keyboard_comes_first_to_the_content(page):
    opened(page, "quickstart.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip')")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash.length > 1 && !!document.querySelector(location.hash)")
