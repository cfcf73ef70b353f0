"""Compile what a call would launch, for a GPU that need not be there.

python -m tests.kernels.compiling 8.6              # every kernel of some calls, for that capability, a line each
python -m tests.kernels.compiling 8.9 plain mean   # of these calls alone
python -m tests.kernels.compiling 9.0 --sass DIR   # and their machine code, a file for each kernel

A change that should leave the machine code as it was: write it to two folders, from a worktree without the change and
from one with it, and compare them by `diff -r`.
"""

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    SlidingWindow,
)
from dilated_attention_pytorch.backends import triton as backend
from dilated_attention_pytorch.backends.decoding import Cache
from dilated_attention_pytorch.kernels import (
    decode,
    hopper_backward,
    hopper_forward,
    hopper_runs,
    hopper_runs_backward,
    hopper_select,
    launch,
    layouts,
    padding,
    select_features,
    select_lists,
    select_masses,
    united,
)
from dilated_attention_pytorch.layout import closed_form, layout_of_branches
from dilated_attention_pytorch.layout.rows import rows_of_capacity
from dilated_attention_pytorch.options import Bias, CallOptions
from tests.kernels.sass import disassembled, instructions, unwritten

OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int16: "*i16"}


class Recorder:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@contextmanager
def recorded(capability):
    """Launches inside go to the list that is yielded; the device is taken for one of that compute capability."""
    launches = []
    patches = [
        patch.object(module, name, Recorder(getattr(module, name), launches))
        for module, names in (
            (launch, ("forward_kernel", "rows_kernel", "round_kernel", "dq_kernel", "dkv_kernel")),
            (hopper_forward, ("forward_kernel",)),
            (hopper_backward, ("backward_kernel",)),
            (padding, ("key_bits_kernel", "padded_lists_kernel")),
            (united, ("mark_kernel", "unite_kernel")),
            (hopper_runs, ("runs_forward_kernel",)),
            (hopper_runs_backward, ("runs_backward_kernel",)),
            (decode, ("decode_kernel", "merge_kernel")),
            (layouts, ("stretches_kernel", "row_spans_kernel", "column_spans_kernel", "fill_kernel")),
            (select_features, ("pool_kernel",)),
            (select_masses, ("masses_kernel",)),
            (hopper_select, ("masses_kernel",)),
            (select_lists, ("teams_kernel", "digits_kernel", "counts_kernel", "offsets_kernel")),
            (select_lists, ("lists_kernel", "order_kernel")),
        )
        for name in names
    ]
    patches += [
        patch.object(launch, "_capability", lambda device: capability),
        patch.object(launch, "num_processors", lambda device: 132),
        patch.object(decode, "num_processors", lambda device: 132),
    ]
    launch._device.cache_clear()
    try:
        for each in patches:
            each.start()
        yield launches
    finally:
        for each in patches:
            each.stop()
        launch._device.cache_clear()


def _type(value):
    if isinstance(value, GluonTensorDescriptor):
        return f"tensordesc<{SHORT[value.base.dtype]}[{','.join(map(str, value.block_shape))}],{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{SHORT[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return POINTERS.get(value.dtype) or "*" + SHORT[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_for(capability, kernel, args, kwargs):
    """The compiled kernel of a recorded launch."""
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature, constants, attrs = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    number = capability[0] * 10 + capability[1]
    return triton.compile(source(kernel, signature, constants, attrs), GPUTarget("cuda", number, 32), options=options)


CALLS = {
    "plain": {"head_dim": 64, "dtype": torch.float16},
    "large heads": {"head_dim": 256, "dtype": torch.bfloat16},
    "odd heads, small blocks": {"head_dim": 80, "dtype": torch.bfloat16, "block": 32},
    "few rows": {"head_dim": 64, "dtype": torch.float16, "block": 16, "heads_kv": 4},
    "few rows, large heads": {"head_dim": 256, "dtype": torch.bfloat16, "block": 32, "heads_kv": 4},
    "single precision": {"head_dim": 128, "dtype": torch.float32, "block": 64},
    "everything": {"head_dim": 128, "dtype": torch.bfloat16, "everything": True},
    "biased": {"head_dim": 64, "dtype": torch.bfloat16, "biased": True},
    "biased, single precision": {"head_dim": 128, "dtype": torch.float32, "block": 64, "biased": True},
    "biased, small blocks": {"head_dim": 64, "dtype": torch.float16, "block": 16, "biased": True, "everything": True},
    "narrow values": {"head_dim": 192, "head_dim_v": 128, "dtype": torch.bfloat16},
    "bitmaps": {"head_dim": 128, "dtype": torch.bfloat16, "bitmaps": True},
    "bitmaps, small blocks": {"head_dim": 64, "dtype": torch.float16, "block": 16, "bitmaps": True},
    "dilated": {"head_dim": 64, "dtype": torch.bfloat16, "segments": (256, 512)},
    "dilated, uneven": {"head_dim": 128, "dtype": torch.bfloat16, "segments": (100, 512)},
}


RUNS = (100, 200, 300, 400, 500, 512)  # as many dilations as there may be

# What only the kernels for Hopper make something else of.
HOPPER_CALLS = {
    "large tiles": {"head_dim": 128, "dtype": torch.bfloat16},
    "narrow keys": {"head_dim": 64, "dtype": torch.bfloat16, "block": (128, 64)},
    "odd heads, narrow values": {"head_dim": 80, "head_dim_v": 24, "dtype": torch.bfloat16},
    "gathered keys": {"head_dim": 128, "dtype": torch.bfloat16, "block": (128, 16)},
    "gathered keys, masks": {"head_dim": 64, "dtype": torch.bfloat16, "block": (128, 32), "masks": True},
    "gathered keys, dropped": {
        "head_dim": 128,
        "dtype": torch.float16,
        "block": (128, 64),
        "shaped": True,
        "dropout_p": 0.1,
    },
    "rows of their own": {"head_dim": 128, "dtype": torch.bfloat16, "block": 64},
    "rows of their own, gathered keys": {"head_dim": 64, "dtype": torch.bfloat16, "block": (64, 16), "shaped": True},
    "united rows": {"head_dim": 128, "dtype": torch.bfloat16, "block": 16, "many": True},
    "united rows, shaped": {"head_dim": 64, "dtype": torch.bfloat16, "block": (32, 64), "shaped": True, "many": True},
    "bitmaps of their own": {"head_dim": 64, "dtype": torch.bfloat16, "block": 64, "bitmaps": True},
    "masks": {"head_dim": 64, "dtype": torch.bfloat16, "masks": True},
    "documents": {"head_dim": 128, "dtype": torch.bfloat16, "documents": True},
    "shaped": {"head_dim": 64, "dtype": torch.bfloat16, "shaped": True},
    "dropped": {"head_dim": 64, "dtype": torch.bfloat16, "shaped": True, "dropout_p": 0.6},
    "dropped, large tiles": {"head_dim": 128, "dtype": torch.bfloat16, "shaped": True, "dropout_p": 0.1},
    # dk, dv and dq in one kernel.
    "fused": {"head_dim": 64, "dtype": torch.bfloat16, "deterministic": False},
    "fused, wide values": {"head_dim": 24, "head_dim_v": 80, "dtype": torch.bfloat16, "deterministic": False},
    "fused, large tiles": {"head_dim": 128, "dtype": torch.float16, "deterministic": False},
    "fused, everything": {"head_dim": 128, "dtype": torch.bfloat16, "everything": True, "deterministic": False},
    "fused, dilated": {"head_dim": 128, "dtype": torch.bfloat16, "segments": (256, 512), "deterministic": False},
    "runs": {"head_dim": 48, "dtype": torch.bfloat16, "segments": RUNS, "runs": True},
    "runs, large heads": {"head_dim": 128, "dtype": torch.float16, "segments": RUNS, "runs": True},
}


def every_bias(heads, seq, shared):
    """All kinds at once; heads share the dense one, or have one each."""
    codes, terms = torch.zeros(1, seq, dtype=torch.int32), torch.zeros(1, heads, seq)
    dense = torch.zeros(1, 1 if shared else heads, seq, seq, dtype=torch.bfloat16)
    return Bias(torch.ones(1, heads, 2), torch.zeros(1, heads, 99), codes, codes, terms, terms, dense)


def launches_of(
    capability, *, head_dim, dtype, head_dim_v=None, block=128, heads_kv=2, everything=False, masks=False, shaped=False,
    dropout_p=0.0, segments=None, bitmaps=False, biased=False, documents=False, deterministic=True, many=False,
    runs=False,
):  # fmt: skip
    """What forward and backward of a call launch."""
    seq, heads = 1536 if runs else 512, 4
    pattern = SlidingWindow(100, 0)
    extras = CallOptions(head_dim**-0.5)
    if documents:
        pattern = SlidingWindow(None, 0) & Documents((100, 412))
    if masks:
        pattern = (SlidingWindow(200, 0) | GlobalTokens(3)) & Documents((100, 412))
        extras = CallOptions(head_dim**-0.5, key_padding_mask=torch.zeros(1, seq, dtype=torch.bool))
    if shaped:
        seed = torch.tensor(3) if dropout_p else None
        extras = CallOptions(head_dim**-0.5, dropout_p, 30.0, seed=seed, bias=Bias(torch.ones(1, heads, 1)))
    if everything:
        pattern = PerHead((SlidingWindow(9, 9) | GlobalTokens(3), Full(), Full(), Full())) & Documents((100, 412))
        padding, ids = torch.zeros(1, seq, dtype=torch.bool), torch.zeros(1, seq, dtype=torch.int64)
        of_call = padding, ids, torch.tensor(3)
        extras = CallOptions(-1.0, 0.1, 30.0, True, *of_call, bias=Bias(torch.ones(1, heads, 1)))
    extras = extras._replace(deterministic=deterministic)
    wanted = ()
    if biased:
        extras = extras._replace(bias=every_bias(heads, seq, everything))
        wanted = ("slopes", "table", "key_terms", "dense")
    layout = BlockLayout.from_pattern(pattern, seq, block_size=block)
    if bitmaps:
        layout = BlockLayout.from_mask(torch.arange(seq * seq).view(seq, seq) % 7 < 4, block)
    if segments:
        branches = Branches(segments, (1, 2, 3, 4, 8, 9)[: len(segments)])
        layout = layout_of_branches(branches, seq, num_heads=heads, is_causal=True, block_size=block)
        if not runs:
            layout._derived.pop("whole")
    widths = head_dim, head_dim if head_dim_v is None else head_dim_v
    q, do = (torch.empty(1, seq, heads, width, dtype=dtype) for width in widths)
    k, v = (torch.empty(1, seq, heads_kv, width, dtype=dtype) for width in widths)
    least = 0 if many else united.LEAST_WORK  # as if there were many blocks
    widest = patch.object(launch.runs, "WIDEST", 128)
    with recorded(capability) as launches, widest, patch.object(united, "LEAST_WORK", least):
        out, lse = backend.forward(q, k, v, layout, extras)
        backend.backward(do, torch.zeros_like(lse), q, k, v, out, lse, layout, extras, wanted)
    if (everything or dtype == torch.float32) and not biased:  # decoding too, of which there is less
        lengths, table = torch.tensor([seq], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int64)
        pattern = SlidingWindow(100, 0) | GlobalTokens(3)
        if everything:
            pattern = pattern | (SlidingWindow(300, 0) & LocalBlocks(400, block_size=block)) | GlobalBlocks(9, block)
        rows = rows_of_capacity(pattern, seq, block, torch.device("cpu"))
        extras = extras._replace(dropout_p=0.0, document_ids=None, seed=None)
        cache = Cache(k.view(4, -1, *k.shape[2:]), v.view(4, -1, *v.shape[2:]), table, lengths)
        with recorded(capability) as more:
            backend.decode(q[:, :1], cache if everything else Cache(k, v, None, lengths), rows, extras)
        launches += more
    return launches


SELECTIONS = {
    "mean": {"head_dim": 128, "dtype": torch.bfloat16, "blocks": (128, 128), "kind": "mean", "patch": (128, 128)},
    "patches": {"head_dim": 128, "dtype": torch.bfloat16, "blocks": (64, 16), "kind": "mean", "patch": (4, 4)},
    "patches, odd and large heads": {
        "head_dim": 200, "dtype": torch.float16, "blocks": (256, 256), "kind": "mean", "patch": (4, 4),
    },
    "patches, single precision": {
        "head_dim": 128, "dtype": torch.float32, "blocks": (64, 16), "kind": "mean", "patch": (16, 16),
    },
    "moments": {"head_dim": 64, "dtype": torch.bfloat16, "blocks": (16, 16), "kind": "moments", "patch": (1, 16)},
    "antidiagonals": {"head_dim": 128, "dtype": torch.bfloat16, "blocks": (64, 16), "stride": 8},
    "antidiagonals, single precision": {"head_dim": 128, "dtype": torch.float32, "blocks": (128, 128), "stride": 16},
    "sampled": {"head_dim": 128, "dtype": torch.bfloat16, "blocks": (128, 128), "sampled": 8},
}  # fmt: skip


def launches_of_selection(capability, *, head_dim, dtype, blocks, kind="", patch=None, stride=0, sampled=0):
    """What choosing blocks launches; the lists are the same for all."""
    q, k = (torch.empty(1, 1000, heads, head_dim, dtype=dtype) for heads in (4, 2))
    features = select_features.Sampled(sampled) if sampled else select_features.Antidiagonals(stride)
    features = select_features.Pooled(kind, patch) if kind else features
    assert features.fits(head_dim, dtype, blocks)
    with recorded(capability) as launches:
        num_q, num_k = (-(-1000 // block) for block in blocks)
        forced = torch.empty(num_q, num_k, dtype=torch.uint8)
        lists = patch == blocks or dtype == torch.float32
        call = {"forced": forced} if dtype != torch.float32 else {}
        masses = select_masses.fused_masses(q, k, blocks, features, is_causal=True, scale=1.0, **call)
        if lists and kind == "mean":
            ints = torch.empty(8, dtype=torch.int32)
            for team in ("row", "heads", "sample"):
                select_lists.heaviest_blocks(masses, forced, ints, ints.long(), team, ints, 99, {})
    return launches


LAYOUTS = {
    "window": SlidingWindow(100, 0),
    "rules of documents": (SlidingWindow(100, 0) | GlobalTokens(3)) & Documents((100, 412)),
}


def launches_of_layout(capability, pattern):
    """What the lists of a pattern launch, by query and by key."""
    with recorded(capability) as launches, patch.object(closed_form, "DEVICES", ("cpu",)):
        _ = BlockLayout.from_pattern(pattern, 512, block_size=128).by_key
    return launches


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compiling")
    parser.add_argument("capability", type=lambda text: tuple(map(int, text.split("."))))
    parser.add_argument("calls", nargs="*", help="all by default")
    parser.add_argument("--sass", type=Path, metavar="DIR", help="write the machine code of each kernel there")
    given = parser.parse_intermixed_args()
    calls = CALLS | HOPPER_CALLS if given.capability == (9, 0) else CALLS
    for name in given.calls or [*calls, *SELECTIONS, *LAYOUTS]:
        if name in LAYOUTS:
            launches = launches_of_layout(given.capability, LAYOUTS[name])
        else:
            of = launches_of_selection if name in SELECTIONS else launches_of
            launches = of(given.capability, **(calls | SELECTIONS)[name])
        for i, (kernel, args, kwargs) in enumerate(launches):
            compiled = compile_for(given.capability, kernel, args, kwargs)
            found = {"call": name, "kernel": kernel.__name__, "shared": compiled.metadata.shared}
            hopper = kernel.__module__.rpartition(".")[2].startswith("hopper")
            if hopper or given.sass:
                with TemporaryDirectory() as folder:
                    text = disassembled(compiled.asm["cubin"], Path(folder))
                if hopper:
                    found["unwritten"] = unwritten(text)
                if given.sass:
                    given.sass.mkdir(parents=True, exist_ok=True)
                    file = f"{name}, {i} {'hopper ' * hopper}{kernel.__name__}.sass"
                    (given.sass / file).write_text(instructions(text))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
