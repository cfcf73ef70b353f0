"""No trace, mode or transform leaves anything behind: every public call inside each of them, and then plainly.

A layout that was built under `torch.export` or FakeTensorMode used to stay in the cache of the process, with fake
tensors in its lists: every later call over the pattern raised. A call may be refused inside a mode; what counts here is
that afterwards the plain call gives what it gives in a fresh process, can be differentiated, and no cache holds a
tensor that is fake, functional, wrapped, without data, or of inference mode.
"""

import warnings
from contextlib import suppress

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dilated_attention_pytorch.memory import clear_caches
from tests.tracing.caches import faults
from tests.tracing.calls import CALLS


class Whole(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def fake(function, tensors):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(*(mode.from_tensor(x) for x in tensors))


def inference(function, tensors):
    with torch.inference_mode():
        return function(*tensors)


MODES = {
    "FakeTensorMode": fake,
    "export": lambda function, tensors: torch.export.export(Whole(function), tensors, strict=False),
    "functionalize": lambda function, tensors: torch.func.functionalize(function)(*tensors),
    "make_fx": lambda function, tensors: make_fx(function)(*tensors),
    "meta": lambda function, tensors: function(*(x.to("meta") for x in tensors)),
    "inference": inference,
}


def flat(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]


def total(result):
    return sum(x.float().nan_to_num(neginf=0.0).sum() for x in flat(result))


def plainly(name):
    """The result, and the gradient of every floating tensor that has one."""
    torch.manual_seed(0)
    function, tensors = CALLS[name]()
    results = [x.detach().clone() for x in flat(function(*tensors))]
    if name == "decode":  # which has no gradient
        return results
    learning = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    loss, wanted = total(function(*learning)), [x for x in learning if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else ()
    return results + [x for x in grads if x is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_plain_call_afterwards_is_that_of_a_fresh_process(name):
    clear_caches()
    want = plainly(name)
    for mode, run in MODES.items():
        clear_caches()
        torch.manual_seed(0)
        function, tensors = CALLS[name]()
        with warnings.catch_warnings(), suppress(Exception):  # torch raises anything where it cannot trace
            warnings.simplefilter("ignore")
            run(function, tensors)
        found = faults(getattr(function, "module", None))
        if mode == "meta":  # a layout for that device is kept for that device
            found = [fault for fault in found if "without data" not in fault]
        assert found == [], mode
        got = plainly(name)
        assert len(got) == len(want), mode
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0)), mode
