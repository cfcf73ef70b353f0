"""Follow the links of a built site, and with --outside those that lead to other sites, too.

    make docs && python tools/check_links.py site
    python tools/check_links.py site --outside     # needs the internet; some minutes

Within the site every href and src must lead to a file, and its fragment to an id on that page. Outside a link is broken
if its server answers with 400 or more; a server that cannot be reached is named and counts as broken, too. Some servers
refuse all programs (403, 429): those are listed apart, to be tried by hand. Exit status 1 if a link is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import Request, urlopen

SECONDS, AT_ONCE = 20, 8
REFUSES_PROGRAMS = {401, 403, 405, 429}
HEADERS = {"User-Agent": "Mozilla/5.0 (link check)"}


@dataclass
class Page(HTMLParser):
    """What a page refers to, and what can be referred to on it."""

    targets: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids |= {each for each in (named.get("id"), named.get("name")) if each}
        if tag == "link" and named.get("rel") in ("canonical", "preconnect"):
            return
        self.targets += [each for each in (named.get("href"), named.get("src")) if each]


def read(site: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def broken_inside(site: Path, pages: Mapping[Path, Page]) -> list[str]:
    """Of each broken link, the page, the link and what is wrong."""
    found = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            if not _is_inside(target):
                continue
            place, fragment = urldefrag(target)
            # 404.html is served at any address, so its links begin at the root of the site.
            start = site if place.startswith("/") else path.parent
            there = (start / unquote(urlsplit(place).path).lstrip("/")).resolve() if place else path.resolve()
            there = there / "index.html" if there.is_dir() else there
            own = pages.get(site / there.relative_to(site.resolve())) if there.is_relative_to(site.resolve()) else None
            if not there.exists():
                found.append(f"{path.relative_to(site)}: {target}: no such file")
            elif fragment and own is not None and unquote(fragment) not in own.ids:
                found.append(f"{path.relative_to(site)}: {target}: no such id")
    return found


def outside(pages: Mapping[Path, Page]) -> dict[str, list[Path]]:
    """Every address of another site, without its fragment, and the pages that name it."""
    found = defaultdict(list)
    for path, page in pages.items():
        for target in dict.fromkeys(urldefrag(target)[0] for target in page.targets):
            if urlsplit(target).scheme in ("http", "https"):
                found[target].append(path)
    return dict(found)


def asked(addresses: Iterable[str]) -> dict[str, int | str]:
    """The status that each server answers with, or why it could not be asked."""
    wanted = list(addresses)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(_status, wanted), strict=True))


def _is_inside(target: str) -> bool:
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc


def _status(address: str) -> int | str:
    try:
        with urlopen(Request(address, headers=HEADERS), timeout=SECONDS) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except OSError as error:
        return str(getattr(error, "reason", error))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that `make docs` writes")
    parser.add_argument("--outside", action="store_true", help="ask other sites, too")
    args = parser.parse_args(argv)
    pages = read(args.site)
    if not pages:
        parser.error(f"site must be a folder with pages, got {args.site}")
    wrong = broken_inside(args.site, pages)
    others = outside(pages)
    if args.outside:
        for address, status in asked(others).items():
            line = f"{address}: {status} ({others[address][0].relative_to(args.site)})"
            if status in REFUSES_PROGRAMS:
                print(f"try by hand: {line}")
            elif isinstance(status, str) or status >= 400:
                wrong.append(line)
    for line in wrong:
        print(f"broken: {line}", file=sys.stderr)
    followed = sum(len(page.targets) for page in pages.values())
    names = f"{len(others)} addresses of other sites {'asked' if args.outside else 'not asked'}"
    print(f"{len(pages)} pages, {followed:,} links, {names}, {len(wrong)} broken")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
