"""The explorer's server: what it answers is what the library says, and to whom."""

import http.client
import json
import re
import socket
import threading
from urllib.parse import urlencode

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Full,
    PerHead,
    SlidingWindow,
    TopK,
    block_sparse_attention,
    kept_mass,
    plan_memory,
    select_blocks,
)
from dilated_attention_pytorch.cli import explore
from dilated_attention_pytorch.cli.explore import server as serving
from dilated_attention_pytorch.cli.explore.samples import sample_activations
from dilated_attention_pytorch.viz import State, block_states
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


def asked(server, what="layout", **words):
    status, _, body = get(server, f"/api/{what}", **words)
    return status, json.loads(body)


def states(found):
    """The state of every cell, of the thousandths that the page gets."""
    partial, full = torch.tensor(found["partial"]), torch.tensor(found["full"])
    return torch.where(full == 1000, State.FULL, torch.where(full + partial > 0, State.PARTIAL, State.EMPTY))


def test_the_page_brings_everything_with_it(server):
    status, headers, body = get(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    page = body.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nobody fetches
    assert not re.search(r"(src|href)=[\"'](?!data:)|@import|url\(|https?:", page)
    assert page.count("<script>") == 1


def test_a_layout_in_cells_figures_plan_and_code(server):
    status, found = asked(server, pattern="window:40/0", tokens=256, block_size=16, heads=2, head_dim=16,
                          dtype="float64", training=1)  # fmt: skip
    assert status == 200
    layout = BlockLayout.from_pattern(SlidingWindow(40, 0), 256, block_size=16)
    assert states(found).tolist() == block_states(layout).tolist()
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
    words = {"pattern": "longnet:64,256/1,4", "tokens": 2048, "head": 3}
    _, whole = asked(server, **words)
    assert (states(whole).shape, whole["cell_tokens"], whole["note"]) == ((256, 256), [8, 8], "a cell is 8 x 8 tokens")
    _, part = asked(server, "view", **words, first_query=300, first_key=260, span=100)
    assert (part["cell_tokens"], part["first"]) == ([1, 1], [300, 260])
    want = [[2 * (i // 64 == j // 64 or (i // 256 == j // 256 and i % 4 == j % 4 == 3)) for j in range(260, 360)]
            for i in range(300, 400)]  # fmt: skip
    assert states(part).tolist() == want
    assert set(part) < set(whole)


def test_shares_are_rounded_to_neither_end(server):
    """A cell of 16 x 16 blocks that holds one, a full one, is neither empty nor partial nor full."""
    _, found = asked(server, pattern="random:1", tokens=1 << 19)
    full = torch.tensor(found["full"])
    assert not torch.tensor(found["partial"]).any()
    assert 0 < full[full > 0].min() < 10
    _, found = asked(server, pattern="causal", tokens=1 << 17, block_size=128, heads=1)
    partial, full = (torch.tensor(found[name]).diagonal() for name in ("partial", "full"))
    assert (partial == 250).all()
    assert (full == 375).all()


def test_one_query_and_what_it_reaches(server):
    _, found = asked(server, "view", pattern="window:100/0 | global:3", tokens=1000, query=700, layers=3)
    row = found["row"]
    assert (row["keys"], row["runs"], row["more_runs"]) == (104, [[0, 2], [600, 700]], 0)
    assert [layer["tokens"] for layer in row["reach"]] == [
        104,
        204,
        304,
    ]  # the first three have each other from the start
    assert [(layer["first"], layer["last"]) for layer in row["reach"]] == [(0, 700)] * 3
    assert (row["strip_first"], row["strip_tokens"]) == (0, 4)
    assert row["needed"][500 // 4] == 2
    assert row["needed"][900 // 4] == 0
    assert [i for i, seen in enumerate(row["seen"]) if seen] == [0, *range(150, 176)]
    _, found = asked(server, "view", pattern="window:100/0", tokens=1000, query=700, first_key=650, span=64)
    assert (found["row"]["strip_first"], found["row"]["strip_tokens"]) == (650, 1)
    assert found["row"]["seen"] == [1] * 51 + [0] * 13
    _, found = asked(server, "view", pattern="documents:300,700", tokens=1000, query=0, layers=1)
    assert found["row"]["reach"] == [{"layer": 1, "tokens": 300, "first": 0, "last": 299}]


def test_more_runs_than_are_named(server):
    _, found = asked(server, "view", pattern="longnet:1000/7", tokens=1000, heads=7, head=2, query=2)
    assert found["row"]["keys"] == 143
    assert (len(found["row"]["runs"]), found["row"]["more_runs"]) == (8, 135)


def test_grouped_heads_and_batch(server):
    words = {"pattern": "window:40/0", "tokens": 256, "block_size": 16, "heads": 6, "heads_kv": 2, "batch": 3,
             "dtype": "float32", "head_dim": 16}  # fmt: skip
    _, found = asked(server, **words)
    layout = BlockLayout.from_pattern(SlidingWindow(40, 0), 256, block_size=16)
    assert (
        found["cost"]["forward_bytes"]
        == layout.cost(batch=3, heads=6, heads_kv=2, head_dim=16, itemsize=4).forward_bytes
    )
    plan = plan_memory(SlidingWindow(40, 0), 256, 3, torch.float32, heads=6, heads_kv=2, head_dim=16, block_size=16,
                       device="cpu")  # fmt: skip
    assert found["plan"]["peak_bytes"] == plan.peak_bytes
    made = {}
    exec(found["code"], made)
    assert (made["q"].shape, made["k"].shape) == ((3, 256, 6, 16), (3, 256, 2, 16))
    want = block_sparse_attention(made["q"], made["k"], made["v"], layout, backend="reference")
    torch.testing.assert_close(made["out"], want)


@pytest.mark.parametrize("causal", [0, 1])
def test_beside_dense_attention(server, causal):
    _, found = asked(server, pattern="window:40", tokens=300, batch=2, heads=4, causal=causal, dtype="float32")
    full = BlockLayout.from_pattern(Causal() if causal else Full(), 300, block_size=64)
    cost = full.cost(batch=2, heads=4, head_dim=64, itemsize=4)
    dense = found["dense"]
    assert (dense["pairs"], dense["forward_flops"], dense["backward_flops"]) == (
        cost.pairs, cost.forward_flops, cost.backward_flops,
    )  # fmt: skip
    assert dense["times"] == pytest.approx(full.density / found["density"])
    assert dense["scores_bytes"] == 2 * 4 * 300 * 300 * 4
    plan = plan_memory(Full(), 300, 2, torch.float32, heads=4, device="cpu", is_causal=bool(causal))
    assert dense["peak_bytes"] == plan.peak_bytes


def test_blocks_chosen_from_samples(server):
    words = {"pattern": "window:100/0", "tokens": 512, "block_size": 32, "heads": 4, "heads_kv": 2, "head_dim": 32,
             "causal": 1, "scorer": "patches", "kept": 30, "head": 1, "dtype": "float32"}  # fmt: skip
    status, found = asked(server, **words)
    assert status == 200, found
    q, k = sample_activations(1, 512, 4, 2, 32)
    selector = TopK(0.3, even=True, across_heads=True)
    layout = select_blocks(q, k, scorer="patches", selector=selector, block_size=32, is_causal=True)
    assert states(found).equal(block_states(layout, head=1))
    assert found["mass"]["chosen"] == pytest.approx(float(kept_mass(q, k, layout, is_causal=True).mean()))
    beside = BlockLayout.from_pattern(SlidingWindow(100, 0) & Causal(), 512, block_size=32)
    assert found["mass"]["pattern"] == pytest.approx(float(kept_mass(q, k, beside, is_causal=True).mean()))
    assert found["mass"]["density"] == beside.density
    made = {}
    exec(found["code"], made)
    assert made["layout"].to_block_mask().equal(layout.to_block_mask())
    assert made["out"].shape == (1, 512, 4, 32)
    assert "no" in found["register"]


def test_the_python_for_transformers(server):
    pytest.importorskip("transformers")
    from dilated_attention_pytorch.integrations import huggingface

    given = {}
    for pattern, causal, options in [
        ("window:64/0 | global:4", 0, {}),
        ("random:2", 1, {"length": 4096}),
        ("window:9 ; causal", 0, {}),
    ]:
        _, found = asked(server, pattern=pattern, causal=causal)
        code, _, model = found["register"].partition("model = ")
        assert 'attn_implementation="my_pattern"' in model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                huggingface, "register", lambda name, pattern, **options: given.update(it=(name, pattern, options))
            )
            exec(code, {})
        name, what, others = given["it"]
        assert (name, others) == ("my_pattern", options)
        _, again = asked(server, pattern=pattern, causal=causal, tokens=64, heads=2)
        want = BlockLayout.from_pattern(what, 64, block_size=128)
        assert states(again).equal(block_states(want, head=0))
        assert isinstance(what, PerHead) == (";" in pattern)
    _, found = asked(server, pattern="longnet")
    assert all(line.startswith("#") for line in found["register"].splitlines())


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
        ({"pattern": "window:-3"}, "left + right must be at least 0, or nothing is seen, got -3 and -3"),
        (
            {"pattern": "documents:3,4", "tokens": 8},
            "the lengths of Documents and KeyRanges must add up to seq_k = 8, got 7",
        ),
        ({"pattern": "x" * 5000}, "at most 4096 characters"),
        ({"pattern": "full", "tokens": 1 << 20}, "this page draws at most 1,048,576 active blocks"),
        ({"pattern": "longnet:1048576/1", "tokens": 1 << 20}, "this page draws at most"),
        ({"tokens": (1 << 20) + 1}, "tokens must be from 1 to 1,048,576 on this page"),
        ({"tokens": 0}, "tokens must be from 1"),
        ({"tokens": "1e3"}, "tokens must be a positive integer, got '1e3'"),
        ({"tokens": "9" * 500}, "tokens must be a positive integer"),
        ({"span": 0}, "span must be at least 1, got 0"),
        ({"query": 4096}, "query must be from 0 to 4,095, got 4,096"),
        ({"first_key": 5000, "span": 5}, "first_key must be from 0 to 4,095"),
        ({"layers": 65}, "layers must be from 1 to 64"),
        ({"heads_kv": 3}, "heads must be a multiple of heads_kv, got 8 and 3"),
        ({"batch": 0}, "batch must be from 1 to 1,024"),
        ({"scorer": "best"}, "scorer must be one of , mean"),
        ({"scorer": "mean", "kept": 0}, "kept must be above 0 and at most 100 per cent, got 0"),
        ({"scorer": "mean", "kept": "nan"}, "kept must be a positive number, got 'nan'"),
        ({"scorer": "mean", "tokens": 4097}, "tokens must be at most 4,096 where blocks are chosen from samples"),
        ({"scorer": "mean", "heads": 17}, "heads must be at most 16 where blocks are chosen from samples"),
        ({"budget": "all"}, "budget must be one of even"),
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
@pytest.mark.parametrize("what", ["layout", "view"])
def test_bad_input_is_answered_with_the_librarys_sentence(server, what, words, message):
    status, found = asked(server, what, **words)
    assert status == 400
    assert message in found["error"]
    assert set(found) == {"error"}


@pytest.mark.parametrize("query", ["pattern=full&pattern=causal", "tokens", "&".join(f"a{i}=1" for i in range(50))])
def test_broken_queries(server, query):
    status, _, body = get(server, f"/api/layout?{query}")
    assert status == 400
    assert json.loads(body)["error"]


def test_only_this_machine_and_only_by_its_name(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/api/options", "/api/layout?pattern=full", "/api/view?pattern=full"):
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert get(server, path, host=host)[0] == 403
        assert get(server, path, host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/page.html", "/mask.js", "/../app.py", "/page/../server.py", "/api", "/api/layout/"])
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
    monkeypatch.setattr(serving.webbrowser, "open", opened.append)
    code, out, err = run("explore", "--port", "0", "--json")
    assert (code, err) == (0, "")
    assert opened == [json.loads(out)["url"]]
    code, out, _ = run("explore", "--port", "0", "--no-browser")
    assert re.match(r"Serving http://127\.0\.0\.1:\d+/ to this machine alone", out)
    assert len(opened) == 1
