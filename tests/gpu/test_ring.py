"""Rings of processes that share a GPU: over gloo, through the host's memory. The kernels are those of one process."""

import pytest
import torch

from dilated_attention_pytorch import GlobalTokens, Placement, SlidingWindow, block_sparse_attention, dilated_attention
from tests.distributed import test_bias as test_bias_on_a_cpu
from tests.distributed import work
from tests.distributed.processes import ByRank, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def tensors(seq):
    draw = torch.Generator().manual_seed(0)
    q, do = (torch.randn(2, seq, 8, 64, generator=draw).half() for _ in range(2))
    k, v = (torch.randn(2, seq, 4, 64, generator=draw).half() for _ in range(2))
    return q, k, v, do, torch.randn(2, 8, seq, generator=draw)


def whole(attend, q, k, v, do, dlse):
    q, k, v, do, dlse = (x.cuda() for x in (q, k, v, do, dlse))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(0)
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (do, dlse))]


def compare(placement, results, expected):
    """Half precision: a part's result is rounded once more than the whole's."""
    for rank, got in enumerate(results):
        own = torch.cat([torch.arange(run.start, run.stop) for run in placement.tokens(rank)])
        for name, mine, want in zip(NAMES, got, expected, strict=True):
            want = want.cpu()[:, :, own] if name == "lse" else want.cpu()[:, own]
            torch.testing.assert_close(mine.float(), want.float(), rtol=2e-2, atol=2e-2, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_block_sparse(four, size, dropout_p):
    seq, pattern = 1100, SlidingWindow(300, 0) | GlobalTokens(40)
    placement = Placement.zigzag(seq, size)
    given = tensors(seq)
    options = {"is_causal": True, "dropout_p": dropout_p}

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, pattern, return_lse=True, backend="triton", **options)

    shards = ByRank(work.shard_of(given, placement, rank) for rank in range(size))
    results = four.run(size, work.attend_on_gpu, shards, {**options, "pattern": pattern, "placement": placement})
    compare(placement, results, whole(attend, *given))


@pytest.mark.parametrize("seq", [2048, 4 * 23 * 16], ids=["even", "blocks of 16"])
def test_dilated(four, seq):
    options = {"segment_lengths": (512, 2048), "dilation_rates": (1, 4), "is_causal": True}
    placement = Placement.contiguous(seq, 4, block_size=16 if seq < 2048 else 128)
    given = tensors(seq)

    def attend(q, k, v):
        return dilated_attention(q, k, v, return_lse=True, backend="triton", **options)

    shards = ByRank(work.shard_of(given, placement, rank) for rank in range(4))
    results = four.run(4, work.attend_on_gpu, shards, {**options, "placement": placement})
    compare(placement, results, whole(attend, *given))


@pytest.mark.parametrize("kind", ["window", "branches"])
def test_bias(four, kind):
    """Terms of keys and their gradients travel; float32 beside float64 in one process, sums over 176 keys."""
    placement = test_bias_on_a_cpu.PLACED["contiguous"]
    for names, backend in ((["table", "keys", "rows"], "triton"), (["slopes", "t5"], "blockwise")):
        got = four.run(2, test_bias_on_a_cpu.over_ring, placement, names, kind, {"backend": backend}, "cuda")
        want = test_bias_on_a_cpu.in_one_process(names, kind, {})
        largest = max(float(x.abs().max()) for x in want)
        test_bias_on_a_cpu.compare(got, want, placement, names, 1e-3 * largest)
