"""Patterns of published models: functions that return a pattern, or one for each layer as `register` takes them.

    block_sparse_attention(q, k, v, presets.longformer(512, global_tokens=1))
    register("mistral", presets.mistral(4096))
    register("gemma", presets.mistral(1024), layers=presets.gemma3(26, window=1024))

Who may attend is the paper's definition, which each docstring says; weights, positions and training are the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Pattern, PerHead, check_flag, check_int, check_sequence
from .blocks import LocalBlocks, RandomBlocks, check_block_size
from .branches import Branches
from .space import Neighborhood, SlidingTiles, check_shape
from .tokens import Causal, GlobalTokens, SlidingWindow

__all__ = [
    "bigbird",
    "gemma3",
    "longformer",
    "longnet",
    "mistral",
    "sta_video",
    "streaming_llm",
    "svg_spatial",
    "svg_temporal",
]

# The base model of the paper (section 4.1 of arXiv:2307.02486).
LONGNET_SEGMENT_LENGTHS = (2048, 4096, 8192, 16384, 32768)
LONGNET_DILATION_RATES = (1, 2, 4, 6, 12)


def longformer(window: int = 512, *, global_tokens: int = 1, at: Sequence[int] = ()) -> Pattern:
    """Longformer (arXiv:2004.05150): window / 2 tokens to each side, and symmetric global attention.

    Args:
        window: tokens of the window, even; 512 in the released models, whose window is not dilated.
        global_tokens: how many first tokens see all and are seen by all: 1 for a classification token. 0 is allowed.
        at: more global tokens, by position, such as those of a question. Neighbouring positions are one token rule of a
            layout, and a pattern may unite six: beside first tokens that is one stretch, without them two.
    """
    check_int("window", window, least=2)
    if window % 2:
        raise ValueError(f"window must be even, half of it lies on each side, got {window}")
    check_int("global_tokens", global_tokens, least=0)
    check_sequence("at", at, "ints")
    local = SlidingWindow(window // 2, window // 2)
    return local | GlobalTokens(global_tokens, queries=True, at=tuple(at)) if global_tokens or at else local


def bigbird(
    *,
    block_size: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
    num_heads: int | None = None,
) -> Pattern:
    """BigBird (arXiv:2007.14062), internal transformer construction: a window of blocks, blocks of global tokens that
    see all and are seen by all, and random key blocks for every query block.

    The global tokens are the first ones, wherever the sequence ends; the released models take the first and the last
    block. Random blocks are one from each of `random_blocks` equal parts of the sequence and may fall on others.

    Args:
        block_size: tokens of a block: 16, 32, 64, 128 or 256.
        window_blocks: odd, a block and half of the rest on each side.
        global_blocks, random_blocks: how many; 0 is allowed.
        num_heads: of the query; each head then gets random blocks of its own, as in the paper. By default all share
            them, which costs less.
    """
    check_int("window_blocks", window_blocks, least=1)
    if window_blocks % 2 == 0:
        raise ValueError(f"window_blocks must be odd, a block and as many on each side, got {window_blocks}")
    for name, count in (("global_blocks", global_blocks), ("random_blocks", random_blocks), ("seed", seed)):
        check_int(name, count, least=0)
    check_block_size("block_size", block_size)
    pattern: Pattern = LocalBlocks((window_blocks - 1) * block_size, block_size=block_size)
    if global_blocks:
        pattern |= GlobalTokens(global_blocks * block_size, queries=True)
    if num_heads is not None:
        check_int("num_heads", num_heads, least=1)
    if not random_blocks:
        return pattern
    if num_heads is None:
        return pattern | RandomBlocks(random_blocks, seed, block_size)
    heads = (RandomBlocks(random_blocks, seed * num_heads + head, block_size) for head in range(num_heads))
    return pattern | PerHead(tuple(heads))


def mistral(window: int = 4096) -> Pattern:
    """Mistral 7B (arXiv:2310.06825) and all that followed: causal, a token sees the last `window`, itself included."""
    check_int("window", window, least=1)
    return SlidingWindow(window - 1, 0)


def streaming_llm(window: int = 1020, sinks: int = 4) -> Pattern:
    """StreamingLLM (arXiv:2309.17453): causal, the first `sinks` tokens and the last `window`, itself included.

    Positions are counted through the whole text; the paper counts them inside the cache.
    """
    check_int("sinks", sinks, least=1)
    return mistral(window) | GlobalTokens(sinks) & Causal()


def longnet(
    segment_lengths: Sequence[int] = LONGNET_SEGMENT_LENGTHS,
    dilation_rates: Sequence[int] = LONGNET_DILATION_RATES,
) -> Branches:
    """LongNet (arXiv:2307.02486): by default the branches of its language models.

    These are for `dilated_attention`, `explain` and `plan_memory`: a key counts once for each branch that holds it, so
    they are no pattern.
    """
    return Branches(segment_lengths, dilation_rates)


def gemma3(num_layers: int, *, window: int = 1024, every: int = 6) -> dict[int, Pattern | None]:
    """Gemma 3 (arXiv:2503.19786): five layers with a causal window, then one that sees all, and so on.

    Returns:
        A pattern for each layer by number, None for those that are dense, as `layers` of `register` takes it.

    Args:
        num_layers: of the model.
        window: tokens that a local layer sees, the query's own included: 1024, of the 1B model 512.
        every: which layers are dense: the last of so many. (Gemma 2 has 2, with a window of 4096.)
    """
    check_int("num_layers", num_layers, least=1)
    check_int("every", every, least=1)
    local = mistral(window)
    return {layer: None if (layer + 1) % every == 0 else local for layer in range(num_layers)}


def sta_video(
    shape: Sequence[int] = (30, 48, 80),
    tile: Sequence[int] = (6, 8, 8),
    window: Sequence[int] | Sequence[Sequence[int]] = (18, 24, 24),
    *,
    prefix: int = 0,
) -> Pattern:
    """Sliding tile attention for video (arXiv:2502.04507), for tokens in the order `tile_order(shape, tile, prefix)`.
    By default the latents of HunyuanVideo with the paper's tiles.

    Args:
        shape: frames, height and width of the latents.
        tile: of tokens, along each of these.
        window: of tokens, in whole tiles; or one for each head, as the paper's search over heads finds them.
        prefix: tokens of text that all see and that see all.
    """
    check_sequence("window", window, "ints, or of windows, one for each head")
    per_head = bool(window) and not isinstance(window[0], int)
    windows: Sequence[Sequence[int]] = window if per_head else (window,)  # type: ignore[assignment]
    heads = tuple(SlidingTiles(tuple(shape), tuple(tile), each, prefix).in_tiles() for each in windows)  # type: ignore[arg-type]
    return PerHead(heads) if per_head else heads[0]


def svg_spatial(shape: Sequence[int], frames: int = 2, *, prefix: int = 0, sink: bool = False) -> Pattern:
    """A spatial head of Sparse VideoGen (arXiv:2502.01776): a query sees what is less than so many frames of tokens
    away, before and behind it.

    Args:
        shape: frames, height and width of the latents, whose tokens come frame by frame.
        frames: how wide the band is to each side. (The paper's code rounds it down to a multiple of 128 tokens.)
        prefix: tokens of text that all see and that see all.
        sink: all see the first frame, too.
    """
    shape = _video(shape)
    check_int("frames", frames, least=1)
    check_int("prefix", prefix, least=0)
    check_flag("sink", sink)
    of_frame = shape[1] * shape[2]
    pattern: Pattern = SlidingWindow(frames * of_frame - 1, frames * of_frame - 1)
    if prefix:
        pattern |= GlobalTokens(prefix, queries=True)
    return pattern | GlobalTokens(prefix + of_frame) if sink else pattern


def svg_temporal(shape: Sequence[int], frames: int = 2, *, prefix: int = 0) -> Neighborhood:
    """A temporal head of Sparse VideoGen (arXiv:2502.01776): a query sees, in all frames, the places near its own: as
    many tokens as a spatial head of so many `frames`, in whole places.

    Places are numbered row by row in a frame: the grid is (frames, height · width). For speed take
    `svg_temporal(…).in_tiles((number of frames, 1))` over tokens that stand in `tile_order` of these, with all frames
    of a place next to each other, as the paper's kernels do.
    """
    shape = _video(shape)
    check_int("frames", frames, least=1)
    of_frame = shape[1] * shape[2]
    near = max(1, frames * of_frame // shape[0])
    return Neighborhood((shape[0], of_frame), (2 * shape[0], 2 * near - 1), prefix=prefix, border="cut")


def _video(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = check_shape(shape)
    if len(sizes) != 3:
        raise ValueError(f"shape must have three sizes, frames, height and width, got {sizes}")
    return sizes
