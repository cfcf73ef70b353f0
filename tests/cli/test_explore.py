"""The explorer's server: what it answers is what the library says, and to whom."""

import http.client
import json
import re
import socket
import threading
from urllib.parse import urlencode

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, SlidingWindow, block_sparse_attention, plan_memory
from dilated_attention_pytorch.cli import explore
from dilated_attention_pytorch.viz import block_states
from tests.cli.commands import run


@pytest.fixture(scope="module")
def server():
    with explore.Server(0) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server, path, *, method="GET", host=None, **words):
    """Status, headers, body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path + ("?" + urlencode(words) if words else ""), skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def asked(server, **words):
    status, _, body = get(server, "/api/layout", **words)
    return status, json.loads(body)


def test_the_page_brings_everything_with_it(server):
    status, headers, body = get(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    page = body.decode()
    assert not re.search(r"(src|href)=[\"'](?!data:)|@import|url\(|https?:", page)
    assert page.count("<script>") == 1


def test_a_layout_in_cells_figures_plan_and_code(server):
    status, found = asked(server, pattern="window:40/0", tokens=256, block_size=16, heads=2, head_dim=16,
                          dtype="float64", training=1)  # fmt: skip
    assert status == 200
    layout = BlockLayout.from_pattern(SlidingWindow(40, 0), 256, block_size=16)
    assert [[int(cell) for cell in row] for row in found["cells"]] == block_states(layout).tolist()
    assert (found["active_blocks"], found["density"]) == (layout.num_active_blocks, pytest.approx(layout.density))
    plan = plan_memory(SlidingWindow(40, 0), 256, 1, torch.float64, True, heads=2, head_dim=16, block_size=16,
                       device="cpu")  # fmt: skip
    assert found["plan"]["peak_bytes"] == plan.peak_bytes
    assert found["plan"]["phases"] == plan.phases
    made = {}
    exec(found["code"], made)
    want = block_sparse_attention(made["q"], made["k"], made["v"], layout, backend="reference")
    assert (made["out"] - want).abs().max() < 1e-12
    assert made["layout"].blocks == (16, 16)


def test_the_picture_is_bounded_and_part_of_it_can_be_drawn(server):
    _, whole = asked(server, pattern="longnet:64,256/1,4", tokens=2048, head=3)
    assert (len(whole["cells"]), whole["cell_tokens"], whole["note"]) == (256, [8, 8], "a cell is 8 x 8 tokens")
    _, part = asked(server, pattern="longnet:64,256/1,4", tokens=2048, head=3, shown=100)
    assert part["cell_tokens"] == [1, 1]
    want = [["02"[i // 64 == j // 64 or (i // 256 == j // 256 and i % 4 == j % 4 == 3)] for j in range(100)]
            for i in range(100)]  # fmt: skip
    assert part["cells"] == ["".join(row) for row in want]


def test_options_are_what_the_library_has(server):
    status, _, body = get(server, "/api/options")
    found = json.loads(body)
    assert status == 200
    assert "H200" in found["devices"]
    for name in found["names"]:
        text = name["name"] + (":" + "/".join(name["example"]) if name["example"] else "")
        status, answer = asked(server, pattern=text)  # the examples are for the length that the page begins with
        assert status == 200, answer
        assert len(name["arguments"]) == len(name["example"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"pattern": "windo:3"}, "'windo' is none of full"),
        ({"pattern": "window:-3"}, "left must be at least 0, got -3"),
        ({"pattern": "documents:3,4", "tokens": 8}, "the lengths of Documents must add up to seq_k = 8, got 7"),
        ({"pattern": "x" * 5000}, "at most 4096 characters"),
        ({"pattern": "full", "tokens": 1 << 20}, "this page draws at most 1,048,576 active blocks"),
        ({"pattern": "longnet:1048576/1", "tokens": 1 << 20}, "this page draws at most"),
        ({"tokens": (1 << 20) + 1}, "tokens must be from 1 to 1,048,576 on this page"),
        ({"tokens": 0}, "tokens must be from 1"),
        ({"tokens": "1e3"}, "tokens must be a positive integer, got '1e3'"),
        ({"tokens": "9" * 500}, "tokens must be a positive integer"),
        ({"shown": 0}, "tokens must be at least 1, got 0"),
        ({"heads": 65}, "heads must be from 1 to 64"),
        ({"head": 8}, "head must be from 0 to 7, got 8"),
        ({"block_size": 17}, "block_size must be one of"),
        ({"pattern": "longnet", "block_size": 64}, "block_size is chosen by dilated attention itself, got 64"),
        ({"causal": "yes"}, "causal must be 0 or 1, got 'yes'"),
        ({"dtype": "int8"}, "dtype must be one of float64"),
        ({"device": "/etc/passwd"}, "device must be one of cpu"),
        ({"file": "x"}, "a request may name pattern"),
        ({"pattern": "layouts/x.safetensors"}, "is none of full"),
    ],
)
def test_bad_input_is_answered_with_the_librarys_sentence(server, words, message):
    status, found = asked(server, **words)
    assert status == 400
    assert message in found["error"]
    assert set(found) == {"error"}


@pytest.mark.parametrize("query", ["pattern=full&pattern=causal", "tokens", "&".join(f"a{i}=1" for i in range(30))])
def test_broken_queries(server, query):
    status, _, body = get(server, f"/api/layout?{query}")
    assert status == 400
    assert json.loads(body)["error"]


def test_only_this_machine_and_only_by_its_name(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/api/options", "/api/layout?pattern=full"):
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert get(server, path, host=host)[0] == 403
        assert get(server, path, host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/explore.html", "/../app.py", "/api", "/api/layout/"])
def test_nothing_else_is_served(server, path):
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_but_get(server, method):
    assert get(server, "/api/options", method=method)[0] == 501


def test_a_port_that_is_taken(server):
    code, out, err = run("explore", "--port", str(server.server_port), "--no-browser")
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"error: port {server.server_port} of 127.0.0.1 cannot be used \(.*\): .*\n", err)


def test_the_command_serves_until_it_is_interrupted(monkeypatch):
    opened = []

    def interrupted(server):
        with socket.create_connection(server.server_address):
            raise KeyboardInterrupt

    monkeypatch.setattr(explore.Server, "serve_forever", interrupted)
    monkeypatch.setattr(explore.webbrowser, "open", opened.append)
    code, out, err = run("explore", "--port", "0", "--json")
    assert (code, err) == (0, "")
    assert opened == [json.loads(out)["url"]]
    code, out, _ = run("explore", "--port", "0", "--no-browser")
    assert re.match(r"Serving http://127\.0\.0\.1:\d+/ to this machine alone", out)
    assert len(opened) == 1
