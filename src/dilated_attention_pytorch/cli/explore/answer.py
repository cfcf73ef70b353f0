"""What the page is told: a call's figures, plan and Python, and the part of its mask that is looked at."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ...layout.eager import plain_cache
from ...memory.devices import Device
from ...ops import kept_mass, select_blocks
from ...patterns import Branches, Full, Pattern
from ...patterns.blocks import ceil_div
from ...patterns.naming import code_of
from ...planning import AttentionConfig, plan_memory
from ...planning.counting import lists_of_branches, lists_of_pattern
from ...viz.reach import keys_of_query, layers_needed
from ...viz.states import picture
from ..call import BLOCK_SIZE, DTYPES, PACKAGE, Call, names_in
from ..output import Document
from ..plan import as_document
from .question import CELLS, LIMITS, Question
from .samples import sample_activations

THOUSAND = 1000
MOST_RUNS = 8  # of neighbouring keys that a query sees, in words


def describe(question: Question) -> Document:
    """All that the page shows of a call."""
    call = call_of(question)
    layout, mass = _layout_of(question.of_layout())
    figures = call.figures(layout)
    device = Device.of(question.device)
    sizes: dict[str, Any] = {
        "seq_len": call.tokens, "batch": call.batch, "dtype": call.dtype, "training": question.training,
        "device": device,
    }  # fmt: skip
    heads: dict[str, Any] = {"heads": call.heads, "heads_kv": call.heads_kv, "head_dim": call.head_dim}
    if question.scorer:  # the layout is causal inside its blocks already
        plan = plan_memory(AttentionConfig(pattern=layout, **heads), **sizes)
    else:
        plan = plan_memory(
            AttentionConfig(pattern=call.what, **heads),
            is_causal=call.is_causal,
            block_size=question.block_size,
            **sizes,
        )
    dense = plan_memory(AttentionConfig(pattern=Full(), **heads), is_causal=call.is_causal, **sizes)
    return {
        **figures,
        "heads_kv": call.heads_kv or call.heads,
        "batch": call.batch,
        "mass": mass,
        "dense": _dense(call, figures["cost"], dense.peak_bytes),
        "plan": as_document(plan),
        "code": chosen_code(question, call) if question.scorer else call.code(device.type),
        "register": _register(question, call),
        **view(question),
    }


def view(question: Question) -> Document:
    """The part of the mask that is looked at, and what one query sees and reaches."""
    call = call_of(question)
    if not question.head < call.heads:
        raise ValueError(f"head must be from 0 to {call.heads - 1}, got {question.head}")
    layout, _ = _layout_of(question.of_layout())
    drawn = picture(layout, CELLS, head=question.head, region=question.region)
    partial, full = _thousandths(drawn.shares)
    return {
        "head": question.head,
        "partial": partial.tolist(),
        "full": full.tolist(),
        "cell_tokens": list(drawn.tokens),
        "first": list(drawn.first),
        "pairs": drawn.tokens == (1, 1) and not layout.dilated,
        "note": drawn.note,
        "row": None if question.query is None else _row(question, layout),
    }


def call_of(question: Question) -> Call:
    return Call.named(
        question.pattern,
        tokens=question.tokens,
        block_size=question.block_size,
        is_causal=question.causal,
        heads=question.heads,
        heads_kv=question.heads_kv,
        batch=question.batch,
        head_dim=question.head_dim,
        dtype=DTYPES[question.dtype],
    )


@plain_cache(4, "layouts that the explorer page looks at")
def _layout_of(question: Question) -> tuple[BlockLayout, Document | None]:
    """The layout that is drawn, and what share of dense attention's mass it keeps of the samples it was chosen from."""
    call = call_of(question)
    _refuse_too_many(call)
    if not question.scorer:
        return call.layout(), None
    shape = (call.batch, call.tokens, call.heads, call.heads_kv or call.heads, call.head_dim)
    q, k = sample_activations(*shape)
    chosen = select_blocks(
        q, k, scorer=question.scorer, selector=question.selector, block_size=question.chosen_block,
        is_causal=call.is_causal,
    )  # fmt: skip
    mass = {"chosen": float(kept_mass(q, k, chosen, is_causal=call.is_causal).mean())}
    if isinstance(call.what, Pattern):  # dilated attention counts keys more than once: it has no share
        beside = call.layout()
        mass["pattern"] = float(kept_mass(q, k, beside, is_causal=call.is_causal).mean())
        mass["density"] = beside.density
    return chosen, mass


def _refuse_too_many(call: Call) -> None:
    """By arithmetic, before any list is built."""
    if isinstance(call.what, Branches):
        lists = lists_of_branches(call.what, call.tokens, call.heads, call.is_causal)
    else:
        assert isinstance(call.what, Pattern)
        lists = lists_of_pattern(call.what, call.tokens, call.tokens, call.block_size or BLOCK_SIZE)
    if lists.blocks > LIMITS["blocks"]:
        raise ValueError(
            f"this page draws at most {LIMITS['blocks']:,} active blocks, and these are about {lists.blocks:,}: "
            "take fewer tokens, larger blocks or a sparser pattern"
        )


def _dense(call: Call, cost: Document, peak_bytes: int) -> Document:
    """The same call over every key, or every earlier one."""
    tokens, copies = call.tokens, call.batch * call.heads
    pairs = copies * (tokens * (tokens + 1) // 2 if call.is_causal else tokens * tokens)
    scale = pairs / cost["pairs"] if cost["pairs"] else None
    return {
        "pairs": pairs,
        "times": scale,
        **{name: scale and round(cost[name] * scale) for name in ("forward_flops", "backward_flops")},
        "peak_bytes": peak_bytes,
        "scores_bytes": copies * tokens * tokens * call.dtype.itemsize,
    }


def _row(question: Question, layout: BlockLayout) -> Document:
    """What a query sees, and what it depends on after each layer."""
    assert question.query is not None
    keys = keys_of_query(layout, question.query, head=question.head)
    needed = layers_needed(layout, question.query, question.layers)
    reach = []
    for layer in range(1, question.layers + 1):
        reached = ((needed > 0) & (needed <= layer)).nonzero()[:, 0]
        ends = (int(reached[0]), int(reached[-1])) if len(reached) else (None, None)
        reach.append({"layer": layer, "tokens": len(reached), "first": ends[0], "last": ends[1]})
    runs = _runs(keys)
    return {
        "query": question.query,
        "keys": int(keys.sum()),
        "runs": runs[:MOST_RUNS],
        "more_runs": max(0, len(runs) - MOST_RUNS),
        "reach": reach,
        **_strips(question, keys, needed),
    }


def _strips(question: Question, keys: Tensor, needed: Tensor) -> Document:
    """For each of the cells across what is drawn: is a key seen, and after how many layers is a token reached first."""
    region = question.region
    first, tokens = (0, question.tokens) if region is None else (region.key, region.tokens)
    keys, needed = keys[first : first + tokens], needed[first : first + tokens]
    size = ceil_div(len(keys), CELLS)
    behind = torch.nn.functional.pad(torch.where(needed > 0, needed, LIMITS["layers"] + 1), (0, -len(needed) % size),
                                     value=LIMITS["layers"] + 1).view(-1, size).amin(1)  # fmt: skip
    seen = torch.nn.functional.pad(keys, (0, -len(keys) % size)).view(-1, size).any(1)
    return {
        "strip_first": first,
        "strip_tokens": size,
        "seen": seen.int().tolist(),
        "needed": behind.where(behind <= LIMITS["layers"], 0).tolist(),
    }


def _runs(keys: Tensor) -> list[tuple[int, int]]:
    """First and last of neighbouring keys."""
    edges = torch.nn.functional.pad(keys.int(), (1, 1)).diff()
    return list(zip((edges > 0).nonzero()[:, 0].tolist(), ((edges < 0).nonzero()[:, 0] - 1).tolist(), strict=True))


def _thousandths(shares: Tensor) -> Tensor:
    """Rounded, but neither to 0 nor to 1000 what is not."""
    rounded = (shares * THOUSAND).round()
    rounded = torch.where(shares > 0, rounded.clamp(min=1), rounded)
    return torch.where(shares < 1, rounded.clamp(max=THOUSAND - 1), rounded).int()


def _register(question: Question, call: Call) -> str:
    """Python that gives the pattern to a model of transformers, or why there is none."""
    if question.scorer:
        return "# register takes patterns that are fixed beforehand; blocks chosen from the content have none.\n"
    if isinstance(call.what, Branches):
        return (
            "# register takes patterns, which count a key once; dilated attention counts it once for each branch.\n"
            "# DilatedBlocks (`dilated_sparse` on this page) is the pattern of the same branches in whole blocks.\n"
        )
    assert isinstance(call.what, Pattern)
    pattern = code_of(call.what)
    rows_change = {"RandomBlocks", "DilatedBlocks"} & set(names_in(pattern))
    length = f", length={call.tokens}" if rows_change else ""
    return "\n".join(
        [
            "from transformers import AutoModelForCausalLM",
            f"from {PACKAGE} import {', '.join(sorted(names_in(pattern)))}",
            f"from {PACKAGE}.integrations.huggingface import register, verify",
            "",
            f"pattern = {pattern}",
            f'register("my_pattern", pattern{length})',
            'model = AutoModelForCausalLM.from_pretrained("…", attn_implementation="my_pattern")',
            "print(verify(model))  # how often each layer called it",
            "",
        ]
    )


def chosen_code(question: Question, call: Call) -> str:
    """Python that makes the samples, chooses the blocks and attends."""
    selector = question.selector
    heads_kv = call.heads_kv or call.heads
    sizes = (call.batch, call.tokens, call.heads, heads_kv, call.head_dim)
    shape = ", ".join(map(str, (call.batch, call.tokens, heads_kv, call.head_dim)))
    options = [
        f'scorer="{question.scorer}"',
        f"selector={selector!r}",
        f"block_size={question.chosen_block}",
        *(["is_causal=True"] if call.is_causal else []),
    ]
    return "\n".join(
        [
            "import torch",
            "from torch import Tensor",
            f"from {PACKAGE} import {type(selector).__name__}, block_sparse_attention, select_blocks",
            "",
            "",
            inspect.getsource(sample_activations),
            "",
            f"q, k = sample_activations{sizes}  # better: those of a layer of your model",
            f"v = torch.randn({shape})",
            f"layout = select_blocks(q, k, {', '.join(options)})",
            "out = block_sparse_attention(q, k, v, layout)",
            "",
        ]
    )
