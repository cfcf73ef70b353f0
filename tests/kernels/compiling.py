"""Compile what a call would launch, for a GPU that need not be there."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilated_attention_pytorch.kernels import hopper_backward, hopper_forward, launch

OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}


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
            (launch, ("forward_kernel", "rows_kernel", "dq_kernel", "dkv_kernel")),
            (hopper_forward, ("forward_kernel",)),
            (hopper_backward, ("backward_kernel",)),
        )
        for name in names
    ]
    patches += [
        patch.object(launch, "_capability", lambda device: capability),
        patch.object(launch, "_num_processors", lambda device: 132),
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
