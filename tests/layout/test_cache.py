"""`PersistentPatternCache`: bounded, one entry for all devices, and files that are right or ignored."""

import copy
import json
import multiprocessing
import pickle
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Causal,
    Documents,
    Full,
    PerHead,
    PersistentPatternCache,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
    set_pattern_cache,
)
from dilated_attention_pytorch.layout import cache as module
from dilated_attention_pytorch.layout import layout_for_branches, pattern_cache
from tests.strategies import BLOCKS, lengths, patterns

WINDOW = SlidingWindow(40, 3)


def same(a, b):
    (left, sizes), (right, others) = a.flatten(), b.flatten()
    return sizes == others and a.kind == b.kind and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def layout_of(pattern, seq=200, block_size=32):
    return BlockLayout.from_pattern(pattern, seq, block_size=block_size)


def test_a_layout_is_built_once_for_equal_patterns():
    cache = PersistentPatternCache()
    first = cache.layout(Causal(), 200, block_size=32)
    assert cache.layout(SlidingWindow(None, 0), 200, 200, block_size=32) is first
    assert same(first, layout_of(Causal()))
    for other in ({"seq_q": 201}, {"seq_k": 300}, {"block_size": 16}, {"pattern": Full()}):
        given = {"pattern": Causal(), "seq_q": 200, "seq_k": 200, "block_size": 32, **other}
        assert cache.layout(**given) is not first
    stats = cache.stats()
    assert (stats["hits"], stats["misses"], stats["built"], stats["entries"]) == (1, 5, 5, 5)


def test_the_least_recently_used_goes_first():
    cache = PersistentPatternCache(max_size=2)
    first, second = (cache.layout(WINDOW, seq, block_size=32) for seq in (100, 200))
    assert cache.layout(WINDOW, 100, block_size=32) is first
    cache.layout(WINDOW, 300, block_size=32)
    assert cache.layout(WINDOW, 100, block_size=32) is first
    assert cache.layout(WINDOW, 200, block_size=32) is not second
    assert cache.stats()["evicted"] == 2


def test_bytes_are_those_of_the_tensors_and_lists_made_later_count():
    cache = PersistentPatternCache(max_bytes=40_000)
    layout = cache.layout(RandomBlocks(3, block_size=32), 3200, block_size=32)
    bytes_of = lambda tensors: sum(x.nbytes for x in tensors)  # noqa: E731
    assert cache.nbytes == bytes_of(layout.flatten()[0])
    tensors, _ = layout.flatten(by_key=True)
    assert cache.nbytes == bytes_of(tensors)
    assert layout.causal is not layout
    assert cache.nbytes == bytes_of(tensors) + bytes_of(layout.causal.flatten()[0])
    for seed in range(20):
        cache.layout(RandomBlocks(3, seed + 1, 32), 3200, block_size=32)
        assert cache.nbytes <= 40_000
    assert 2 <= len(cache) < 20
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_copies_on_several_devices_are_one_entry():
    cache = PersistentPatternCache(max_size=1)
    here = cache.layout(WINDOW, 200, block_size=32)
    bytes_here = cache.nbytes
    there = cache.layout(WINDOW, 200, block_size=32, device="meta")
    assert there.device.type == "meta"
    assert cache.stats()["built"] == 1, "a copy is copied and not built"
    assert len(cache) == 1
    assert cache.layout(WINDOW, 200, block_size=32) is here
    assert cache.layout(WINDOW, 200, block_size=32, device="meta") is there
    assert cache.nbytes >= bytes_here


def test_a_pattern_is_kept_after_repeated_use_if_that_is_asked():
    cache = PersistentPatternCache(max_size=2, cache_after=3)
    once = [cache.layout(WINDOW, 100 + i, block_size=32) for i in range(50)]
    assert len(cache) == 0
    layouts = [cache.layout(WINDOW, 90, block_size=32) for _ in range(4)]
    assert layouts[3] is layouts[2]
    assert layouts[1] is not layouts[0]
    assert len(cache) == 1
    assert len(cache._asked) <= 20
    assert len(once) == 50


def test_threads_get_one_layout():
    cache, found, start = PersistentPatternCache(), [], threading.Barrier(8)

    def work():
        start.wait()
        found.extend(cache.layout(SlidingWindow(i, 0), 500, block_size=16) for i in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 160
    assert len({id(layout) for layout in found}) == 20


def test_a_layout_first_asked_for_in_inference_mode_serves_training():
    cache = PersistentPatternCache()
    with torch.inference_mode():
        layout = cache.layout(WINDOW, 200, block_size=32)
    assert not any(x.is_inference() for x in layout.flatten()[0])


@given(st.data())
def test_what_comes_back_from_disk_is_what_was_built(tmp_path_factory, data):
    seq_q, seq_k = data.draw(lengths())
    pattern, block_size = data.draw(patterns(seq_k)), data.draw(st.sampled_from(BLOCKS))
    directory = tmp_path_factory.mktemp("layouts")
    made, loaded = (
        PersistentPatternCache(directory=directory).layout(pattern, seq_q, seq_k, block_size=block_size)
        for _ in range(2)
    )
    assert loaded is not made
    assert same(made, loaded)
    assert len(list(directory.iterdir())) == 1


@pytest.mark.slow
def test_the_disk_is_used_by_calls_and_by_another_process(tmp_path):
    pattern = PerHead((WINDOW, Causal() & Documents((150, 50))))
    q, k, v = (torch.randn(1, 200, 2, 8, requires_grad=True) for _ in range(3))
    want = block_sparse_attention(q, k, v, pattern)
    before = set_pattern_cache(PersistentPatternCache(directory=tmp_path))
    try:
        assert torch.equal(block_sparse_attention(q, k, v, pattern), want)
        assert pattern_cache().stats()["built"] == 1
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as processes:
            loaded = processes.map(_loads, [(tmp_path, pattern)] * 2)
        assert loaded == [1, 1]
        set_pattern_cache(PersistentPatternCache(directory=tmp_path))
        out = block_sparse_attention(q, k, v, pattern)
        assert torch.equal(out, want)
        assert pattern_cache().stats()["loaded"] == 1
        out.sum().backward()
    finally:
        set_pattern_cache(before)


def _loads(given):
    directory, pattern = given
    cache = PersistentPatternCache(directory=directory)
    cache.layout(pattern, 200, block_size=128)
    return cache.stats()["loaded"]


def stored(tmp_path):
    PersistentPatternCache(directory=tmp_path).layout(WINDOW, 200, block_size=32)
    (path,) = tmp_path.iterdir()
    return path


def with_header(content, change):
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def set_meta(name, value):
    def change(header):
        about = json.loads(header["__metadata__"]["about"])
        header["__metadata__"]["about"] = json.dumps({**about, name: value})

    return change


DAMAGE = {
    "empty": (lambda b: b"", "cut off"),
    "only a length": (lambda b: b[:8], "cut off"),
    "half a header": (lambda b: b[:100], "cut off"),
    "half the data": (lambda b: b[:-40], "cut off or was changed"),
    "a bit flipped": (lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:], "was changed"),
    "more at the end": (lambda b: b + b"\0\0\0\0", "was changed"),
    "text": (lambda b: b"hello, this is not a layout at all", "no safetensors file"),
    "a pickle": (lambda b: pickle.dumps({"a": torch.ones(3)}), "no safetensors file"),
    "json of another kind": (lambda b: (2).to_bytes(8, "little") + b"[]", "no layout"),
    "no metadata": (lambda b: with_header(b, lambda h: h.pop("__metadata__")), "no layout"),
    "another format": (lambda b: with_header(b, set_meta("format", "pt")), "holds 'pt'"),
    "a future version": (lambda b: with_header(b, set_meta("version", "4")), "version 4, this is version 3"),
    "another pattern": (lambda b: with_header(b, set_meta("key", "00")), "another pattern"),
    "sizes": (lambda b: with_header(b, set_meta("sizes", "[1, 2]")), "no layout"),
    "other sizes": (lambda b: with_header(b, set_meta("sizes", "[7, 900, 200, 32, 32, 0, 0, 1, 0]")), "no layout"),
    "offsets": (lambda b: with_header(b, lambda h: h["000"].update(data_offsets=[0, 1 << 30])), "no layout"),
    "a huge tensor": (lambda b: with_header(b, lambda h: h["000"].update(shape=[-1])), "no layout"),
    "dtype": (lambda b: with_header(b, lambda h: h["000"].update(dtype="F32")), "no layout"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_file_is_ignored_with_one_warning_and_made_again(tmp_path, name):
    damage, message = DAMAGE[name]
    path = stored(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    cache = PersistentPatternCache(directory=tmp_path)
    with pytest.warns(UserWarning, match=f"PersistentPatternCache ignored .*{path.name}.*{message}.*made again"):
        layout = cache.layout(WINDOW, 200, block_size=32)
    assert same(layout, layout_of(WINDOW))
    assert path.read_bytes() == good
    assert cache.stats()["built"] == 1
    path.write_bytes(damage(good))
    cache.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(cache.layout(WINDOW, 200, block_size=32), layout)


def test_layouts_of_branches_are_remembered_in_memory_alone(tmp_path):
    before = set_pattern_cache(PersistentPatternCache(directory=tmp_path))
    try:
        found = [layout_for_branches(Branches((64,), (2,)), 200, 200, 4, False, torch.device("cpu")) for _ in range(2)]
        assert found[0] is found[1]
        assert list(tmp_path.iterdir()) == []
    finally:
        set_pattern_cache(before)


def test_a_changed_layout_with_a_right_digest_is_still_checked(tmp_path):
    """Lists that lead a kernel out of bounds are refused, however well they are written."""
    layout = layout_of(WINDOW)
    layout.by_query.indices[3] = 99
    path = stored(tmp_path)
    path.write_bytes(module._written(layout, (WINDOW, 200, 200, 32)))
    cache = PersistentPatternCache(directory=tmp_path)
    with pytest.warns(UserWarning, match="no layout .indices must be key blocks"):
        assert same(cache.layout(WINDOW, 200, block_size=32), layout_of(WINDOW))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    cache = PersistentPatternCache(directory=tmp_path)

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.warns(UserWarning, match="could not write .*No space left"):
        assert same(cache.layout(WINDOW, 200, block_size=32), layout_of(WINDOW))
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_cannot_be_built_writes_nothing(tmp_path):
    cache = PersistentPatternCache(directory=tmp_path)
    with pytest.raises(ValueError, match="must add up to seq_k"):
        cache.layout(Documents((3, 4)), 200, block_size=32)
    assert list(tmp_path.iterdir()) == []
    assert len(cache) == 0


def test_files_are_safetensors(tmp_path):
    from safetensors.torch import load_file

    tensors = load_file(stored(tmp_path))
    for got, want in zip((tensors[name] for name in sorted(tensors)), layout_of(WINDOW).flatten()[0], strict=True):
        assert torch.equal(got, want)


def test_the_file_by_the_book(tmp_path):
    """The safetensors format, read without any of our code."""
    content = stored(tmp_path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert json.loads(header.pop("__metadata__")["about"])["format"] == "dilated-attention-layout"
    end = 0
    for (_, entry), want in zip(sorted(header.items()), layout_of(WINDOW).flatten()[0], strict=True):
        start, stop = entry["data_offsets"]
        assert start == end
        raw = bytearray(content[8 + length + start : 8 + length + stop])
        got = torch.frombuffer(raw, dtype=torch.int32).view(entry["shape"]) if raw else torch.empty(entry["shape"])
        assert torch.equal(got.int(), want)
        end = stop
    assert 8 + length + end == len(content)


def test_copies_have_the_settings_and_nothing_else(tmp_path):
    cache = PersistentPatternCache(5, directory=tmp_path, cache_after=2, max_bytes=10**6)
    cache.layout(WINDOW, 200, block_size=32)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (other.max_size, other.directory, other.cache_after, other.max_bytes) == (5, tmp_path, 2, 10**6)
        assert len(other) == 0
        assert same(other.layout(WINDOW, 200, block_size=32), layout_of(WINDOW))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PersistentPatternCache(0), ValueError, "max_size must be at least 1"),
        (lambda: PersistentPatternCache(cache_after=0), ValueError, "cache_after must be at least 1"),
        (lambda: PersistentPatternCache(max_bytes=0.5), TypeError, "max_bytes must be an int"),
        (lambda: set_pattern_cache({}), TypeError, "cache must be a PersistentPatternCache, got dict"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
