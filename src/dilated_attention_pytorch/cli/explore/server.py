"""The server of the page.

    GET /             the page, made of the files of `page/`, with everything in it
    GET /api/options  what there is to pick
    GET /api/layout   a call in words → its figures, memory plan and Python, and what /api/view has
    GET /api/view     the same words → the part of the mask that is looked at, and what one query sees and reaches

An error is the library's sentence, with status 400. The server listens on 127.0.0.1 alone, answers only requests that
name it so (a page elsewhere cannot reach it by a name of its own), reads no file but those of the page, and works on
one request at a time, none of which may be larger than `LIMITS`.
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qsl

from rich.console import Console

from ..output import Document
from .answer import describe, view
from .question import Question, options

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("tools", "mask", "sides", "export", "main")  # in this order
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page() -> bytes:
    """One document with its style and its scripts inside."""
    text = (PAGE / "page.html").read_text(encoding="utf-8")
    script = "\n".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    return text.replace("/* page.css */", style).replace("/* scripts */", script).encode()


class Handler(BaseHTTPRequestHandler):
    """GET, and nothing else."""

    server: Server
    server_version = "dilated-attention"
    sys_version = ""
    timeout = 30  # of a connection that sends nothing

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, {"error": "ask for this page by 127.0.0.1 or localhost"})
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            self._send(HTTPStatus.OK, page(), "text/html; charset=utf-8")
        elif path == "/api/options":
            self._answer(HTTPStatus.OK, options())
        elif path == "/api/layout":
            self._answer(*self._answered(query, describe))
        elif path == "/api/view":
            self._answer(*self._answered(query, view))
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"there is nothing at {path}"})

    def _answered(self, query: str, answer: Callable[[Question], Document]) -> tuple[HTTPStatus, Document]:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=40)
            words = dict(pairs)
            if len(words) < len(pairs):
                raise ValueError("a request may name each of its words once")
            with self.server.working:
                return HTTPStatus.OK, answer(Question.read(words))
        except (ValueError, TypeError, MemoryError) as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error) or type(error).__name__}

    def _answer(self, status: HTTPStatus, document: Document) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **SECURITY}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the page shows what went wrong."""


class Server(ThreadingHTTPServer):
    """On 127.0.0.1, at a port; 0 takes a free one."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.working = Lock()
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


def run(console: Console, *, port: int, browser: bool, as_json: bool) -> Document:
    """Serve until it is interrupted."""
    try:
        server = Server(port)
    except OSError as error:
        raise OSError(
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}): --port 0 takes a free one"
        ) from error
    document = {"url": server.url}
    with server:
        if as_json:
            print(json.dumps(document), flush=True)
        else:
            console.print(f"Serving {server.url} to this machine alone; Ctrl-C ends it.", soft_wrap=True)
        if browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return document
