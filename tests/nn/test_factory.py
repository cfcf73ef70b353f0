"""`create_block_sparse_attention`: every variant by its name, and errors that list what there is."""

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    block_sparse_factory,
    create_block_sparse_attention,
)
from dilated_attention_pytorch.nn.factory import VARIANTS

CASES = {
    "base": (BlockSparseRingDilatedAttention, {"sparsity_ratio": 0.5, "block_size": 16}),
    "ring": (
        BlockSparseRingDilatedAttention,
        {"sparse_config": SparsePatternConfig(sparsity_ratio=0.5, block_size=16)},
    ),
    "adaptive": (BlockSparseAdaptive, {"sparsity_ratio": 0.3, "block_size": 16}),
    "hierarchical": (BlockSparseHierarchical, {"levels": [(1, 32), (2, 64)], "block_size": 16}),
    "multihead": (BlockSparseRingMultiheadDilatedAttention, {"embed_dim": 24, "num_heads": 3, "block_size": 16}),
}


def test_the_cases_are_all_the_variants():
    assert CASES.keys() | {"auto"} == VARIANTS.keys()  # which has tests of its own


@pytest.mark.parametrize("variant", CASES)
def test_every_variant_is_its_class_with_these_options(variant):
    cls, options = CASES[variant]
    torch.manual_seed(1)
    made = create_block_sparse_attention(variant=variant, **options)
    torch.manual_seed(1)
    direct = cls(**options)
    assert type(made) is cls
    x = torch.randn(2, 100, 24) if variant == "multihead" else torch.randn(2, 100, 3, 8)
    for causal in (False, True):
        assert torch.equal(made(x, x, x, causal), direct(x, x, x, causal))


@pytest.mark.parametrize("variant", ["base", "ring", "hierarchical"])
def test_what_comes_out_is_right(variant):
    module = create_block_sparse_attention(variant, **CASES[variant][1])
    q, k, v = (torch.randn(1, 100, 3, 8, dtype=torch.float64) for _ in range(3))
    want = block_sparse_attention(q, k, v, module.pattern(), backend="reference")
    torch.testing.assert_close(module(q, k, v), want, rtol=0, atol=1e-10)


def test_base_is_the_default():
    module = create_block_sparse_attention()
    assert type(module) is BlockSparseRingDilatedAttention
    assert module.sparse_config == SparsePatternConfig()
    assert module.segment_lengths == (2048, 4096, 8192)


def test_ratio_block_size_and_segments_are_plain_keywords():
    module = create_block_sparse_attention(
        variant="base", segment_lengths=[1024], dilation_rates=[2], sparsity_ratio=0.01, block_size=64
    )
    assert module.sparse_config == SparsePatternConfig(sparsity_ratio=0.01, block_size=64)
    assert (module.segment_lengths, module.dilation_rates) == ((1024,), (2,))


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_both_names_of_dropout(variant, name):
    module = create_block_sparse_attention(variant, **CASES[variant][1], **{name: 0.25})
    assert getattr(module, "attention", module).dropout == 0.25


@pytest.mark.parametrize("variant", ["adaptve", "", None, 3, ["base"]])
def test_an_unknown_variant_lists_what_there_is(variant):
    with pytest.raises(
        ValueError,
        match=r"variant must be one of \['adaptive', 'auto', 'base', 'hierarchical', 'multihead', 'ring'\], got",
    ):
        create_block_sparse_attention(variant)


@pytest.mark.parametrize("variant", CASES)
def test_an_unknown_keyword_lists_what_the_variant_takes(variant):
    with pytest.raises(TypeError, match=f"unknown keyword 'window_size' for variant '{variant}'; it takes") as error:
        create_block_sparse_attention(variant, window_size=3, **CASES[variant][1])
    for name in CASES[variant][1]:
        assert f"'{name}'" in str(error.value)
    assert "'attention_dropout'" in str(error.value)
    # dilated segments mean nothing to a hierarchical pattern, nor to a choice from the content
    assert ("'segment_lengths'" in str(error.value)) == (variant not in ("hierarchical", "adaptive"))


def test_a_keyword_of_another_variant_is_unknown():
    with pytest.raises(TypeError, match="unknown keyword 'embed_dim' for variant 'base'"):
        create_block_sparse_attention("base", embed_dim=24)
    with pytest.raises(TypeError, match="unknown keyword 'sparsity_ratio' for variant 'hierarchical'"):
        create_block_sparse_attention("hierarchical", sparsity_ratio=0.1)


def test_bad_values_are_refused_as_by_the_class():
    with pytest.raises(ValueError, match=r"sparsity_ratio must be .* in \(0, 1\], got 2"):
        create_block_sparse_attention(sparsity_ratio=2)
    with pytest.raises(TypeError, match="embed_dim"):
        create_block_sparse_attention("multihead", num_heads=3)


def test_is_one_function_at_both_paths():
    assert block_sparse_factory.create_block_sparse_attention is package.create_block_sparse_attention
