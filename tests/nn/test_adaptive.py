"""`BlockSparseAdaptive`, its gate, and the automatic choice."""

import copy
import re

import pytest
import torch

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    Full,
    MeanPooled,
    SharedBudget,
    SparsePatternConfig,
    TopK,
    block_masses,
    block_sparse_attention,
    create_block_sparse_attention,
    gate_loss,
    select_blocks,
)
from tests import dense


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def qkv(seq=150, heads=4, heads_kv=2, dim=8, batch=2, dtype=torch.float64):
    return normal(batch, seq, heads, dim, dtype=dtype), *(normal(batch, seq, heads_kv, dim, dtype=dtype) for _ in "kv")


def trained_gate(heads=4, heads_kv=2, dim=8, **options):
    gate = BlockGate(heads, dim, heads_kv, dtype=torch.float64, **options)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return gate


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scorer", ["patches", Antidiagonal(4), "gate"])
def test_it_attends_to_what_it_selects(is_causal, scorer):
    scorer = trained_gate() if scorer == "gate" else scorer
    module = BlockSparseAdaptive(0.3, block_size=(32, 16), scorer=scorer)
    q, k, v = qkv()
    layout = select_blocks(
        q, k, scorer=scorer, selector=TopK(0.3, even=True, across_heads=True), block_size=(32, 16), is_causal=is_causal
    )
    allowed = layout.to_dense()
    assert 0.2 < allowed.double().mean() / (0.5 if is_causal else 1) < 0.6
    want, weights = dense.attend(q, k, v, allowed)
    out, got = module(q, k, v, is_causal, return_attention_weights=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(module(q, k, v, is_causal), want, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.to_dense(), weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_and_value_one_gives_one(dtype):
    """The first version failed with "mat1 and mat2 must have the same dtype"; the gate here is in float32."""
    for scorer in ("patches", "moments", BlockGate(4, 8, 2)):
        q, k, _ = qkv(dtype=dtype)
        module = BlockSparseAdaptive(0.3, block_size=16, scorer=scorer)
        for is_causal in (False, True):
            out = module(q, k, torch.ones_like(k), is_causal)
            assert out.dtype == dtype
            torch.testing.assert_close(out, torch.ones_like(out))


def test_autocast_takes_its_dtype():
    q, k, v = qkv(dtype=torch.float32)
    module = BlockSparseAdaptive(0.3, block_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k, v)
    want = module(*(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(out, want)


@pytest.mark.parametrize("scorer", ["patches", "gate"])
def test_a_sample_does_not_see_its_neighbours(scorer):
    """The first version averaged its choice over the batch."""
    module = BlockSparseAdaptive(0.3, block_size=16, scorer=trained_gate() if scorer == "gate" else scorer)
    q, k, v = qkv(batch=3)
    together = module(q, k, v, True)
    for sample in range(3):
        alone = module(*(x[sample : sample + 1] for x in (q, k, v)), True)
        torch.testing.assert_close(alone[0], together[sample], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_the_past_does_not_see_the_future(strength):
    """Later blocks change: bit for bit the same before them. A soft gate sees not even later tokens of a block."""
    module = BlockSparseAdaptive(0.4, block_size=16, scorer=trained_gate(), gate_strength=strength)
    q, k, v = qkv(seq=160, batch=1)
    others = [x.clone() for x in (q, k, v)]
    for x in others:
        x[:, 96:] = 5 * normal(*x[:, 96:].shape)
    before, after = module(q, k, v, True), module(*others, True)
    assert torch.equal(before[:, :96], after[:, :96])
    assert not torch.equal(before[:, 96:], after[:, 96:])
    gate = module.scorer
    for cut in (1, 2, 3, 18):
        moved_q, moved_k = q.clone(), k.clone()
        moved_q[:, cut:], moved_k[:, cut:] = 0.0, 0.0
        pairs = zip(
            gate.token_features(q, k, 0.3, (16, 16)), gate.token_features(moved_q, moved_k, 0.3, (16, 16)), strict=True
        )
        assert all(torch.equal(a[:, :cut], b[:, :cut]) for a, b in pairs)


def test_masks_reach_selection_and_attention():
    q, k, v = qkv()
    padding = torch.arange(150).expand(2, -1) >= torch.tensor([[90], [150]])
    module = BlockSparseAdaptive(0.3, block_size=16)
    out = module(q, k, v, key_padding_mask=padding)
    allowed = module.layout(q, k, key_padding_mask=padding).to_dense() & ~padding[:, None, None]
    torch.testing.assert_close(out, dense.attend(q, k, v, allowed)[0], rtol=0, atol=1e-10)
    ids = torch.arange(150).expand(2, -1) // 50
    out = module(q, k, v, True, document_ids=ids)
    same = ids[:, None, :, None] == ids[:, None, None]
    allowed = module.layout(q, k, True, document_ids=ids).to_dense() & same
    torch.testing.assert_close(out, dense.attend(q, k, v, allowed)[0], rtol=0, atol=1e-10)


def soft_by_hand(q, k, v, gate, strength, allowed, patch, scale, hidden=None, ids=None):
    """Scores plus strength times the gate's own, from running means and extremes written one token at a time."""

    def of_token(x, sample, t, hidden, summarise):
        counted = [s for s in range(t - t % patch, t + 1) if ids is None or ids[sample, s] == ids[sample, t]]
        counted = [s for s in counted if hidden is None or not hidden[sample, s]]
        return summarise(x[sample, counted]) if counted else torch.zeros_like(x[sample, t])

    def features(x, summarise, hidden=hidden):
        samples = [
            torch.stack([of_token(x, sample, t, hidden, summarise) for t in range(x.shape[1])])
            for sample in range(len(x))
        ]
        return torch.stack(samples)

    rows = features(q, lambda x: x.mean(0), hidden=None) * scale
    rows = rows + torch.einsum("bthf,hfg->bthg", rows, gate.row_weight)
    mean = features(k, lambda x: x.mean(0))
    seen = torch.cat((mean, features(k, lambda x: x.amax(0)), features(k, lambda x: x.amin(0))), -1)
    columns = mean + torch.einsum("bthf,hfg->bthg", seen, gate.column_weight)
    group = q.shape[2] // k.shape[2]
    k, v, columns = (x.repeat_interleave(group, 2) for x in (k, v, columns))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores + strength * torch.einsum("bqhd,bkhd->bhqk", rows, columns)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def test_soft_gate_by_hand():
    gate = trained_gate()
    module = BlockSparseAdaptive(0.4, block_size=16, scorer=gate, gate_strength=0.6, scale=0.3)
    q, k, v = qkv(seq=70)
    for is_causal in (False, True):
        allowed = module.layout(q, k, is_causal).to_dense()
        want = soft_by_hand(q, k, v, gate, 0.6, allowed, 4, 0.3)
        torch.testing.assert_close(module(q, k, v, is_causal), want, rtol=0, atol=1e-10)


HIDDEN = torch.zeros(2, 70, dtype=torch.bool)
HIDDEN[0, :6] = HIDDEN[1, [9, 30, 31, 69]] = True
PACKED = torch.stack((torch.arange(70) // 23, torch.arange(70) % 5 // 2))


@pytest.mark.parametrize("masks", [("hidden",), ("ids",), ("hidden", "ids")], ids="+".join)
def test_soft_gate_with_masks_by_hand(masks):
    """A key's column came from all of its patch so far: of hidden keys and of other documents too, so that their
    contents moved the scores of those that are seen. Now what they hold changes no bit of the others' results."""
    gate = trained_gate()
    module = BlockSparseAdaptive(0.4, block_size=16, scorer=gate, gate_strength=0.6, scale=0.3)
    q, k, v = qkv(seq=70)
    hidden, ids = (HIDDEN if "hidden" in masks else None), (PACKED if "ids" in masks else None)
    unmasked = torch.ones(2, 1, 70, 70, dtype=torch.bool)
    if hidden is not None:
        unmasked = unmasked & ~hidden[:, None, None]
    if ids is not None:
        unmasked = unmasked & (ids[:, None, :, None] == ids[:, None, None])
    options = {"key_padding_mask": hidden, "document_ids": ids}
    allowed = module.layout(q, k, True, **options).to_dense() & unmasked
    some = allowed.any(-1).all(1)  # hidden tokens may see nothing
    want = soft_by_hand(q, k, v, gate, 0.6, allowed, 4, 0.3, hidden, ids)
    torch.testing.assert_close(module(q, k, v, True, **options)[some], want[some], rtol=0, atol=1e-10)
    everything = BlockSparseAdaptive(1.0, block_size=16, scorer=gate, gate_strength=0.6)
    out = everything(q, k, v, True, **options)
    if hidden is not None:
        k[hidden], v[hidden] = 7.0, -7.0
    if ids is not None:
        for x in (q, k, v):
            x[ids == 1] = 5 * normal(*x[ids == 1].shape)
    moved = everything(q, k, v, True, **options)
    same = torch.ones(2, 70, dtype=torch.bool) if ids is None else ids != 1
    assert torch.equal(out[same], moved[same])


@pytest.mark.slow
def test_soft_gate_gradients():
    """By differences: of q, k, v and of every parameter of the gate. The first version had no gradient at all."""
    module = BlockSparseAdaptive(0.5, block_size=16, scorer=trained_gate(2, 1, 2), gate_strength=0.6)
    q, k, v = (x.requires_grad_() for x in qkv(seq=40, heads=2, heads_kv=1, dim=2, batch=1))
    parameters = list(module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def attend(q, k, v, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (q, k, v, True))

    assert torch.autograd.gradcheck(attend, (q, k, v, *parameters), fast_mode=False)
    module(q, k, v, True).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)


def test_a_new_gate_is_the_scorer_it_starts_as():
    q, k, _ = qkv()
    for patch in ((4, 4), (2, 8), (None, None)):
        gate = BlockGate(4, 8, 2, queries=patch[0], keys=patch[1], dtype=torch.float64)
        for is_causal in (False, True):
            got = block_masses(q, k, scorer=gate, block_size=16, is_causal=is_causal)
            want = block_masses(q, k, scorer=MeanPooled(*patch), block_size=16, is_causal=is_causal)
            assert torch.equal(got, want)


def test_gate_loss_by_hand_and_by_differences():
    gate = trained_gate(2, 1, 4)
    q, k, _ = (x.requires_grad_() for x in qkv(seq=64, heads=2, heads_kv=1, dim=4, batch=1))
    call = {"block_size": 16, "is_causal": True}
    true, guess = block_masses(q, k, **call), block_masses(q, k, scorer=gate, **call)
    total = 0.0
    for h in range(2):
        for i in range(4):
            total += sum(true[0, h, i, j] * (true[0, h, i, j] / guess[0, h, i, j]).log() for j in range(i + 1))
    loss = gate_loss(gate, q, k, **call)
    torch.testing.assert_close(loss, total / 8, rtol=0, atol=1e-12)
    torch.testing.assert_close(gate_loss(gate, q, k, masses=true.detach(), **call), loss)
    loss.backward()
    assert q.grad is None
    assert k.grad is None
    names = [name for name, _ in gate.named_parameters()]

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = gate

        def forward(self):
            return gate_loss(self.gate, q, k, **call)

    def loss_of(*values):
        swapped = {f"gate.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(Loss(), swapped, ())

    assert torch.autograd.gradcheck(loss_of, list(gate.parameters()))


def test_gate_loss_takes_the_masses_of_its_own_call_alone():
    """Those of one sample were spread over all samples, and those of one head over all heads: a loss, and of something
    else than the gate was asked for."""
    gate = trained_gate()
    q, k, _ = qkv(seq=64)
    masses = block_masses(q, k, block_size=16)
    for other in (masses[:1], masses[:, :1], masses[:, :, :1], masses[0], block_masses(q, k, block_size=32)):
        message = re.escape(f"= [2, 4, 4, 4], got {list(other.shape)}")
        with pytest.raises(ValueError, match=f"masses must have shape .* {message}"):
            gate_loss(gate, q, k, masses=other, block_size=16)


def test_distillation_learns():
    """Keys whose importance a mean does not show: the gate sees it after a few steps, its rule never does."""
    torch.manual_seed(3)
    q, k = normal(1, 256, 2, 8, dtype=torch.float32), normal(1, 256, 1, 8, dtype=torch.float32)
    k = k * torch.tensor([0.2, 3.0]).repeat_interleave(32).repeat(4)[None, :, None, None]
    gate = BlockGate(2, 8, 1)
    call = {"block_size": 16, "is_causal": True}
    masses = block_masses(q, k, **call)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = gate_loss(gate, q, k, masses=masses, **call)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    restored = BlockGate(2, 8, 1)
    restored.load_state_dict(copy.deepcopy(gate.state_dict()))
    assert torch.equal(*(block_masses(q, k, scorer=each, **call) for each in (gate, restored)))


def test_gate_is_part_of_the_module():
    module = BlockSparseAdaptive(scorer=BlockGate(4, 8, 2))
    assert {name for name, _ in module.named_parameters()} == {"scorer.row_weight", "scorer.column_weight"}
    assert module.state_dict().keys() == {"scorer.row_weight", "scorer.column_weight"}


def test_multihead_with_an_adaptive_configuration():
    config = SparsePatternConfig(pattern_type="adaptive", sparsity_ratio=0.3, block_size=16)
    module = BlockSparseRingMultiheadDilatedAttention(32, 4, sparse_config=config, dtype=torch.float64)
    assert isinstance(module.attention, BlockSparseAdaptive)
    x = normal(2, 100, 32)
    q, k, v = (x @ w.T + b for w, b in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True))
    q, k, v = (t.unflatten(-1, (4, 8)) for t in (q, k, v))
    selector = TopK(0.3, even=True, across_heads=True)
    allowed = select_blocks(q, k, selector=selector, block_size=16, is_causal=True).to_dense()
    want = module.out_proj(dense.attend(q, k, v, allowed)[0].flatten(2))
    torch.testing.assert_close(module(x, x, x, True), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sparsity_ratio": 0}, ValueError, "sparsity_ratio must be the share of blocks kept"),
        ({"sparsity_ratio": 0.1, "selector": SharedBudget(0.1)}, ValueError, "sparsity_ratio or a selector, not both"),
        ({"selector": 3}, TypeError, "selector must be"),
        ({"scorer": "no"}, ValueError, "scorer must be one of"),
        ({"block_size": 24}, ValueError, "block_size must be one of"),
        ({"gate_strength": 1.0}, ValueError, "gate_strength needs a BlockGate"),
        ({"gate_strength": "1"}, TypeError, "gate_strength must be a number"),
        ({"sink": -1}, ValueError, "sink must be at least 0"),
        ({"sparse_config": SparsePatternConfig()}, ValueError, "must have pattern_type 'adaptive'"),
        (
            {"sparse_config": SparsePatternConfig(pattern_type="adaptive"), "sparsity_ratio": 0.3},
            ValueError,
            "in sparse_config or as keywords, not both",
        ),
        ({"segment_lengths": [64]}, TypeError, "segment_lengths"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        BlockSparseAdaptive(**options)


def test_other_modules_refuse_an_adaptive_configuration():
    with pytest.raises(ValueError, match="use BlockSparseAdaptive"):
        BlockSparseRingDilatedAttention(pattern_type="adaptive")


def test_a_gate_for_other_heads_says_so():
    q, k, _ = qkv()
    with pytest.raises(ValueError, match=r"q must have 2 heads of 8, as the gate was made for, got \[4, 8\]"):
        block_masses(q, k, scorer=BlockGate(2, 8), block_size=16)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"seq_len": 4096}, BlockSparseAttention, "dense: 4096 tokens are no more than 4096"),
        ({"seq_len": 65536, "budget": 1.0}, BlockSparseAttention, "dense: the budget allows it"),
        ({"seq_len": 65536}, BlockSparseAdaptive, r"adaptive: 6.2% of the blocks \(about 4096 keys a query\), 64 x 16"),
        ({"seq_len": 65536, "device": "cuda"}, BlockSparseAdaptive, "128 x 128 for cuda"),
        ({"seq_len": 2048, "budget": 0.5}, BlockSparseAdaptive, r"adaptive: 50.0% of the blocks \(as told\)"),
        ({"seq_len": 2**25}, BlockSparseHierarchical, "hierarchical, long_range: 1099511627776 blocks a head"),
    ],
)
def test_automatic_choice(options, kind, reason):
    module = create_block_sparse_attention("auto", **options)
    assert type(module) is kind
    assert re.search(reason, module.reason)
    assert module.reason in repr(module)
    if kind is BlockSparseAdaptive:
        assert module.selector.share == options.get("budget", 4096 / options["seq_len"])


def test_automatic_dense_is_dense():
    q, k, v = qkv()
    out = create_block_sparse_attention("auto", seq_len=150)(q, k, v, True)
    want = block_sparse_attention(q, k, v, Full(), is_causal=True, backend="reference")
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


def test_a_budget_that_cannot_be_met():
    with pytest.raises(ValueError, match=r"budget cannot be met, because .* got 0.1"):
        create_block_sparse_attention("auto", seq_len=2**25, budget=0.1)
    with pytest.raises(TypeError, match="unknown keyword 'block_size' for variant 'auto'"):
        create_block_sparse_attention("auto", seq_len=100, block_size=16)
