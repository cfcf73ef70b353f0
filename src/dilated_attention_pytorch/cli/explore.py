"""`dilated-attention explore`: a page on this machine where a pattern is picked and seen.

    GET /             the page, `explore.html`, with everything in it
    GET /api/options  what there is to pick
    GET /api/layout   a call in words → its mask in cells, blocks, density, cost, memory plan and Python

Every number is the library's; an error is the library's sentence, with status 400. The server listens on 127.0.0.1
alone, answers only requests that name it so (a page elsewhere cannot reach it by a name of its own), reads no file but
the page, and works on one request at a time, none of which may be larger than `LIMITS`.
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl

import torch
from rich.console import Console

from ..memory.devices import GPUS, Device
from ..patterns import Branches, Pattern
from ..patterns.blocks import BLOCK_SIZES
from ..patterns.naming import NAMES, form_of
from ..planning import AttentionConfig, plan_memory
from ..planning.counting import lists_of_branches, lists_of_pattern
from ..viz.memory import KIND_COLOURS
from ..viz.states import picture
from .call import BLOCK_SIZE, DTYPES, Call
from .output import Document
from .plan import as_document

PAGE = Path(__file__).with_name("explore.html")
CELLS = 256  # a side of the picture
LIMITS = {"tokens": 1 << 20, "heads": 64, "head_dim": 256, "blocks": 1 << 20}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def options() -> Document:
    """What the page offers."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *GPUS]
    return {
        "names": [
            {
                "name": name,
                "form": form_of(name),
                "meaning": known.meaning,
                "arguments": [argument.label for argument in known.arguments],
                "example": list(known.example),
            }
            for name, known in NAMES.items()
        ],
        "block_sizes": list(BLOCK_SIZES),
        "dtypes": list(DTYPES),
        "devices": devices,
        "kinds": KIND_COLOURS,
        "limits": LIMITS,
    }


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the page asks about; `read` takes it from the words of a request."""

    pattern: str = "window:512"
    tokens: int = 4096
    heads: int | None = None
    head: int = 0
    shown: int | None = None  # tokens that are drawn
    head_dim: int = 64
    block_size: int | None = None
    causal: bool = False
    dtype: str = "bfloat16"
    device: str = "cpu"
    training: bool = False

    @classmethod
    def read(cls, words: Mapping[str, str]) -> Question:
        given: dict[str, Any] = {}
        for name, word in words.items():
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"a request may name {', '.join(cls.__dataclass_fields__)}, got {name!r}")
            kind = cls.__dataclass_fields__[name].type
            if kind == "str":
                given[name] = word
            elif kind == "bool":
                if word not in ("0", "1"):
                    raise ValueError(f"{name} must be 0 or 1, got {word!r}")
                given[name] = word == "1"
            elif not word.isascii() or not word.isdecimal() or len(word) > 12:
                raise ValueError(f"{name} must be a positive integer, got {word!r}")
            else:
                given[name] = int(word)
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LIMITS[name]:
                raise ValueError(f"{name} must be from 1 to {LIMITS[name]:,} on this page, got {value:,}")
        for name, known in (("dtype", DTYPES), ("device", options()["devices"])):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")


def describe(question: Question) -> Document:
    """All that the page shows of a call."""
    call = Call.named(
        question.pattern,
        tokens=question.tokens,
        block_size=question.block_size,
        is_causal=question.causal,
        heads=question.heads,
        head_dim=question.head_dim,
        dtype=DTYPES[question.dtype],
    )
    if not question.head < call.heads:
        raise ValueError(f"head must be from 0 to {call.heads - 1}, got {question.head}")
    _refuse_too_many(call)
    layout = call.layout()
    drawn = picture(layout, CELLS, head=question.head, tokens=question.shown)
    device = Device.of(question.device)
    plan = plan_memory(
        AttentionConfig(pattern=call.what, heads=call.heads, head_dim=call.head_dim),
        call.tokens,
        dtype=call.dtype,
        training=question.training,
        is_causal=call.is_causal,
        block_size=call.block_size,  # type: ignore[arg-type]
        device=device,
    )
    return {
        **call.figures(layout),
        "head": question.head,
        "cells": ["".join(map(str, row)) for row in drawn.cells.tolist()],
        "cell_tokens": list(drawn.tokens),
        "shown": min(question.shown or call.tokens, call.tokens),
        "note": drawn.note,
        "plan": as_document(plan),
        "code": call.code(device.type),
    }


def _refuse_too_many(call: Call) -> None:
    """By arithmetic, before any list is built."""
    if isinstance(call.what, Branches):
        lists = lists_of_branches(call.what, call.tokens, call.heads, call.is_causal)
    else:
        assert isinstance(call.what, Pattern)
        lists = lists_of_pattern(call.what, call.tokens, call.tokens, call.block_size or BLOCK_SIZE)
    if lists.blocks > LIMITS["blocks"]:
        raise ValueError(
            f"this page draws at most {LIMITS['blocks']:,} active blocks, and these are about {lists.blocks:,}: "
            "take fewer tokens, larger blocks or a sparser pattern"
        )


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
            self._send(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif path == "/api/options":
            self._answer(HTTPStatus.OK, options())
        elif path == "/api/layout":
            self._answer(*self._described(query))
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"there is nothing at {path}"})

    def _described(self, query: str) -> tuple[HTTPStatus, Document]:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20)
            words = dict(pairs)
            if len(words) < len(pairs):
                raise ValueError("a request may name each of its words once")
            with self.server.working:
                return HTTPStatus.OK, describe(Question.read(words))
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
