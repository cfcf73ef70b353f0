"""`explain` names the kernels that are launched."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device: it is taken for several", allow_module_level=True)

from dilated_attention_pytorch import BlockLayout, SlidingWindow
from dilated_attention_pytorch.backends import triton
from dilated_attention_pytorch.backends.sizes import Shape, SizeRequest
from dilated_attention_pytorch.kernels import (
    hopper_backward,
    hopper_forward,
    hopper_runs,
    hopper_runs_backward,
    launch,
    united,
)
from dilated_attention_pytorch.layout.size import ListSize
from dilated_attention_pytorch.options import CallOptions
from tests.kernels.compiling import CALLS, HOPPER_CALLS, launches_of, recorded

ALL_CALLS = CALLS | HOPPER_CALLS


def launched(launches):
    """For each part of a call whether a warp-specialised kernel was launched for it."""
    found = {}
    for kernel, _, constants in launches:
        forwards = hopper_forward.forward_kernel, hopper_runs.runs_forward_kernel
        if kernel in (*forwards, launch.forward_kernel):
            # United rows run on one, and have the other one launched in case that they are not worth it.
            found["forward"] = kernel in forwards or found.get("forward", False)
        elif kernel is hopper_backward.backward_kernel and constants["SUMS"]:
            found["backward"] = True
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
    least = 0 if ALL_CALLS[name].get("many") else united.LEAST_WORK
    widest = patch.object(launch.runs, "WIDEST", 128)
    with recorded(capability), widest, patch.object(united, "LEAST_WORK", least):
        named = launch.kernels_of(*calls[0])
    assert {part: kernels.startswith("warp-specialised") for part, kernels in named.items()} == launched(launches)
    assert all(kernels.startswith(("warp-specialised", "plain Triton: ")) for kernels in named.values())


def named_and_launched(width, width_v, last_stride=1, block=128, **options):
    """What is named and what is launched for heads of some width, whose rows lie so far apart."""
    q, k = (torch.empty(1, 512, 4, width + last_stride - 1, dtype=torch.float16)[..., :width] for _ in range(2))
    v, do = (torch.empty(1, 512, 4, width_v, dtype=torch.float16) for _ in range(2))
    layout = BlockLayout.from_pattern(SlidingWindow(100, 0), 512, block_size=block)
    options = CallOptions(1.0, **options)
    with recorded((9, 0)) as launches:
        named = launch.kernels_of(q, k, v, layout, options)
        out, lse = launch.forward(q, k, v, layout, options)
        launch.backward(do, None, q, k, v, out, lse, layout, options)
    return named, launched(launches)


@pytest.mark.parametrize("width", [8, 24, 32, 40, 80, 96, 112, 128])
@pytest.mark.parametrize("width_v", [16, 64, 120])
def test_heads_of_every_multiple_of_8(width, width_v):
    for deterministic, parts in ((True, ["backward, dk and dv", "backward, dq"]), (False, ["backward"])):
        named, found = named_and_launched(width, width_v, deterministic=deterministic)
        assert named.keys() == found.keys() == {"forward", *parts}
        assert all(kernels.startswith("warp-specialised, for Hopper") for kernels in named.values())
        assert all(found.values())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("widths", [(192, 128), (256, 256), (64, 200)])
def test_gradients_of_large_heads_come_apart(widths, deterministic):
    named, found = named_and_launched(*widths, deterministic=deterministic)
    assert found == dict.fromkeys(("forward", "backward, dk and dv", "backward, dq"), True)
    assert named == dict.fromkeys(found, "warp-specialised, for Hopper")


def test_large_heads_want_large_blocks():
    named, found = named_and_launched(192, 128, block=64)
    assert not any(found.values())
    assert named["forward"] == "plain Triton: the others are for heads of at most 128"


@pytest.mark.parametrize("widths", [(60, 64), (64, 60)])
def test_other_widths_are_for_the_plain_kernels(widths):
    named, found = named_and_launched(*widths)
    assert not any(found.values())
    assert set(named.values()) == {"plain Triton: the copy engine takes heads whose width is a multiple of 8"}


@pytest.mark.parametrize(("further", "hopper"), [(8, True), (4, False)])
def test_rows_may_lie_apart_by_whole_steps_of_the_copy_engine(further, hopper):
    named, found = named_and_launched(64, 64, 1 + further)
    assert set(found.values()) == {hopper}
    if not hopper:
        assert set(named.values()) == {"plain Triton: the copy engine cannot read these strides or addresses"}


def planned_and_made(capability, call):
    """Bytes of the workspace of a backward: what the planner counts, and each tensor that is made."""
    asked, backward = [], launch.Call.backward

    def keep(self, *arguments):
        asked.append((self, backward(self, *arguments)))
        return asked[0][1]

    with patch.object(launch.Call, "backward", keep):
        launches_of(capability, **call)
    ((done, (_, of_rows, _)),) = asked
    request = SizeRequest(
        shape=Shape.of(done.q, done.k, done.v), lists=ListSize.of(done.layout), device="cuda", capability=capability,
        deterministic=done.deterministic,
    )  # fmt: skip
    made = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in of_rows}
    return triton.workspace(request).backward, [*made.values()]


@pytest.mark.parametrize("name", [name for name in HOPPER_CALLS if name.startswith("fused")] + ["large tiles"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_the_planner_counts_the_sums_of_dq_where_they_are_made(name, capability):
    """float32 sums of dq, up to whole blocks, beside lse and delta."""
    planned, made = planned_and_made(capability, HOPPER_CALLS[name])
    assert planned == sum(made)
    assert len(made) == (2 if capability == (9, 0) and name.startswith("fused") else 1)


@pytest.mark.parametrize("change", [{"head_dim": 256}, {"block": 64}, {"bitmaps": True}, {"head_dim_v": 60}], ids=str)
def test_the_planner_counts_no_sums_for_what_runs_on_the_plain_kernels(change):
    call = {"head_dim": 128, "dtype": torch.bfloat16, "deterministic": False, **change}
    planned, made = planned_and_made((9, 0), call)
    assert [planned] == made


def test_both_kinds_are_met():
    """Else the test above would show little."""
    met = {launched(launches_of((9, 0), **call))["forward"] for call in ALL_CALLS.values()}
    assert met == {True, False}
