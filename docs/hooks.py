"""What the site needs beside the pages of this folder; mkdocs calls these functions (`hooks` in mkdocs.yml).

CHANGELOG, CONTRIBUTING and SECURITY become pages as they stand; index.md stands in for README. Notebooks become pages
with the outputs that they store. A link to another file of the repository leads to a copy of it in the site. Where
docs/images has NAME-dark.png, a picture NAME.png is shown on light pages and the other on dark ones. A built page that
would fetch something from elsewhere ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent.parent
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
README = "index.md"
COPIES = "repository"
PICTURE = re.compile(r"!\[([^]]*)\]\(((?:[\w./-]+/)?images/[\w-]+)\.png\)")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
ELSEWHERE = r"""=["']?(?:https?:)?//"""
FETCHED = re.compile(
    rf"<(?:script|img|iframe|source)\b[^>]*\bsrc{ELSEWHERE}|<link\b[^>]*\brel=.?(?:stylesheet|pre|icon)[^>]*\bhref{ELSEWHERE}"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        _add_notebook(notebook, files, config)
    linked = {target for file in files.documentation_pages() for target in _targets(file)}
    for target in sorted(linked):
        if target.startswith(f"{COPIES}/"):
            path = ROOT / target.removeprefix(f"{COPIES}/")
            files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)
    linked = LINK.sub(lambda link: posixpath.relpath(_target(page.file.src_uri, link[1]), here or "."), markdown)
    return PICTURE.sub(lambda picture: _light_and_dark(picture, page.file), linked)


def on_post_build(config: MkDocsConfig) -> None:
    for page in Path(config.site_dir).rglob("*.html"):
        found = FETCHED.search(page.read_text())
        if found:
            raise PluginError(f"{page} fetches something from elsewhere: {found[0]}")


def _add_notebook(path: Path, files: Files, config: MkDocsConfig) -> None:
    notebook = nbformat.read(path, as_version=4)
    text, resources = MarkdownExporter().from_notebook_node(notebook, {"unique_key": path.stem})
    text = text.replace("![png](", "![What the cell above draws](")
    files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for name, content in resources["outputs"].items():
        files.append(File.generated(config, f"notebooks/{name}", content=content))


def _light_and_dark(picture: re.Match[str], file: File) -> str:
    alt, name = picture.groups()
    if not (ROOT / "docs" / posixpath.dirname(file.src_uri) / f"{name}-dark.png").exists():
        return picture[0]
    return f"![{alt}]({name}.png#only-light)![{alt}]({name}-dark.png#only-dark)"


def _targets(file: File) -> set[str]:
    return {_target(file.src_uri, link) for link in LINK.findall(file.content_string)}


def _target(page: str, link: str) -> str:
    """Where in the site a link of a page leads: a page, a file of docs/, or a copy of a file of the repository."""
    source = PAGES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    for generated, original in {**PAGES, README: "README.md"}.items():
        if path == original:
            return generated
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{COPIES}/{path}" if (ROOT / path).is_file() else link
