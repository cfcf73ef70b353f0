"""Whole models: prefill, generation and training steps, ours beside SDPA and FlexAttention in the same model.

    python benchmarks/models.py                        # on an H200, all sections; options: harness.py
    python benchmarks/models.py --only generation
    python benchmarks/models.py --brief                # fewer lengths and repeats, without FlexAttention: two minutes
    python benchmarks/models.py --profile step.json    # a Chrome trace of one training step, and where its time went

The model of transformers has the shape of Llama 3.2 1B (16 layers, 32 query and 8 key heads × 64, 8,192 hidden
features), random weights and a vocabulary of 32,768, in bfloat16. Ours is a window of 2,048 with 64 global tokens,
under `register`; "sdpa" and "flex" are what transformers offers under these names, and dense. On a CPU the model is
tiny: a run there shows that the script works, and nothing else.

prefill     time to the first token, and the peak of memory.
generation  time a token over a cache that is full; with CUDA graphs too (a static cache, `mode="reduce-overhead"`).
training    forward, backward and no optimizer; gradient checkpointing.
decoder     the same shape in plain PyTorch (`plain_model.py`), without transformers: prefill and a training step.
encoder     the same without causality: a window of 1,024 to each side.

Without transformers the first three are skipped, and said to be. Before a section is timed, ours is compared with the
same model on SDPA under a dense mask of the pattern.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plots
from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.integrations.huggingface import register
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import interleave
from harness import Benchmark, Job, Record, SkipSectionError, run
from plain_model import PlainModel, dense_mask, ways
from profiles import profiled

try:
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, StaticCache
except ImportError:
    LlamaForCausalLM = None

WINDOW, SINKS = (2047, 31), (64, 4)  # of the pattern, and of that of a tiny model
CONTENDERS = {"ours": "benchmark_pattern", "sdpa": "sdpa", "flex": "flex_attention"}
TOKENS = {"prefill": (8192, 32768, 131072), "generation": (32768, 131072), "training": (8192, 65536)}
TOKENS |= {"decoder": (8192, 32768, 131072), "encoder": (8192, 32768)}
BRIEF = {
    "prefill": (32768,), "generation": (32768,), "training": (65536,), "decoder": (32768, 65536), "encoder": (32768,),
}  # fmt: skip
DENSE_MASK = "benchmark_dense_mask"


def is_tiny(job: Job) -> bool:
    return job.quick or job.device == "cpu"


def pattern_of(job: Job) -> tuple[int, int]:
    """Tokens that a query looks back to, and tokens that all see."""
    return WINDOW[is_tiny(job)], SINKS[is_tiny(job)]


def llama(job: Job) -> LlamaForCausalLM:
    """The model with random weights, on the device, in eval mode."""
    if LlamaForCausalLM is None:
        raise SkipSectionError("it needs transformers, which is not installed here: pip install transformers")
    tiny = is_tiny(job)
    shape = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256}
        if tiny
        else {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32768}
    )  # fmt: skip
    config = LlamaConfig(**shape, head_dim=16 if tiny else 64, max_position_embeddings=1 << 20, rope_theta=500000.0)
    with torch.device(job.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if job.device == "cuda" else torch.float32)
    left, sinks = pattern_of(job)
    register(CONTENDERS["ours"], SlidingWindow(left, 0) | GlobalTokens(sinks))
    return model.eval()


def tokens_of(job: Job, model: LlamaForCausalLM, tokens: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, tokens), device=job.device)


def lengths(job: Job, section: str) -> tuple[int, ...]:
    return (64, 128) if is_tiny(job) else (BRIEF if job.args.brief else TOKENS)[section]


def repeats(job: Job) -> int:
    return 2 if job.quick or job.args.brief else 5


def contenders(job: Job) -> list[str]:
    """FlexAttention needs a GPU to be fast, a compiler on a CPU, and on both half a minute to compile."""
    return [name for name in CONTENDERS if name != "flex" or (job.device == "cuda" and not job.args.brief)]


@contextmanager
def attending(model: LlamaForCausalLM, way: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(way)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check(job: Job, model: LlamaForCausalLM) -> None:
    """Logits and gradients of ours against SDPA under the pattern as a dense mask, and the logits of a last token that
    comes with a cache."""
    tokens = 96 if is_tiny(job) else 4096
    ids, (left, sinks) = tokens_of(job, model, tokens), pattern_of(job)
    place = torch.arange(tokens, device=job.device)
    ahead = place[:, None] - place
    seen = (ahead >= 0) & ((ahead <= left) | (place < sinks))

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        return seen[None, None]

    AttentionInterface.register(DENSE_MASK, AttentionInterface._global_mapping["sdpa"])
    AttentionMaskInterface.register(DENSE_MASK, mask)
    found = {}
    for way in (CONTENDERS["ours"], DENSE_MASK):
        with attending(model, way):
            model.zero_grad()
            logits = model(ids, use_cache=False).logits
            logits.float().square().mean().backward()
            found[way] = logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    for name, mine, right in zip(("logits", "gradient of a weight"), *found.values(), strict=True):
        job.gate.check(f"{tokens} tokens, {name}", "ours", "a dense mask", mine, right)
    cache = filled(model, CONTENDERS["ours"], ids[:, :-1])
    with torch.no_grad(), attending(model, CONTENDERS["ours"]):
        last = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    job.gate.check(f"{tokens} tokens, with a cache", "ours", "a dense mask", last, found[DENSE_MASK][0][:, -1])


def timed(job: Job, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    for call in runs.values():
        call()
    return {name: each.median for name, each in interleave(runs, repeats(job), device=job.device).items()}


def row_of(job: Job, tokens: int, times: dict[str, float], peaks: dict[str, int], per: int = 1) -> dict[str, Any]:
    row = {"tokens": tokens, "seconds": {name: t / per for name, t in times.items()}, "peak_bytes": peaks}
    row["times_faster"] = {name: t / times["ours"] for name, t in times.items() if name != "ours"}
    text = ", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in row["seconds"].items())
    job.say(f"{tokens:,} tokens: {text}")
    return row


def prefill(job: Job) -> Record:
    model = llama(job)
    check(job, model)
    rows = []
    for tokens in lengths(job, "prefill"):
        ids = tokens_of(job, model, tokens)

        def first_token(way: str, ids: Tensor = ids) -> None:
            with torch.no_grad(), attending(model, way):
                model(ids, use_cache=True, logits_to_keep=1)

        runs = {name: partial(first_token, way) for name, way in ((each, CONTENDERS[each]) for each in contenders(job))}
        times = timed(job, runs)
        rows.append(row_of(job, tokens, times, {name: peak(job, call) for name, call in runs.items()}))
    return {"rows": rows}


def peak(job: Job, call: Callable[[], object]) -> int:
    with measure_peak(job.device) as measured:
        call()
    return measured.peak_bytes


def generation(job: Job) -> Record:
    model = llama(job)
    check(job, model)
    new, rows = 4 if is_tiny(job) else 32, []
    for tokens in lengths(job, "generation"):
        ids = tokens_of(job, model, tokens)
        runs: dict[str, Callable[[], object]] = {}
        for name, way in ((each, CONTENDERS[each]) for each in contenders(job)):
            if name == "flex":
                continue  # it would compile anew for each length of a growing cache
            runs[name] = partial(steps, model, way, filled(model, way, ids), tokens, new)
            if job.device == "cuda" and not job.args.brief:
                cache = StaticCache(config=model.config, max_cache_len=tokens + 64 * new)
                runs[f"{name}, graph"] = partial(steps, model, way, filled(model, way, ids, cache), tokens, new, True)
        times = timed(job, runs)
        rows.append(row_of(job, tokens, times, {}, per=new))
    return {"new_tokens": new, "rows": rows}


def filled(model: LlamaForCausalLM, way: str, ids: Tensor, cache: Any = None) -> Any:
    with torch.no_grad(), attending(model, way):
        return model(ids, use_cache=True, past_key_values=cache, logits_to_keep=1).past_key_values


def steps(model: LlamaForCausalLM, way: str, cache: Any, tokens: int, new: int, graph: bool = False) -> None:
    """`new` tokens after a cache of `tokens`, which is then as it was."""
    call = compiled(model) if graph else model
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad(), attending(model, way):
        for i in range(new):
            at = torch.arange(tokens + i, tokens + i + 1, device=model.device)
            logits = call(ids, past_key_values=cache, use_cache=True, position_ids=at[None]).logits
            ids = logits[:, -1:].argmax(-1)
    if not graph:
        cache.crop(-new)
        return
    for layer in cache.layers:
        layer.cumulative_length.sub_(new)


COMPILED: dict[int, Any] = {}


def compiled(model: LlamaForCausalLM) -> Any:
    if id(model) not in COMPILED:
        COMPILED[id(model)] = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    return COMPILED[id(model)]


def training(job: Job) -> Record:
    model = llama(job)
    check(job, model)
    model.train()
    model.gradient_checkpointing_enable()
    rows = []
    for tokens in lengths(job, "training"):
        ids = tokens_of(job, model, tokens)

        def step(way: str, ids: Tensor = ids) -> None:
            with attending(model, way):
                model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        runs = {name: partial(step, way) for name, way in ((each, CONTENDERS[each]) for each in contenders(job))}
        times = timed(job, runs)
        rows.append(row_of(job, tokens, times, {name: peak(job, call) for name, call in runs.items()}))
    if job.args.profile:
        profiled(job, partial(step, CONTENDERS["ours"]), job.args.profile)
    return {"rows": rows}


def plain(job: Job, section: str, is_causal: bool) -> Record:
    """Prefill, and a training step with checkpoints, of a model that is PyTorch and an attention function."""
    left, sinks = pattern_of(job)
    pattern = SlidingWindow(left, 0) if is_causal else SlidingWindow(left // 2, left // 2)
    runs_of = ways(pattern | GlobalTokens(sinks), is_causal)
    model = PlainModel.of(is_tiny(job), job.device)
    tokens = 96 if is_tiny(job) else 4096
    x, seen = model.embedded(tokens), dense_mask(pattern | GlobalTokens(sinks), tokens, job.device)
    right = ways(None, is_causal, seen)["sdpa"]
    for name, mine, theirs in zip(
        ("outputs", "gradient of a weight"), *(model.checked(x, way) for way in (runs_of["ours"], right)), strict=True
    ):
        job.gate.check(f"{tokens} tokens, {name}", "ours", "a dense mask", mine, theirs)
    rows = []
    for tokens in lengths(job, section):
        x = model.embedded(tokens)
        for kind, call in (("prefill", model.prefill), ("training", model.step)):
            runs = {name: partial(call, x, runs_of[name]) for name in contenders(job)}
            times = timed(job, runs)
            row = row_of(job, tokens, times, {name: peak(job, each) for name, each in runs.items()})
            rows.append({"kind": kind, **row})
    if job.args.profile and LlamaForCausalLM is None:
        profiled(job, partial(model.step, x, runs_of["ours"]), job.args.profile)
    return {"rows": rows}


def decoder(job: Job) -> Record:
    return plain(job, "decoder", is_causal=True)


def encoder(job: Job) -> Record:
    return plain(job, "encoder", is_causal=False)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, help="write a Chrome trace of a training step there")
    parser.add_argument("--brief", action="store_true", help="fewer lengths and repeats, without FlexAttention")


BENCHMARK = Benchmark(
    name="models",
    about=__doc__,
    sections={
        "prefill": prefill,
        "generation": generation,
        "training": training,
        "decoder": decoder,
        "encoder": encoder,
    },
    devices=("cpu", "cuda"),
    options=options,
    draw=plots.models,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
