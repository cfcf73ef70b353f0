"""Buffers that a call on a CPU leaves to the next."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import blockwise, scratch
from dilated_attention_pytorch.testing import Case, assert_exact

Scratch = scratch.Scratch


def make_case(seq, dtype=torch.float32):
    q, k, v, do = (torch.randn(1, seq, 2, 16).to(dtype) for _ in range(4))
    layout = BlockLayout.from_pattern(SlidingWindow(40, 3), seq, block_size=16)
    return Case(q, k, v, layout, do, torch.randn(1, 2, seq, dtype=torch.float64 if dtype == torch.float64 else None))


def held():
    return {(name, buffer.data_ptr()) for _, buffers in Scratch.idle for name, buffer in buffers.items()}


def test_a_call_takes_what_the_one_before_left():
    case = make_case(300)
    assert_exact(case, "blockwise")
    left = held()
    assert left
    assert_exact(case, "blockwise")
    assert held() == left


def test_what_is_left_serves_other_lengths_types_and_modes():
    for seq, dtype in ((300, torch.float32), (90, torch.float64), (300, torch.bfloat16), (500, torch.float32)):
        case = make_case(seq, dtype)
        with torch.inference_mode():
            x = torch.randn(1, seq, 2, 16).to(dtype)
            block_sparse_attention(x, x, x, case.layout, backend="blockwise")
        assert_exact(case, "blockwise")
    assert not any(buffer.is_inference() for _, buffers in Scratch.idle for buffer in buffers.values())


def test_not_more_than_so_much_is_left(monkeypatch):
    monkeypatch.setattr(scratch, "LEFT", 10_000)
    assert_exact(make_case(300), "blockwise")
    assert sum(buffer.nbytes for _, buffers in Scratch.idle for buffer in buffers.values()) <= 10_000


def test_a_call_that_failed_leaves_nothing(monkeypatch):
    monkeypatch.setattr(blockwise, "_forward", lambda *args: 1 / 0)
    case = make_case(300)
    with pytest.raises(ZeroDivisionError):
        block_sparse_attention(case.q, case.k, case.v, case.layout, backend="blockwise")
    assert not held()


def test_calls_of_several_threads_do_not_share():
    cases = [make_case(200 + 50 * i) for i in range(4)]

    def attend(case):
        with torch.no_grad():
            return block_sparse_attention(case.q, case.k, case.v, case.layout, backend="blockwise")

    alone = [attend(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, want in zip(pool.map(attend, cases), alone, strict=True):
                assert torch.equal(got, want)
    ids = [id(buffer) for _, buffers in Scratch.idle for buffer in buffers.values()]
    assert len(ids) == len(set(ids))
