"""`deterministic=True` where PyTorch was told nothing: what is PyTorch's own must be told, or is not taken."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.backends import sdpa
from dilated_attention_pytorch.backends.base import Request, in_fixed_order
from dilated_attention_pytorch.options import CallOptions


@pytest.mark.parametrize(
    ("is_cuda", "asked", "told", "want"),
    [(True, True, False, True), (True, False, False, False), (False, True, False, False), (True, False, True, True)],
)
def test_pytorch_is_told_for_as_long_as_a_backward_takes(is_cuda, asked, told, want):
    torch.use_deterministic_algorithms(told)
    backward = in_fixed_order(lambda *args: torch.are_deterministic_algorithms_enabled())
    assert backward(Mock(spec=Tensor, is_cuda=is_cuda), CallOptions(1.0, deterministic=asked)) == want
    assert torch.are_deterministic_algorithms_enabled() == told


def test_pytorch_is_no_longer_told_when_a_backward_fails():
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ZeroDivisionError):
        in_fixed_order(lambda *args: 1 / 0)(Mock(spec=Tensor, is_cuda=True), CallOptions(1.0))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("device", "asked", "told", "want"),
    [
        ("cuda", True, False, False),
        ("cuda", True, True, True),
        ("cuda", False, False, True),
        ("cpu", True, False, True),
    ],
)
def test_sdpa_runs_where_its_gradients_are_as_they_were_asked_for(device, asked, told, want):
    torch.use_deterministic_algorithms(told)
    request = Request(
        device=torch.device(device), dtype=torch.float16, head_dim=64, kind="full", square=True, deterministic=asked
    )
    ok, reason = sdpa.can_run(request)
    assert ok == want
    assert want or "torch.use_deterministic_algorithms(True)" in reason
