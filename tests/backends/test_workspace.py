"""`workspace`: the bytes that a backend says it allocates are those that it does."""

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, RandomBlocks, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import blockwise, tiling, triton
from dilated_attention_pytorch.backends.scratch import Scratch
from dilated_attention_pytorch.backends.sizes import Shape, SizeRequest
from dilated_attention_pytorch.layout.size import ListSize
from dilated_attention_pytorch.planning.counting import lists_of_pattern


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim_v"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.float32, 48), (torch.float32, 4)]
)
@pytest.mark.parametrize(
    ("pattern", "heads_kv"),
    [(RandomBlocks(2, block_size=32), 4), (RandomBlocks(40, block_size=32), 2), (SlidingWindow(500, 0), 4)],
    ids=["direct", "copied", "window"],
)
def test_scratch_memory_is_what_the_backend_asks_for(monkeypatch, pattern, heads_kv, dtype, head_dim_v, training):
    """The named buffers of a real call, added up, against the arithmetic (which also counts masks and plans)."""
    asked: dict[int, dict[str, int]] = {}
    call = Scratch.__call__

    def watched(self, name, *shape):
        given = call(self, name, *shape)
        held = asked.setdefault(id(self), {})
        held[name] = max(held.get(name, 0), given.numel() * given.element_size())
        watching.append(self)
        return given

    watching: list[object] = []
    monkeypatch.setattr(Scratch, "__call__", watched)
    seq = 4000
    shapes = (4, 16), (heads_kv, 16), (heads_kv, head_dim_v)
    q, k, v = (torch.ones(1, seq, *shape, dtype=dtype, requires_grad=training) for shape in shapes)
    out = block_sparse_attention(q, k, v, pattern)
    if training:
        asked.clear()
        out.sum().backward()
    named = sum(bytes for held in asked.values() for bytes in held.values())
    shape = Shape.of(q, k, v)
    block = min(pattern.block_sizes, default=128)
    lists = lists_of_pattern(pattern, seq, seq, block)
    workspace = blockwise.workspace(SizeRequest(shape=shape, lists=lists, device="cpu"))
    planned = workspace.backward if training else workspace.forward
    # Masks that are kept have no name.
    planned -= min(tiling.MASKS_KEPT, lists.rows * lists.partial * lists.block_q * lists.block_k)
    assert 0.65 * planned <= named <= 1.05 * planned


MASKS_KEPT = tiling.MASKS_KEPT


@pytest.mark.parametrize("kept", [0, 3 * 32 * 32, MASKS_KEPT])
def test_masks_are_kept_for_the_heads_and_samples_that_share_them(monkeypatch, kept):
    """As many bytes of them as may be, and the same bits as without."""
    layout = BlockLayout.from_pattern(SlidingWindow(40, 9), 300, block_size=32)
    q, k, v, do = (torch.randn(2, 300, 4, 8, dtype=torch.float64) for _ in range(4))

    def results():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = block_sparse_attention(*leaves, layout)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    asked, held = [], []
    token_mask, hidden = BlockLayout.token_mask, tiling.Tiling.hidden
    for module in (tiling, blockwise):
        monkeypatch.setattr(module, "MASKS_KEPT", kept)
    monkeypatch.setattr(BlockLayout, "token_mask", lambda *args: (asked.append(len(args[1])), token_mask(*args))[1])

    def noted(call, *args):
        found = hidden(call, *args)
        held.append(sum(x.numel() for x in call.masks.of_tile.values()))
        return found

    monkeypatch.setattr(tiling.Tiling, "hidden", noted)
    got, num = results(), len(asked)
    assert max(held) <= kept
    for module in (tiling, blockwise):
        monkeypatch.setattr(module, "MASKS_KEPT", 0)
    asked.clear()
    assert all(map(torch.equal, got, results()))
    if kept == MASKS_KEPT:
        assert max(held) > 0
        assert num * 4 <= len(asked)  # of 8 heads of samples, in one thread or two


@pytest.mark.parametrize(("block", "seq"), [(16, 40), (32, 30)])
def test_the_triton_kernels_are_given_what_the_planner_counts(monkeypatch, block, seq):
    """Without a GPU, in the interpreter: what is allocated besides out, lse, dq, dk and dv."""
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    q, k, v = (torch.randn(1, seq, *shape, requires_grad=True) for shape in ((2, 16), (1, 16), (1, 8)))
    layout = BlockLayout.from_pattern(SlidingWindow(20, 0), seq, block_size=block)
    given = []

    def watched(make):
        def call(*args, **options):
            made = make(*args, **options)
            given.append(made.nbytes)
            return made

        return call

    request = SizeRequest(shape=Shape.of(q, k, v), lists=ListSize.of(layout), device="cuda")
    layout.order(by_key=True)
    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "zeros_like", "full", "full_like"):
            patch.setattr(torch, name, watched(getattr(torch, name)))
        out, lse = block_sparse_attention(q, k, v, layout, backend="triton", return_lse=True)
        assert sum(given) == out.nbytes + lse.nbytes + triton.workspace(request).forward
        given.clear()
        do = out.new_ones(out.shape)
        grads = torch.autograd.grad(out, (q, k, v), do)
    assert sum(given) == sum(grad.nbytes for grad in grads) + triton.workspace(request).backward
