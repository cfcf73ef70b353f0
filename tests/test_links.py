"""tools/check_links.py, over a small site and a small server."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        import check_links

        return check_links


def site_of(folder, **pages):
    (folder / "more").mkdir()
    (folder / "picture.png").write_bytes(b"")
    for name, body in pages.items():
        (folder / f"{name.replace('_', '/')}.html").write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    return folder


WHOLE = {
    "index": '<h1 id="top">a</h1><a href="more/b.html#there">b</a><img src="picture.png"><a href="#top">up</a>',
    "more_b": '<a name="there"></a><a href="../index.html?x=1#top">a</a><a href="..">a</a><a href="mailto:a@b.c"></a>',
}


def test_a_whole_site(tool, tmp_path, capsys):
    assert tool.main([str(site_of(tmp_path, **WHOLE))]) == 0
    assert capsys.readouterr().out == "2 pages, 6 links, 0 addresses of other sites not asked, 0 broken\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="nothing.html">x</a>', "more/b.html: nothing.html: no such file"),
        ('<img src="../nothing.png">', "more/b.html: ../nothing.png: no such file"),
        ('<a href="#nowhere">x</a>', "more/b.html: #nowhere: no such id"),
        ('<a href="../index.html#nowhere">x</a>', "more/b.html: ../index.html#nowhere: no such id"),
        ('<script src="../nothing.js"></script>', "more/b.html: ../nothing.js: no such file"),
        ('<a href="/more/nothing.html">x</a>', "more/b.html: /more/nothing.html: no such file"),
    ],
)
def test_a_broken_link_is_named(tool, tmp_path, capsys, body, said):
    assert tool.main([str(site_of(tmp_path, **WHOLE | {"more_b": f'<a id="there"></a>{body}'}))]) == 1
    assert capsys.readouterr().err == f"broken: {said}\n"


def test_no_site_is_an_error(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path)])
    assert "site must be a folder with pages" in capsys.readouterr().err


class Answers(BaseHTTPRequestHandler):
    """/404 is answered with 404, and so on."""

    def do_GET(self):
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_other_sites_are_asked_only_when_told_to(tool, tmp_path, capsys, server):
    links = "".join(f'<a href="{server}/{code}#x">x</a>' for code in (200, 403, 404))
    closed = "http://127.0.0.1:9/"
    site = str(site_of(tmp_path, index=f'{links}<a href="{closed}">x</a>'))
    assert tool.main([site]) == 0
    assert "4 addresses of other sites not asked, 0 broken" in capsys.readouterr().out
    assert tool.main([site, "--outside"]) == 1
    printed = capsys.readouterr()
    assert f"try by hand: {server}/403: 403 (index.html)" in printed.out
    first, second = printed.err.splitlines()
    assert first == f"broken: {server}/404: 404 (index.html)"
    assert second.startswith(f"broken: {closed}: ")
    assert "refused" in second
