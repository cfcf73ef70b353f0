"""Rows, or key heads, side by side on several threads: the same results, nothing left changed, no hang after a fork."""

import multiprocessing
import threading

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, RandomBlocks, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import blockwise, tiling, workers
from dilated_attention_pytorch.testing import Case, assert_exact


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(tiling, "SHARED_OUT", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def make_case(heads=8, heads_kv=8, batch=2, uses=1):
    seq = 160
    shapes = [(batch, seq, h, 8) for h in (heads, heads_kv, heads_kv, heads)]
    q, k, v, do = (torch.randn(s, dtype=torch.float64) for s in shapes)
    layout = BlockLayout.from_pattern(RandomBlocks(uses, block_size=16) | SlidingWindow(9, 0), seq, block_size=16)
    return Case(q, k, v, layout, do, torch.randn(batch, heads, seq, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("uses", [1, 6])
@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 8), (8, 2), (3, 3), (16, 8)])
def test_exact(heads, heads_kv, uses, two_threads):
    assert_exact(make_case(heads, heads_kv, uses=uses), "blockwise")


def test_the_work_is_shared_out(two_threads, monkeypatch):
    seen = []
    run = workers.run
    monkeypatch.setattr(workers, "run", lambda jobs: seen.append(len(jobs)) or run(jobs))
    threads = set()
    forward = blockwise._forward
    monkeypatch.setattr(
        blockwise, "_forward", lambda *args: threads.add(threading.current_thread().name) or forward(*args)
    )
    case = make_case(uses=6)
    block_sparse_attention(case.q, case.k, case.v, case.layout)
    assert seen == [2] * 2 * 16  # for each key head of each sample: the copies, then the rows
    assert all(name.startswith("blockwise") for name in threads)


def test_short_calls_are_not(two_threads, monkeypatch):
    monkeypatch.setattr(tiling, "SHARED_OUT", 1 << 26)
    seen = []
    run = workers.run
    monkeypatch.setattr(workers, "run", lambda jobs: seen.append(len(jobs)) or run(jobs))
    case = make_case(uses=6)
    block_sparse_attention(case.q, case.k, case.v, case.layout)
    assert seen == [1] * 16


def test_a_sample_has_the_same_bits_alone(two_threads):
    case = make_case(batch=3, uses=6)

    def run(which):
        q, k, v = (x[which].clone().requires_grad_() for x in (case.q, case.k, case.v))
        out = block_sparse_attention(q, k, v, case.layout)
        return out, *torch.autograd.grad(out, (q, k, v), case.do[which])

    for together, alone in zip(run([0, 1, 2]), run([2]), strict=True):
        assert torch.equal(together[2:], alone)


def test_the_number_of_threads_is_as_before(two_threads):
    case = make_case(uses=6)
    block_sparse_attention(case.q, case.k, case.v, case.layout)
    assert torch.get_num_threads() == 2
    inside = []
    thread = threading.Thread(target=lambda: inside.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [2]


def test_an_error_in_a_job_reaches_the_caller(two_threads):
    def fail():
        raise ValueError("in a job")

    with pytest.raises(ValueError, match="in a job"):
        workers.run([fail, lambda: None])
    assert torch.get_num_threads() == 2


def test_works_in_a_forked_child(two_threads):
    """A data loader's worker is a fork: the parent's pool has no threads there."""
    case = make_case(uses=6)
    want = block_sparse_attention(case.q, case.k, case.v, case.layout).sum().item()
    torch.set_num_threads(2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_the_child, args=(queue, case))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(want)
    child.join(timeout=60)
    assert child.exitcode == 0


def _in_the_child(queue, case):
    # OpenMP itself does not survive a fork with its threads running; like PyTorch's data loader, use one.
    torch.set_num_threads(1)
    workers._workers().submit(int).result(timeout=30)
    queue.put(block_sparse_attention(case.q, case.k, case.v, case.layout).sum().item())


def test_many_callers_at_once(two_threads):
    case = make_case(uses=6)
    want = block_sparse_attention(case.q, case.k, case.v, case.layout)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(block_sparse_attention(case.q, case.k, case.v, case.layout)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 6
    for result in results:
        torch.testing.assert_close(result, want, rtol=0, atol=1e-12)
