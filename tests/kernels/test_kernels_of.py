"""`explain` names the kernels that are launched."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device: it is taken for several", allow_module_level=True)

from dilated_attention_pytorch import BlockLayout, SlidingWindow
from dilated_attention_pytorch.kernels import hopper_backward, hopper_forward, hopper_runs, hopper_runs_backward, launch
from dilated_attention_pytorch.options import CallOptions
from tests.kernels.compiling import CALLS, HOPPER_CALLS, launches_of, recorded

ALL_CALLS = CALLS | HOPPER_CALLS


def launched(launches):
    """For each part of a call whether a warp-specialised kernel was launched for it."""
    found = {}
    for kernel, _, constants in launches:
        forwards = hopper_forward.forward_kernel, hopper_runs.runs_forward_kernel
        if kernel in (*forwards, launch.forward_kernel):
            found["forward"] = kernel in forwards
        elif kernel in (hopper_backward.backward_kernel, hopper_runs_backward.runs_backward_kernel):
            found["backward, dk and dv" if constants["OF_KEYS"] else "backward, dq"] = True
        elif kernel is launch.dkv_kernel:
            found["backward, dk and dv"] = False
        elif kernel is launch.dq_kernel:
            found["backward, dq"] = False
    return found


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    """These tests run in Triton's interpreter, which has no Gluon; nothing is launched here."""
    monkeypatch.setattr(launch, "HAVE_GLUON", True)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("name", ALL_CALLS)
def test_the_named_kernels_are_those_that_are_launched(name, capability):
    calls, init = [], launch.Call.__init__

    def keep(self, *arguments):
        calls.append(arguments)
        init(self, *arguments)

    with patch.object(launch.Call, "__init__", keep):
        launches = launches_of(capability, **ALL_CALLS[name])
    with recorded(capability):
        named = launch.kernels_of(*calls[0])
    assert {part: kernels.startswith("warp-specialised") for part, kernels in named.items()} == launched(launches)
    assert all(kernels.startswith(("warp-specialised", "plain Triton: ")) for kernels in named.values())


@pytest.mark.parametrize("head_dim_v", [64, 100])
def test_values_of_another_width_are_for_the_plain_kernels(head_dim_v):
    call = {"head_dim": 128, "head_dim_v": head_dim_v, "dtype": torch.float16}
    assert not any(launched(launches_of((9, 0), **call)).values())
    q, k, v = (torch.empty(1, 512, 4, width, dtype=torch.float16) for width in (128, 128, head_dim_v))
    layout = BlockLayout.from_pattern(SlidingWindow(100, 0), 512, block_size=128)
    with recorded((9, 0)):
        named = launch.kernels_of(q, k, v, layout, CallOptions(1.0))
    assert set(named.values()) == {"plain Triton: the others are for v as wide as q and k"}


def test_both_kinds_are_met():
    """Else the test above would show little."""
    met = {launched(launches_of((9, 0), **call))["forward"] for call in ALL_CALLS.values()}
    assert met == {True, False}
