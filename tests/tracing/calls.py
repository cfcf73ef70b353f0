"""The public API as functions of tensors, for tests that run each of them in every mode of PyTorch."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    BlockLayout,
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    Causal,
    CumulativeMass,
    DilatedAttention,
    Documents,
    Full,
    GlobalTokens,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    PerHead,
    RandomBlocks,
    RelativeThreshold,
    SharedBudget,
    SlidingWindow,
    SparsePatternConfig,
    SparsitySchedule,
    TopK,
    block_masses,
    block_sparse_attention,
    create_block_sparse_attention,
    decode_attention,
    dilated_attention,
    explain,
    gate_loss,
    kept_mass,
    merge_attention,
    plan_memory,
    select_blocks,
    split_budget,
)
from dilated_attention_pytorch.distributed.shard import row_work
from dilated_attention_pytorch.integrations.pytorch import replace_attention, sdpa_with
from dilated_attention_pytorch.layout import pattern_cache
from dilated_attention_pytorch.models import KVCache, LongNetDecoderLayer
from dilated_attention_pytorch.models.longnet import Rotary
from dilated_attention_pytorch.ops import attention_with_weights

SEQ, HEADS, DIM = 80, 2, 8
WINDOW = SlidingWindow(9, 2)
CONFIG = LongNetConfig(
    vocab_size=11, dim=16, num_layers=2, num_heads=2, segment_lengths=(16, 32), dilation_rates=(1, 2)
)  # fmt: skip
ADAPTIVE = SparsePatternConfig(pattern_type="adaptive", sparsity_ratio=0.4, block_size=16)
LOCAL = SparsePatternConfig(pattern_type="local_window", local_window_size=32, block_size=16)


def qkv(heads_kv=HEADS, seq=SEQ):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, seq, h, DIM, generator=g) for h in (HEADS, heads_kv, heads_kv))


def features(num=1, dim=HEADS * DIM):
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, SEQ, dim, generator=g) for _ in range(num))


def of_module(make, *inputs, **options):
    """A module as a function of its parameters and its inputs."""
    torch.manual_seed(2)
    module = make().eval()
    names = [name for name, _ in module.named_parameters()]

    def call(*tensors):
        given = dict(zip(names, tensors, strict=False))
        return functional_call(module, given, tensors[len(names) :], options)

    call.module = module
    return call, (*(x.detach() for x in module.parameters()), *inputs)


def opened(module):
    SparsitySchedule(module, steps=4).step()
    return module


def transformer():
    layer = nn.TransformerEncoderLayer(HEADS * DIM, HEADS, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    replace_attention(model, WINDOW)
    return model


def selected(**options):
    def call(q, k, v):
        layout = select_blocks(q, k, block_size=16, is_causal=True, **options)
        return block_sparse_attention(q, k, v, layout)

    return call, qkv()


def decoded(q, k, v):
    return decode_attention(q[:, -1:], k, v, WINDOW, lengths=[SEQ, SEQ - 7])


def with_layout(**options):
    layout = BlockLayout.from_pattern(RandomBlocks(2, block_size=16), SEQ, block_size=16)

    def call(*tensors):
        return block_sparse_attention(*tensors, layout, **options)

    call.module = layout
    return call, qkv()


class Continued(nn.Module):
    """A prompt and a token more, by a cache."""

    def __init__(self):
        super().__init__()
        self.model = LongNetLM(CONFIG)

    def forward(self, tokens):
        cache = KVCache(CONFIG.branches, SEQ)
        return torch.cat([self.model(tokens[:, :70], cache=cache), self.model(tokens[:, 70:71], cache=cache)], dim=1)


def decoder_layer():
    class Crossing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LongNetDecoderLayer(CONFIG, cross_attention=True)

        def forward(self, x, memory):
            rotary = Rotary.of(0, x.shape[1], CONFIG, x.device)
            return self.layer(x, rotary, memory=memory)

    return Crossing()


def kept_layouts(q):
    """What a user asks of the cache of the process."""
    layout = pattern_cache().layout(WINDOW | GlobalTokens(2), SEQ, block_size=16)
    return q * len(layout.causal.by_key.indices)


def masses_split(q, k):
    masses = block_masses(q, k, block_size=16)
    return torch.tensor([each.share for each in split_budget([masses, masses], TopK(0.3), tokens=SEQ, block_size=16)])


def attention(pattern, **options):
    return lambda q, k, v: block_sparse_attention(q, k, v, pattern, **options)


def call_of(function, *tensors):
    return function, tensors or qkv()


TOKENS = torch.arange(2 * SEQ).remainder(11).view(2, SEQ)
PADDING = torch.arange(SEQ).expand(2, -1) > SEQ - 9
IDS = (torch.arange(SEQ) // 30).expand(2, -1).contiguous()

# name → a function that makes (function, tensors).
CALLS = {
    "window": lambda: call_of(attention(WINDOW)),
    "causal": lambda: call_of(attention(Causal())),
    "random blocks, causal": lambda: call_of(attention(RandomBlocks(2, block_size=16), is_causal=True)),
    "per head": lambda: call_of(attention(PerHead((Full(), WINDOW)) & Causal())),
    "documents": lambda: call_of(attention(Documents((30, 50)))),
    "lse": lambda: call_of(attention(WINDOW, return_lse=True)),
    "grouped": lambda: call_of(attention(WINDOW), *qkv(1)),
    "sinks and softcap": lambda: call_of(
        lambda q, k, v, s: block_sparse_attention(q, k, v, WINDOW, sinks=s, softcap=5.0), *qkv(), torch.ones(HEADS)
    ),
    "masks": lambda: call_of(
        lambda q, k, v, p, i: block_sparse_attention(q, k, v, WINDOW, key_padding_mask=p, document_ids=i),
        *qkv(), PADDING, IDS,
    ),
    "reference": lambda: call_of(attention(WINDOW, backend="reference")),
    "a layout": with_layout,
    "a layout, causal": lambda: with_layout(is_causal=True),
    "built inside": lambda: call_of(lambda q, k, v: block_sparse_attention(q, k, v, SlidingWindow(7, 0) & Causal())),
    "dilated": lambda: call_of(
        lambda q, k, v: dilated_attention(q, k, v, segment_lengths=[16, 48], dilation_rates=[1, 2], is_causal=True)
    ),
    "dilated, detached": lambda: call_of(
        lambda q, k, v: dilated_attention(
            q, k, v, segment_lengths=[16, 48], dilation_rates=[1, 2], detach_branch_weights=True
        )
    ),
    "decode": lambda: call_of(decoded),
    "merge": lambda: call_of(lambda q, k, v, a, b: merge_attention([q, k], [a, b]), *qkv(),
                             *torch.ones(2, 2, HEADS, SEQ)),
    "weights": lambda: call_of(lambda q, k, v: attention_with_weights(q, k, v, WINDOW)[1].to_dense()),
    "select TopK": lambda: selected(selector=TopK(0.4)),
    "select SharedBudget": lambda: selected(selector=SharedBudget(0.4), scorer="mean"),
    "select CumulativeMass": lambda: selected(selector=CumulativeMass(0.7, 0.6), scorer=Antidiagonal(4)),
    "select RelativeThreshold": lambda: selected(selector=RelativeThreshold(0.5), scorer="exact"),
    "masses": lambda: call_of(lambda q, k: block_masses(q, k, block_size=16), *qkv()[:2]),
    "kept mass": lambda: call_of(lambda q, k: kept_mass(q, k, WINDOW, is_causal=True), *qkv()[:2]),
    "split budget": lambda: call_of(masses_split, *qkv()[:2]),
    "explain": lambda: call_of(lambda q, k, v: q * len(explain(q, k, v, WINDOW, is_causal=True).reasons)),
    "plan": lambda: call_of(
        lambda q: q * plan_memory(WINDOW, SEQ, device="cpu").peak_bytes, qkv()[0]
    ),
    "row work": lambda: call_of(lambda q: q * row_work(WINDOW, SEQ, 16).numel(), qkv()[0]),
    "kept layouts": lambda: call_of(kept_layouts, qkv()[0]),
    "sdpa_with": lambda: call_of(lambda q, k, v: sdpa_with(WINDOW)(q, k, v), *(x.transpose(1, 2) for x in qkv())),
    "gate loss": lambda: of_module(lambda: Loss(BlockGate(HEADS, DIM)), *qkv()[:2]),
    "BlockSparseAttention": lambda: of_module(lambda: BlockSparseAttention(WINDOW), *qkv(), is_causal=True),
    "opened": lambda: of_module(lambda: opened(BlockSparseAttention(WINDOW)), *qkv()),
    "BlockSparseRingDilatedAttention": lambda: of_module(
        lambda: BlockSparseRingDilatedAttention([64, 80], [1, 2], sparsity_ratio=0.6, block_size=16), *qkv()
    ),
    "BlockSparseHierarchical": lambda: of_module(
        lambda: BlockSparseHierarchical("fine_grained", block_size=16), *qkv()
    ),
    "BlockSparseAdaptive": lambda: of_module(lambda: BlockSparseAdaptive(0.4, block_size=16), *qkv(), is_causal=True),
    "adaptive, gated": lambda: of_module(
        lambda: BlockSparseAdaptive(0.4, scorer=BlockGate(HEADS, DIM), gate_strength=0.5, block_size=16), *qkv()
    ),
    "adaptive, opened": lambda: of_module(lambda: opened(BlockSparseAdaptive(0.4, block_size=16)), *qkv()),
    "pooled": lambda: of_module(
        lambda: BlockSparseAttention(WINDOW, enable_memory_pool=True, enable_buffer_manager=True), *qkv()
    ),
    "DilatedAttention": lambda: of_module(lambda: DilatedAttention([16, 48], [1, 2]), *qkv(), is_causal=True),
    "MultiheadDilatedAttention": lambda: of_module(
        lambda: MultiheadDilatedAttention(HEADS * DIM, HEADS, [16, 48], [1, 2], layer_norm=True), *features() * 3
    ),
    "multihead block-sparse": lambda: of_module(
        lambda: BlockSparseRingMultiheadDilatedAttention(HEADS * DIM, HEADS, sparse_config=LOCAL), *features(3)
    ),
    "multihead adaptive": lambda: of_module(
        lambda: BlockSparseRingMultiheadDilatedAttention(HEADS * DIM, HEADS, sparse_config=ADAPTIVE), *features(3)
    ),
    "auto": lambda: of_module(lambda: create_block_sparse_attention("auto", seq_len=SEQ, budget=0.5), *qkv()),
    "LongNet": lambda: of_module(lambda: LongNet(CONFIG), *features()),
    "LongNetLM": lambda: of_module(lambda: LongNetLM(CONFIG), TOKENS),
    "LongNetLM with a cache": lambda: of_module(Continued, TOKENS),
    "LongNetDecoderLayer": lambda: of_module(decoder_layer, *features(2)),
    "replace_attention": lambda: of_module(transformer, *features()),
}  # fmt: skip


class Loss(nn.Module):
    def __init__(self, gate: BlockGate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return gate_loss(self.gate, q, k, block_size=16)
