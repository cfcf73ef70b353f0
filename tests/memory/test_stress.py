"""Many threads, many calls, and allocations that fail: nothing corrupt, nothing grown, nothing leaked.

In the suite these are short; `make stress` runs 32 threads for a minute and 10,000 calls.
"""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from time import monotonic

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAttention,
    MemoryPool,
    PersistentPatternCache,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
    set_pattern_cache,
)
from dilated_attention_pytorch.memory import can_measure, drawing_from, pool
from dilated_attention_pytorch.memory.meter import _status_bytes

SECONDS = float(os.environ.get("STRESS_SECONDS", "1"))
THREADS = int(os.environ.get("STRESS_THREADS", "8"))
CALLS = int(os.environ.get("STRESS_CALLS", "150"))


def own_pool(**options):
    return MemoryPool(**{"pool_size": 24, "min_bytes": 0, "max_bytes": 1 << 27, **options})


def test_threads_that_share_one_pool_corrupt_nothing():
    """Each thread writes its number into everything it takes, holds some of it for a while, and reads it back."""
    shared, wrong, stop = own_pool(pool_size=THREADS), [], monotonic() + SECONDS
    rounds = [0] * THREADS

    def work(number):
        generator = torch.Generator().manual_seed(number)
        held = []
        while monotonic() < stop:
            size = int(torch.randint(1, 20_000, (), generator=generator))
            x = shared.take((size,), torch.float32).fill_(number)
            held.append(x[size // 2 :] if size % 3 else x.view(-1, 1))
            del x
            if size % 97 == 0:
                shared.clear()
            if len(held) > size % 7:
                wrong.extend(number for y in held if not (y == number).all())
                held.clear()
            rounds[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 120)
        assert not thread.is_alive(), "a thread waits for ever"
    assert not wrong
    assert min(rounds) > 0
    assert shared.get_buffer_stats()["buffers"] <= THREADS
    assert shared.get_buffer_stats()["bytes_in_use"] == 0


def test_threads_that_share_modules_and_caches_compute_the_same(tmp_path):
    """Forward and backward in every thread, against results computed alone; layouts come and go on disk too."""
    shared, wrong, stop = own_pool(pool_size=64), [], monotonic() + SECONDS
    lengths = [65, 130, 200, 259]
    modules = [BlockSparseAttention(p, enable_memory_pool=shared) for p in (SlidingWindow(40, 2), RandomBlocks(2))]
    cases = []
    for seq in lengths:
        for module in modules:
            tensors = [torch.randn(1, seq, 2, 16, requires_grad=True) for _ in range(3)]
            out = module(*tensors)
            cases.append((module, tensors, out.detach().clone(), torch.autograd.grad(out.sum(), tensors)))
    before = set_pattern_cache(PersistentPatternCache(max_size=3, directory=tmp_path))

    def work(number):
        turn = number
        while monotonic() < stop or turn == number:
            module, tensors, want, want_grads = cases[turn % len(cases)]
            out = module(*tensors)
            grads = torch.autograd.grad(out.sum(), tensors)
            if not torch.equal(out, want) or not all(map(torch.equal, grads, want_grads)):
                wrong.append(turn)
            turn += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 240)
            assert not thread.is_alive(), "a thread waits for ever"
    finally:
        set_pattern_cache(before)
    assert not wrong
    assert shared.get_buffer_stats()["bytes_in_use"] == 0
    assert not list(tmp_path.glob(".layout-*")), "no half-written file stays"


@pytest.mark.slow
@pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_memory_does_not_grow(training):
    """Calls of changing shape, outputs dropped: after a warm-up neither the pool nor the process gets larger."""
    mine = own_pool()
    module = BlockSparseAttention(SlidingWindow(40, 2), enable_memory_pool=mine, enable_buffer_manager=True)
    lengths = [64 + 37 * i % 200 for i in range(40)]
    inputs = {n: [torch.randn(1 + n % 2, n, 2, 16, requires_grad=training) for _ in range(3)] for n in lengths}

    def call(i):
        out = module(*inputs[lengths[i % len(lengths)]])
        if training:
            torch.autograd.grad(out.sum(), inputs[lengths[i % len(lengths)]])

    for i in range(3 * len(lengths)):
        call(i)
    gc.collect()
    held, resident = mine.bytes_held, _status_bytes("VmRSS")
    for i in range(CALLS):
        call(i)
    gc.collect()
    assert mine.bytes_held == held
    assert mine.get_buffer_stats()["bytes_in_use"] == 0
    assert _status_bytes("VmRSS") - resident < (8 << 20)


def count_allocations(monkeypatch, fail_at=None, *, forever=False):
    """Counts the pool's allocations; the one with that number fails, or all from it on."""
    seen = [0]
    init = pool._Buffer.__init__

    def wrapped(buffer, nbytes):
        seen[0] += 1
        if fail_at is not None and (seen[0] == fail_at or (forever and seen[0] >= fail_at)):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: injected")
        init(buffer, nbytes)

    monkeypatch.setattr(pool._Buffer, "__init__", wrapped)
    return seen


@pytest.mark.slow
def test_out_of_memory_at_every_allocation(monkeypatch):
    """Failing once, the pool gives back what it has and goes on; failing for good is an error, and the next works."""
    tensors = [torch.randn(1, 300, 4, 16, requires_grad=True) for _ in range(3)]

    def step(mine):
        with drawing_from(mine):
            out = block_sparse_attention(*tensors, SlidingWindow(70, 3))
            return out.detach(), *torch.autograd.grad(out.square().sum(), tensors)

    with monkeypatch.context() as patch:
        seen = count_allocations(patch)
        want = step(own_pool())
    assert seen[0] > 5
    for fail_at in range(1, seen[0] + 1):
        mine = own_pool()
        with monkeypatch.context() as patch:
            count_allocations(patch, fail_at)
            assert all(map(torch.equal, step(mine), want))
        mine = own_pool()
        with monkeypatch.context() as patch:
            count_allocations(patch, fail_at, forever=True)
            with pytest.raises(RuntimeError, match="injected"):
                step(mine)
        gc.collect()
        assert mine.get_buffer_stats()["bytes_in_use"] == 0, f"leaked at allocation {fail_at}"
        assert all(map(torch.equal, step(mine), want))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on address space that Linux keeps")
def test_a_process_that_really_runs_out_of_memory_goes_on():
    """With a limit on the address space a long call fails; what it held is free, and a shorter one works."""
    code = """
        import resource, torch
        from dilated_attention_pytorch import BlockSparseAttention, SlidingWindow, MemoryPool
        from dilated_attention_pytorch.memory.meter import _status_bytes
        torch.set_num_threads(1)
        pool = MemoryPool(max_bytes=1 << 30)
        module = BlockSparseAttention(SlidingWindow(100, 0), enable_memory_pool=pool)
        with torch.no_grad():
            q = torch.randn(1, 4096, 8, 64)
            want = module(q, q, q)
            taken = _status_bytes("VmSize")
            resource.setrlimit(resource.RLIMIT_AS, (taken + (200 << 20), resource.RLIM_INFINITY))
            big = q.expand(60, -1, -1, -1)
            for _ in range(3):
                try:
                    module(big, big, big)
                except RuntimeError as error:
                    assert "allocate memory" in str(error), error
                else:
                    raise SystemExit("the limit was not felt")
                assert pool.get_buffer_stats()["bytes_in_use"] == 0
                assert torch.equal(module(q, q, q), want)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
