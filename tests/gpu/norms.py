"""Comparing with the oracle where its tolerances do not reach: eager PyTorch draws other dropout masks."""

import torch

from dilated_attention_pytorch.testing import oracle, results

BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(case):
    """Each result, all of its numbers together, within the rounding of the inputs' precision."""
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results(case, "triton"), oracle(case), strict=True):
        assert torch.equal(got == -torch.inf, want == -torch.inf), f"{name} is −inf for other rows than it should be"
        got, want = (torch.where(x == -torch.inf, 0.0, x.double()) for x in (got, want))
        error = float((got - want).norm() / want.norm())
        assert error < BOUNDS[case.q.dtype], f"{name} is off by {error}"
