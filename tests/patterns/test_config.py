"""`SparsePatternConfig` is a record: every pattern type with every field, the ones that it reads and the others."""

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
    create_block_sparse_attention,
)

READS = {
    "dilated_sparse": {"sparsity_ratio"},
    "local_window": {"local_window_size"},
    "global_local": {"local_window_size", "global_tokens"},
    "hierarchical": {"levels"},
    "adaptive": {"sparsity_ratio"},
}
VALUES = {"sparsity_ratio": 0.4, "local_window_size": 40, "global_tokens": 20, "levels": ((1, 32), (2, 64))}
SEGMENTS = {"segment_lengths": [48, 96], "dilation_rates": [1, 2]}
SUBSETS = [set(names) for n in range(len(VALUES) + 1) for names in itertools.combinations(VALUES, n)]


def config(pattern_type, names, **changes):
    return SparsePatternConfig(
        pattern_type=pattern_type, block_size=16, **{name: VALUES[name] for name in names} | changes
    )


@pytest.mark.parametrize("pattern_type", READS)
class TestRecord:
    def test_fields_that_are_not_read_change_nothing(self, pattern_type):
        """A config of the design documents with another type of its own comment was an error: it also names a ratio."""
        for names in SUBSETS:
            whole, read = config(pattern_type, names), config(pattern_type, names & READS[pattern_type])
            assert whole.unused == {name: VALUES[name] for name in names - READS[pattern_type]}
            assert read.unused == {}
            assert (whole == read) == (names <= READS[pattern_type])
            for name in READS[pattern_type]:
                assert getattr(whole, name) == getattr(read, name) is not None
            if pattern_type != "adaptive":
                for is_causal in (False, True):
                    assert whole.pattern(is_causal=is_causal) == read.pattern(is_causal=is_causal)

    def test_the_repr_tells_the_used_from_the_unused(self, pattern_type):
        for names in SUBSETS:
            used, *notes = repr(config(pattern_type, names)).removesuffix(")").split("; ")
            for name in VALUES:
                assert (f" {name}=" in used) == (name in READS[pattern_type])
            unused = "".join(note for note in notes if note.startswith("unused: "))
            for name, value in VALUES.items():
                assert (f"{name}={value!r}" in unused) == (name in names - READS[pattern_type])
            # What the share is a share of: kept, not dropped.
            share = 40 if "sparsity_ratio" in names else 10
            assert (f"keeps {share}% of the blocks" in notes) == ("sparsity_ratio" in READS[pattern_type])

    def test_a_copy_is_equal(self, pattern_type):
        whole = config(pattern_type, VALUES)
        for again in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), dataclasses.replace(whole)):
            assert again == whole
            assert hash(again) == hash(whole)
            assert repr(again) == repr(whole)

    def test_the_type_can_be_changed(self, pattern_type):
        for other in READS:
            changed = dataclasses.replace(config(pattern_type, VALUES), pattern_type=other)
            assert changed == config(other, VALUES)

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("sparsity_ratio", 0.0, ValueError, r"sparsity_ratio must be .* in \(0, 1\], got 0.0"),
            ("sparsity_ratio", math.nan, ValueError, r"sparsity_ratio must be .* in \(0, 1\], got nan"),
            ("sparsity_ratio", "10%", TypeError, "sparsity_ratio must be a number, got '10%'"),
            ("local_window_size", -1, ValueError, "local_window_size must be at least 0, got -1"),
            ("local_window_size", 512.0, TypeError, "local_window_size must be an int, got 512.0"),
            ("global_tokens", 0, ValueError, "global_tokens must be at least 1, got 0"),
            ("global_tokens", True, TypeError, "global_tokens must be an int, got True"),
            ("levels", "deep", ValueError, r"levels must be pairs or one of \['fine_grained', .* got 'deep'"),
            ("levels", [], ValueError, r"levels must hold at least one .* got \[\]"),
            ("levels", [(0, 64)], ValueError, "stride must be at least 1, got 0"),
            ("levels", [(1, "64")], TypeError, "window must be an int, got '64'"),
            ("block_size", 100, ValueError, "block_size must be one of .* got 100"),
        ],
    )
    def test_a_value_that_a_field_cannot_have(self, pattern_type, name, value, error, message):
        """Read or not: a record with it is of no use to the type that reads it."""
        with pytest.raises(error, match=message):
            SparsePatternConfig(**{"pattern_type": pattern_type, name: value})

    @pytest.mark.parametrize("name", [*VALUES, "pattern_type", "block_size"])
    def test_a_misspelt_field(self, pattern_type, name):
        with pytest.raises(TypeError, match=f"'{name}s'"):
            SparsePatternConfig(**{"pattern_type": pattern_type, f"{name}s": 1})
        for make in (create_block_sparse_attention, BlockSparseRingDilatedAttention):
            with pytest.raises(TypeError, match=f"unknown keyword '{name}s'"):
                make(**{"pattern_type": pattern_type, f"{name}s": 1})


def modules_of(pattern_type):
    """Modules that take such a configuration and segments, given whole or by its fields."""
    whole = config(pattern_type, VALUES)
    given = ({"sparse_config": whole}, {"pattern_type": pattern_type, "block_size": 16, **VALUES})
    for options in given:
        yield BlockSparseRingMultiheadDilatedAttention(16, 2, **SEGMENTS, **options).attention
        if pattern_type != "adaptive":
            yield BlockSparseRingDilatedAttention(**SEGMENTS, **options)
            yield create_block_sparse_attention("ring", **SEGMENTS, **options)


@pytest.mark.parametrize("pattern_type", READS)
def test_modules_take_the_record_and_segments_that_are_not_read(pattern_type):
    read = {name: VALUES[name] for name in READS[pattern_type]}
    if pattern_type == "adaptive":
        plain = BlockSparseAdaptive(0.4, block_size=16)
    else:
        segments = SEGMENTS if pattern_type == "dilated_sparse" else {}
        plain = BlockSparseRingDilatedAttention(pattern_type=pattern_type, block_size=16, **read, **segments)
    assert "unused" not in repr(plain)
    x = torch.randn(1, 137, 2, 8)
    for module in modules_of(pattern_type):
        assert torch.equal(module(x, x, x), plain(x, x, x))
        note = module.extra_repr().split("; unused: ")[1]
        for name, value in VALUES.items():
            assert (f"{name}={value!r}" in note) == (name not in read)
        assert ("segment_lengths=(48, 96), dilation_rates=(1, 2)" in note) == (pattern_type != "dilated_sparse")


@pytest.mark.parametrize("pattern_type", READS)
def test_what_contradicts_itself_is_refused_by_every_type(pattern_type):
    whole = config(pattern_type, VALUES)
    for segments, message in (
        ({"segment_lengths": [48]}, r"must be given together or not at all, got \[48\] and None"),
        ({"dilation_rates": [1]}, r"must be given together or not at all, got None and \[1\]"),
        ({"segment_lengths": [48], "dilation_rates": [1, 2]}, "must have the same length"),
        ({"segment_lengths": [1, 2], "dilation_rates": [48, 96]}, "Did you pass dilations first"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockSparseRingMultiheadDilatedAttention(16, 2, sparse_config=whole, **segments)
        if pattern_type != "adaptive":
            with pytest.raises(ValueError, match=message):
                BlockSparseRingDilatedAttention(sparse_config=whole, **segments)
    for make in (BlockSparseRingMultiheadDilatedAttention, BlockSparseRingDilatedAttention):
        sizes = {"embed_dim": 16, "num_heads": 2} if make is BlockSparseRingMultiheadDilatedAttention else {}
        with pytest.raises(ValueError, match=r"\['levels'\] must be given in sparse_config or as keywords, not both"):
            make(sparse_config=whole, levels="standard", **sizes)
