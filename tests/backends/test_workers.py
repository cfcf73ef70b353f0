"""Key heads, or rows, side by side on several threads: the same results, nothing left changed, no hang after a fork."""

import multiprocessing
import threading

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, RandomBlocks, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import blockwise, tiling, workers
from dilated_attention_pytorch.testing import Case, assert_exact


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(tiling, "SHARE", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["heads", "rows"])
def both_ways(request, two_threads, monkeypatch):
    """The threads take key heads, or rows of one; long calls whose key heads are copied do the latter."""
    if request.param == "rows":
        monkeypatch.setattr(tiling, "COPIES", 0)
    return request.param


def make_case(heads=8, heads_kv=8, batch=2, uses=1):
    seq = 160
    shapes = [(batch, seq, h, 8) for h in (heads, heads_kv, heads_kv, heads)]
    q, k, v, do = (torch.randn(s, dtype=torch.float64) for s in shapes)
    layout = BlockLayout.from_pattern(RandomBlocks(uses, block_size=16) | SlidingWindow(9, 0), seq, block_size=16)
    return Case(q, k, v, layout, do, torch.randn(batch, heads, seq, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("uses", [1, 6])
@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 8), (8, 2), (3, 3), (16, 8)])
def test_exact(heads, heads_kv, uses, both_ways):
    assert_exact(make_case(heads, heads_kv, uses=uses), "blockwise")


def watched(monkeypatch):
    """Of the calls that follow: how many jobs ran side by side each time, in which threads they ran, and over how many
    their operators were split."""
    jobs, threads, split = [], set(), set()
    run, forward, backward = workers.run, blockwise._forward, blockwise._backward

    def noted(work):
        def inner(*args):
            threads.add(threading.current_thread().name)
            split.add(torch.get_num_threads())
            return work(*args)

        return inner

    monkeypatch.setattr(workers, "run", lambda each, *split: jobs.append(len(each)) or run(each, *split))
    monkeypatch.setattr(blockwise, "_forward", noted(forward))
    monkeypatch.setattr(blockwise, "_backward", noted(backward))
    return jobs, threads, split


def test_the_work_is_shared_out(both_ways, monkeypatch):
    jobs, threads, split = watched(monkeypatch)
    case = make_case(uses=6)
    block_sparse_attention(case.q, case.k, case.v, case.layout)
    # By rows, for each key head of each sample: the copies, then the rows.
    assert jobs == ([2] if both_ways == "heads" else [2] * 2 * 16)
    assert all(name.startswith("blockwise") for name in threads)
    assert split == {1}


def test_short_calls_run_alone_and_are_not_split(two_threads, monkeypatch):
    """OpenMP's threads would wait for each other at the end of every operator."""
    monkeypatch.setattr(tiling, "SHARE", 1 << 30)
    jobs, threads, split = watched(monkeypatch)
    case = make_case(uses=6)
    case.q.requires_grad_()
    block_sparse_attention(case.q, case.k, case.v, case.layout).backward(case.do)
    assert jobs == [1, 1]
    assert threads == {threading.current_thread().name}
    assert split == {1}
    assert torch.get_num_threads() == 2


def test_one_key_head_of_a_long_backward_is_split(two_threads, monkeypatch):
    monkeypatch.setattr(tiling, "SPLIT", 1)
    jobs, _, split = watched(monkeypatch)
    case = make_case(heads_kv=1, uses=6)
    case.k.requires_grad_()
    out = block_sparse_attention(case.q, case.k, case.v, case.layout)
    jobs.clear()
    split.clear()
    out.backward(case.do)
    assert (jobs, split) == ([1], {2})


# In a backward, key heads that are used in place are parted beforehand.
@pytest.mark.parametrize(("uses", "training"), [(1, False), (6, False), (6, True)])
def test_a_thread_that_is_held_up_leaves_its_work_to_the_others(uses, training, both_ways, monkeypatch):
    """The first to begin waits, after its first unit, until the other has nothing left to do."""
    name = "_backward" if training else "_forward"
    work, held, done = getattr(blockwise, name), [], threading.Event()
    tiles = blockwise._Call.tiles
    case = make_case(uses=uses)
    q = case.q.clone().requires_grad_(training)
    out = block_sparse_attention(q, case.k, case.v, case.layout) if training else None

    def noted(call, *args):
        if not held:
            held.append(call)
            return work(call, *args)
        try:
            return work(call, *args)
        finally:
            done.set()

    def waiting(call, unit):
        if held and call is held[0] and threading.current_thread().name.startswith("blockwise"):
            assert done.wait(timeout=60), "the other thread never ended"
        return tiles(call, unit)

    monkeypatch.setattr(blockwise, name, noted)
    monkeypatch.setattr(blockwise._Call, "tiles", waiting)
    if training:
        (got,) = torch.autograd.grad(out, q, case.do)
        monkeypatch.undo()
        (want,) = torch.autograd.grad(block_sparse_attention(q, case.k, case.v, case.layout), q, case.do)
    else:
        got = block_sparse_attention(q, case.k, case.v, case.layout)
        monkeypatch.undo()
        want = block_sparse_attention(q, case.k, case.v, case.layout)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alone_is_shared_out", [True, False])
@pytest.mark.parametrize("uses", [1, 6])
def test_a_sample_has_the_same_bits_alone(alone_is_shared_out, uses, both_ways, monkeypatch):
    case = make_case(batch=3, uses=uses)
    if not alone_is_shared_out:  # as the batch is
        monkeypatch.setattr(tiling, "SHARE", 8 * case.layout.num_active_blocks * 16 * 16)

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
