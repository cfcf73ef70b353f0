"""Every public module does what PyTorch's own do: copies, files, state dicts, dtypes, a `repr` that tells it apart."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import (
    BlockGate,
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    CumulativeMass,
    DilatedAttention,
    GlobalTokens,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    SlidingWindow,
    models,
)
from dilated_attention_pytorch import nn as package_nn
from dilated_attention_pytorch.models import LongNetDecoderLayer, LongNetEncoderLayer
from dilated_attention_pytorch.models.longnet import Rotary
from dilated_attention_pytorch.nn import Multihead

SEQ, HEADS, DIM = 50, 4, 32
BRANCHES = {"segment_lengths": [8, 24], "dilation_rates": [1, 3]}
WINDOW = SlidingWindow(20, 7)
CONFIG = LongNetConfig(vocab_size=11, dim=DIM, num_layers=2, num_heads=HEADS, dropout=0.2, **BRANCHES)

# Every module, and options to make it with: dropout where it has some.
OPTIONS = {
    BlockSparseAttention: {"pattern": WINDOW, "dropout": 0.2},
    BlockSparseRingDilatedAttention: {"block_size": 16, "dropout": 0.2},
    BlockSparseHierarchical: {"block_size": 16, "dropout": 0.2},
    BlockSparseAdaptive: {"block_size": 16, "dropout": 0.2},
    DilatedAttention: {**BRANCHES, "dropout": 0.2},
    BlockGate: {"num_heads": HEADS, "head_dim": 8},
    Multihead: {"attention": BlockSparseAttention(WINDOW), "embed_dim": DIM, "num_heads": HEADS},
    BlockSparseRingMultiheadDilatedAttention: {"embed_dim": DIM, "num_heads": HEADS, "block_size": 16, "dropout": 0.2},
    MultiheadDilatedAttention: {"embed_dim": DIM, "num_heads": HEADS, **BRANCHES, "dropout": 0.2},
    LongNetEncoderLayer: {"config": CONFIG},
    LongNetDecoderLayer: {"config": CONFIG},
    LongNet: {"config": CONFIG},
    LongNetLM: {"config": CONFIG},
}
OF_FEATURES = (Multihead, BlockSparseRingMultiheadDilatedAttention, MultiheadDilatedAttention)
LAYERS = (LongNetEncoderLayer, LongNetDecoderLayer)
every_module = pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def make(kind, **changes):
    """With a configuration, without what stands in it."""
    options = {**OPTIONS[kind], **changes}
    return kind(**{name: x for name, x in options.items() if "sparse_config" not in options or name != "block_size"})


def call(module, dtype=torch.float32):
    """The result of a module for the same numbers every time, with the same dropout."""
    torch.manual_seed(3)
    if isinstance(module, LongNetLM):
        return module(torch.randint(CONFIG.vocab_size, (2, SEQ)))
    x = torch.randn(2, SEQ, DIM, dtype=torch.float64).to(dtype)
    if isinstance(module, LongNet):
        return module(x)
    if isinstance(module, LAYERS):
        return module(x, Rotary.of(0, SEQ, CONFIG, x.device))
    if isinstance(module, OF_FEATURES):
        return module(x, x, x, True)
    q, k, v = torch.randn(3, 2, SEQ, HEADS, 8, dtype=torch.float64).to(dtype).unbind()
    if isinstance(module, BlockGate):
        return dap.block_masses(q, k, scorer=module, block_size=16)
    return module(q, k, v, True)


def filled(module):
    """With no zero among its parameters."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return module


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_every_public_module_is_here():
    spaces = (dap, package_nn, models)
    found = {getattr(space, name) for space in spaces for name in space.__all__}
    assert {x for x in found if isinstance(x, type) and issubclass(x, nn.Module)} == OPTIONS.keys()


@every_module
class TestAsModules:
    @pytest.mark.parametrize(
        "through",
        [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_a_file],
        ids=["copy", "pickle", "save"],
    )
    def test_copies(self, kind, through):
        """Before a call and after it, when layouts are remembered; training and not; with parameters of their own."""
        module = filled(make(kind))
        for again in (through(module), (call(module), through(module))[1]):
            assert type(again) is kind
            assert repr(again) == repr(module)
            for training in (True, False):
                assert torch.equal(call(again.train(training)), call(module.train(training)))
            if list(module.parameters()):
                want = call(module)
                for parameter in again.parameters():
                    nn.init.normal_(parameter)
                assert torch.equal(call(module), want)
                assert not torch.equal(call(again), want)
            again.train()
            module.train()

    def test_state_dict(self, kind):
        """By the names of parameters alone; a file of tensors can be read without pickle."""
        module, other = filled(make(kind)), make(kind)
        state = module.state_dict()
        assert state.keys() == dict(module.named_parameters()).keys()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert not any(other.load_state_dict(torch.load(file, weights_only=True)))
        assert torch.equal(call(other.eval()), call(module.eval()))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_to_dtype(self, kind, dtype):
        """The result has the dtype of what came in, and is that of float64 as near as the dtype is."""
        module = filled(make(kind)).eval().to(dtype)
        got = call(module, dtype)
        assert {x.dtype for x in module.parameters()} <= {dtype}
        if kind is not BlockGate:  # whose masses are those of a softmax, in float32
            assert got.dtype == dtype
        if kind is BlockSparseAdaptive and dtype != torch.float64:
            return  # rounded scores may choose other blocks
        want = call(module.double(), torch.float64)
        error = (got.double() - want).abs().max()
        assert error <= 60 * torch.finfo(dtype).eps * max(1.0, float(want.detach().abs().max()))

    def test_device_and_dtype_are_taken_as_pytorchs_own_do(self, kind):
        """`device=` and `dtype=` of a module without parameters were unknown keywords."""
        if kind in (LongNet, LongNetLM, *LAYERS):
            assert not {"device", "dtype"} & inspect.signature(kind).parameters.keys()  # `with torch.device(…)`, `.to`
            return
        for device, dtype in ((None, torch.float64), ("cpu", None), (torch.device("cpu"), torch.bfloat16)):
            module = make(kind, device=device, dtype=dtype)
            assert {x.dtype for x in module.parameters()} <= {dtype or torch.float32}
        if list(module.parameters()):
            assert {x.device.type for x in make(kind, device="meta").parameters()} == {"meta"}
        if kind is BlockGate:
            return
        with pytest.raises(ValueError, match=r"device must be one that PyTorch knows, .* got 'gpu'"):
            make(kind, device="gpu")
        for wrong in ("float32", torch.int64, 32):
            with pytest.raises(TypeError, match=r"dtype must be float64, float32, bfloat16, float16 or None, got"):
                make(kind, dtype=wrong)


# Another value of each argument that changes what a module computes.
OTHER = {
    "pattern": GlobalTokens(5),
    "order": 2,
    "scale": 0.5,
    "dropout": 0.4,
    "backend": "blockwise",
    "segment_lengths": [16, 48],
    "dilation_rates": [1, 2],
    "sparse_config": dap.SparsePatternConfig(pattern_type="local_window", block_size=16),
    "levels": "fine_grained",
    "block_size": 32,
    "head_offsets": "grouped",
    "detach_branch_weights": True,
    "padding": "zero_keys",
    "sparsity_ratio": 0.7,
    "scorer": "antidiagonal",
    "selector": CumulativeMass(0.9),
    "sink": 3,
    "local": 2,
    "per_kv_head": True,
    "gate_strength": 0.5,
    "attention": DilatedAttention([64], [1]),
    "embed_dim": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "bias": False,
    "kdim": 10,
    "vdim": 12,
    "batch_first": False,
    "layer_norm": True,
    "layer_norm_eps": 0.25,
    "cross_attention": True,
    "config": LongNetConfig(vocab_size=11, dim=DIM, num_layers=2, num_heads=HEADS, num_kv_heads=2, **BRANCHES),
}
# What has to come along with it, in both.
WITH = {
    "order": {"pattern": dap.Neighborhood((4, 4), 3)},
    "segment_lengths": BRANCHES,
    "dilation_rates": BRANCHES,
    "sparse_config": {"sparse_config": dap.SparsePatternConfig(block_size=16)},
    "layer_norm_eps": {"layer_norm": True},
    "gate_strength": {"scorer": BlockGate(HEADS, 8)},
}
# One value by another name, or the place and start of parameters: nothing that a module computes by.
NOT_SHOWN = {
    "attention_dropout",
    "device",
    "dtype",
    "ring_group",
    "group",
    "gamma_init",
    "gamma",
    "options",
    "pool_options",
}


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind is not BlockGate], ids=lambda kind: kind.__name__)
def test_modules_that_compute_different_things_print_differently(kind):
    """A scale, detached weights, a sink, the heads: none of them was to be seen."""
    names = inspect.signature(kind).parameters.keys() - NOT_SHOWN
    if kind is BlockSparseAdaptive:
        names -= {"sparse_config"}  # another way to give sparsity_ratio and block_size
    assert names <= OTHER.keys(), "an argument without another value here"
    for name in names:
        plain, changed = (make(kind, **{**WITH.get(name, {}), **more}) for more in ({}, {name: OTHER[name]}))
        assert repr(changed) != repr(plain), name
