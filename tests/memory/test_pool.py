"""`MemoryPool` and `AttentionBuffers`: never memory that someone holds, never more than the bounds, nothing leaked."""

import copy
import ctypes
import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import AttentionBuffers, BufferType, MemoryPool
from dilated_attention_pytorch.memory import Strategy, active_source, drawing_from, pool, shared_pool
from dilated_attention_pytorch.memory.pool import bucket

MIB = 1 << 20
F32 = torch.float32


def small_pool(**options):
    return MemoryPool(**{"min_bytes": 0, "max_bytes": 64 * MIB, **options})


def memory_of(tensor):
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def test_a_dropped_buffer_is_used_again_whatever_its_shape():
    pool = small_pool()
    where = pool.take((100, 50), F32).data_ptr()
    for shape, dtype in (((70, 70), F32), ((9, 9, 9), torch.float64), ((20000,), torch.uint8)):
        x = pool.take(shape, dtype)
        assert (x.shape, x.dtype, x.data_ptr()) == (shape, dtype, where)
        assert x.is_contiguous()
        assert x._base is None
        del x
    stats = pool.get_buffer_stats()
    assert (stats["hits"], stats["misses"], stats["cache_hit_rate"]) == (3, 1, 0.75)


HOLDERS = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[3:5, 1],
    "a detached tensor": lambda x: x.detach(),
    "a transposed view of a view": lambda x: x.view(-1)[7:].view(3, 31).T,
    "the storage": lambda x: x.untyped_storage(),
    "a NumPy array": lambda x: x.numpy()[2:],
    "a memoryview": lambda x: memoryview(x.numpy()),
    "DLPack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "a tensor made of DLPack": lambda x: torch.from_dlpack(x)[1],
    "autograd, of a product": lambda x: (torch.ones(10, 10, requires_grad=True) * x).sum(),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "a closure": lambda x: lambda: x.sum(),
    "another tensor set to it": lambda x: torch.empty(0).set_(x.untyped_storage(), 8, (3,), (1,)),
    "a bytes view": lambda x: x.view(torch.uint8),
    "a list of rows": lambda x: list(x.unbind(0))[-1],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDERS)
def test_what_someone_holds_is_never_handed_out(name):
    pool = small_pool()
    x = pool.take((10, 10), F32)
    x.copy_(torch.arange(100.0).view(10, 10))
    held = memory_of(x)[0]
    holder = HOLDERS[name](x)
    del x
    gc.collect()
    others = [pool.take((10, 10), F32).fill_(-1.0) for _ in range(3)]
    assert held not in [memory_of(other)[0] for other in others]
    whole = torch.frombuffer((ctypes.c_char * 400).from_address(held), dtype=F32)
    assert torch.equal(whole, torch.arange(100.0))
    del holder, others
    gc.collect()
    taken = [pool.take((10, 10), F32) for _ in range(4)]
    assert held in [memory_of(x)[0] for x in taken], "free again when the holder is gone"


def test_memory_shared_with_other_processes_is_never_handed_out_again():
    pool = small_pool()
    x = pool.take((100,), F32)
    x.share_memory_()
    held = memory_of(x)[0]
    del x
    assert memory_of(pool.take((100,), F32))[0] != held


def test_a_graph_holds_its_buffers_until_backward_and_gets_the_right_gradient():
    """The earlier pool crashed in the second training step: a pooled buffer kept its history."""
    pool = small_pool()
    weight = torch.ones(1000, requires_grad=True)
    for step in range(5):
        x = pool.take((1000,), F32).fill_(float(step))
        assert not x.requires_grad
        assert x.grad_fn is None
        loss = (x * weight * weight).sum()
        del x
        pool.take((1000,), F32).fill_(99.0)
        (grad,) = torch.autograd.grad(loss, weight)
        assert torch.equal(grad, torch.full((1000,), 2.0 * step))
    assert pool.get_buffer_stats()["buffers"] <= 3


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 5), st.booleans()), max_size=60))
def test_any_order_of_taking_and_dropping(steps):
    """Tensors that are alive never overlap and keep what was written to them; the bounds hold at every moment."""
    pool = small_pool(pool_size=4, max_bytes=5 * 4096)
    alive = {}
    for number, (size, drop, as_view) in enumerate(steps):
        x = pool.take((size,), F32).fill_(float(number))
        alive[number] = x[size // 2 :] if as_view else x
        del x
        for key in list(alive)[:drop]:
            assert (alive.pop(key) == key).all()
        spans = sorted(memory_of(tensor) for tensor in alive.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        stats = pool.get_buffer_stats()
        assert stats["buffers"] <= 4
        assert stats["bytes_held"] <= 5 * 4096
    for key, tensor in alive.items():
        assert (tensor == key).all()


def test_buckets_are_at_most_an_eighth_larger():
    for size in (1, 4095, 4096, 65537, 999_999, MIB, MIB + 1, 123_456_789, 2**33 + 1):
        assert size <= bucket(size) <= max(size * 1.125, size + 4096)
    octave = {bucket(size) for size in range(MIB, 2 * MIB, 999)}
    assert len(octave) <= 9


def test_the_least_recently_used_goes_first():
    pool = small_pool(pool_size=2)
    first, second = pool.take((4096,), F32), pool.take((8192,), F32)
    places = [memory_of(x)[0] for x in (first, second)]
    del first, second
    pool.take((4096,), F32)  # uses the first again: the second is older now
    large = pool.take((100_000,), F32)
    assert memory_of(pool.take((4096,), F32))[0] == places[0]
    stats = pool.get_buffer_stats()
    assert stats["buffers"] == 2
    assert stats["bytes_in_use"] == memory_of(large)[1] - memory_of(large)[0]


def test_what_the_bounds_have_no_room_for_is_handed_out_and_not_kept():
    pool = small_pool(pool_size=1)
    x, y = pool.take((1000,), F32), pool.take((1000,), F32)
    assert pool.get_buffer_stats()["buffers"] == 1
    assert memory_of(x) != memory_of(y)
    tight = small_pool(max_bytes=4096)
    assert tight.take((5000,), F32).shape == (5000,)
    assert tight.get_buffer_stats()["bytes_held"] == 0


def test_results_that_a_user_keeps_do_not_grow_the_pool():
    """The earlier pool leaked every output: 188 MB after 49 calls of 4 MB."""
    pool = small_pool(pool_size=3)
    kept = [pool.take((MIB,), F32).fill_(i) for i in range(20)]
    assert pool.get_buffer_stats()["buffers"] == 3
    assert [float(x[5]) for x in kept] == list(range(20))
    del kept
    assert pool.get_buffer_stats()["bytes_held"] == 3 * 4 * MIB
    pool.clear()
    assert pool.get_buffer_stats()["bytes_held"] == 0


def test_a_thousand_calls_of_any_size_come_back():
    """The earlier pool deadlocked on its 100th call, when it made a bucket for a size it had not seen."""
    done = threading.Event()

    def work():
        pool = small_pool()
        for i in range(1000):
            pool.take((1 + 37 * i % 5000,), F32)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(60)


def test_changing_shapes_hit():
    """The earlier pool had no hits where shapes changed: its buckets were shapes."""
    pool = small_pool()
    for i in range(200):
        a, b = (pool.take((1 + (i * 7919 + j) % 4, 256 + (i * 104729) % 1792, 64), F32) for j in range(2))
        del a, b
    assert pool.get_buffer_stats()["cache_hit_rate"] > 0.95


def test_the_garbage_collector_may_call_the_pool_while_it_is_at_work():
    pool = small_pool()

    class Taker:
        def __init__(self):
            self.me = self

        def __del__(self):
            pool.take((700,), F32).fill_(-5.0)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(300):
            Taker()
            x = pool.take((700,), F32).fill_(i)
            y = pool.take((700,), F32).fill_(-i)
            assert (x == i).all()
            assert (y == -i).all()
            del x, y
    finally:
        gc.set_threshold(*threshold)


def test_small_requests_are_left_to_malloc():
    pool = MemoryPool(max_bytes=64 * MIB)
    x = pool.take((1000,), F32)
    assert pool.get_buffer_stats()["buffers"] == 0
    assert pool.get_buffer_stats()["small"] == 1
    assert pool.take((MIB,), F32).numel() == MIB
    assert pool.get_buffer_stats()["buffers"] == 1
    assert len(x) == 1000


def test_unwritten_memory_is_seen_like_that_of_torch_empty():
    pool = small_pool()
    pool.take((100,), F32).fill_(3.0)
    assert pool.take((100,), F32).isnan().all()


def test_the_size_follows_the_memory_that_is_there(monkeypatch):
    monkeypatch.setattr(pool, "available_memory", lambda: 40 * MIB)
    assert MemoryPool().max_bytes == 10 * MIB
    mine = MemoryPool(min_bytes=0, max_bytes=1000 * MIB)
    for _ in range(2):
        a, b = mine.take((MIB,), F32), mine.take((MIB,), F32)
        del a, b
    assert mine.bytes_held == 8 * MIB
    monkeypatch.setattr(pool, "available_memory", lambda: 2 * MIB)  # the system is short of memory: a new buffer
    x = mine.take((2 * MIB,), F32)  # takes the place of the free ones
    assert mine.bytes_held <= 8 * MIB
    assert x.numel() == 2 * MIB


class Scarce:
    """`torch.empty` that fails at its n-th large allocation, once or from then on."""

    def __init__(self, monkeypatch, fails, *, forever=False, message="DefaultCPUAllocator: can't allocate memory"):
        self.seen, self.fails, self.forever, self.message, self.empty = 0, fails, forever, message, torch.empty
        monkeypatch.setattr(pool._Buffer, "__init__", self.make(pool._Buffer.__init__))

    def make(self, init):
        def wrapped(buffer, nbytes):
            self.seen += 1
            if self.seen == self.fails or (self.forever and self.seen >= self.fails):
                raise RuntimeError(self.message)
            init(buffer, nbytes)

        return wrapped


def test_out_of_memory_gives_everything_back_and_tries_again(monkeypatch):
    mine = small_pool()
    held = mine.take((1000,), F32).fill_(7.0)
    mine.take((2000,), F32)
    assert mine.get_buffer_stats()["buffers"] == 2
    Scarce(monkeypatch, fails=1)
    x = mine.take((50_000,), F32)
    assert x.numel() == 50_000
    assert mine.get_buffer_stats()["buffers"] == 2  # what is held, and the new one
    assert (held == 7.0).all()


def test_out_of_memory_for_good_is_raised_and_the_next_call_works(monkeypatch):
    mine = small_pool()
    with monkeypatch.context() as patch:
        Scarce(patch, fails=1, forever=True)
        with pytest.raises(RuntimeError, match="can't allocate"):
            mine.take((1000,), F32)
    assert mine.get_buffer_stats()["buffers"] == 0
    assert mine.take((1000,), F32).numel() == 1000


def test_other_errors_are_not_taken_for_want_of_memory(monkeypatch):
    mine = small_pool()
    scarce = Scarce(monkeypatch, fails=1, message="something else")
    with pytest.raises(RuntimeError, match="something else"):
        mine.take((1000,), F32)
    assert scarce.seen == 1


def test_what_was_learned_can_be_had_beforehand():
    mine = small_pool()
    a, b, c = mine.take((5000,), F32), mine.take((70_000,), F32), mine.take((5000,), F32)
    del a, b, c
    mine.take((100,), F32)
    assert mine.learned == sorted([bucket(20_000), bucket(280_000), bucket(20_000)])
    mine.clear()
    mine.preallocate(mine.learned)
    before = mine.get_buffer_stats()["misses"]
    a, b, c = mine.take((5000,), F32), mine.take((70_000,), F32), mine.take((5000,), F32)
    assert mine.get_buffer_stats()["misses"] == before
    assert len({memory_of(x) for x in (a, b, c)}) == 3


def test_a_lightweight_pool_counts_nothing_and_serves_all_the_same():
    mine = small_pool(lightweight=True)
    where = mine.take((100,), F32).data_ptr()
    assert mine.take((90,), F32).data_ptr() == where
    assert mine.learned == []
    assert mine.get_buffer_stats()["hits"] == 0


def test_threads_never_share_a_buffer():
    mine, wrong = small_pool(pool_size=8), []

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(200):
            size = int(torch.randint(1, 4000, (), generator=generator))
            x = mine.take((size,), F32).fill_(float(number))
            y = x[size // 3 :]
            del x
            if not (y == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong
    assert mine.get_buffer_stats()["buffers"] <= 8


def test_copies_and_pickles_have_buffers_of_their_own():
    mine = small_pool(pool_size=7)
    mine.take((1000,), F32)
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert (other.pool_size, other.max_bytes, other.min_bytes) == (7, 64 * MIB, 0)
        assert other.get_buffer_stats()["buffers"] == 0
        assert other.take((1000,), F32).numel() == 1000
    assert copy.deepcopy(shared_pool()) is shared_pool()
    buffers = copy.deepcopy(AttentionBuffers(mine))
    assert buffers.pool is not mine
    assert buffers.get(BufferType.TEMP, (5,), F32).numel() == 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent():
    code = """
        import os, threading, torch
        from dilated_attention_pytorch import MemoryPool
        pool = MemoryPool(min_bytes=0)
        held, go = threading.Event(), threading.Event()
        def hold():
            with pool._lock:
                held.set()
                go.wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            pool.take((1000,), torch.float32).fill_(1.0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MemoryPool(0), ValueError, "pool_size must be at least 1"),
        (lambda: MemoryPool(pool_size="ten"), TypeError, "pool_size must be an int"),
        (lambda: MemoryPool(max_bytes=0), ValueError, "max_bytes"),
        (lambda: MemoryPool(lightweight=1), TypeError, "lightweight must be True or False"),
        (lambda: AttentionBuffers("pool"), TypeError, "pool must be a MemoryPool, got str"),
        (lambda: AttentionBuffers(strategies={"QUERY": Strategy()}), TypeError, "kind must be a BufferType"),
        (lambda: AttentionBuffers().get("query", (1,), F32), TypeError, "kind must be a BufferType.*got 'query'"),
        (lambda: AttentionBuffers().preallocate_buffers(1, 0, 1, 1), ValueError, "seq_len must be at least 1"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_there_are_ten_types_and_only_output_is_zeroed():
    assert [kind.name for kind in BufferType] == [
        "QUERY", "KEY", "VALUE", "OUTPUT", "SCORES", "WEIGHTS", "TEMP", "COMM", "MASK", "CACHE",
    ]  # fmt: skip
    buffers = AttentionBuffers(small_pool())
    for kind in BufferType:
        for _ in range(2):
            x = buffers.get(kind, (300,), F32)
            assert (x == 0).all() == (kind is BufferType.OUTPUT)
            assert x.isnan().all() == (kind is not BufferType.OUTPUT)
            x.fill_(5.0)
            del x


def test_strategies_by_type():
    mine = small_pool()
    buffers = AttentionBuffers(mine, strategies={BufferType.MASK: Strategy(zeroed=True, reused=False)})
    assert (buffers.get(BufferType.MASK, (300,), torch.bool) == 0).all()
    cached = buffers.get(BufferType.CACHE, (300,), F32)
    assert mine.get_buffer_stats()["buffers"] == 0, "neither type is the pool's business"
    buffers.get(BufferType.QUERY, (300,), F32)
    assert mine.get_buffer_stats()["buffers"] == 1
    stats = buffers.get_buffer_stats()
    assert stats["by_type"]["CACHE"] == {"requests": 1, "bytes": 1200, "largest": 1200}
    assert stats["by_type"]["MASK"]["bytes"] == 300
    assert len(cached) == 300


def test_without_reuse_the_manager_counts_and_keeps_nothing():
    mine = small_pool()
    buffers = AttentionBuffers(mine, reuse=False)
    for _ in range(3):
        buffers.get(BufferType.TEMP, (300,), F32)
    assert mine.get_buffer_stats()["buffers"] == 0
    assert buffers.get_buffer_stats()["by_type"]["TEMP"]["requests"] == 3


def test_one_pool_serves_managers_of_several_modules():
    mine = small_pool()
    first, second = AttentionBuffers(mine), AttentionBuffers(mine)
    where = first.get(BufferType.SCORES, (300,), F32).data_ptr()
    assert second.get(BufferType.KEY, (250,), F32).data_ptr() == where
    assert AttentionBuffers().pool is AttentionBuffers().pool is shared_pool()


def test_the_source_is_of_this_thread_and_this_block_alone():
    mine, seen = small_pool(), []
    assert active_source() is None
    with drawing_from(mine):
        assert active_source() is mine
        with drawing_from(None):
            assert active_source() is None
        thread = threading.Thread(target=lambda: seen.append(active_source()))
        thread.start()
        thread.join()
    assert active_source() is None
    assert seen == [None]
