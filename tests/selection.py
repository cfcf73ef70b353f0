"""What a selector keeps, by sorting: for tests of the kernels that never sort."""

import torch

from dilated_attention_pytorch import SharedBudget, TopK
from dilated_attention_pytorch.ops import select
from dilated_attention_pytorch.ops.grids import listed


def first_kept(selector, masses, grid):
    """The blocks that a selector keeps, the first of equally heavy ones."""
    priority = grid.priority(masses)
    batch, lists, num_k = *masses.shape[:2], masses.shape[3]
    if isinstance(selector, SharedBudget):
        teams, counts = priority.reshape(batch, 1, -1), masses.new_tensor([[selector.max_blocks(grid, lists)]])
    else:
        counts = masses.new_tensor(selector.counts(grid, lists))
        teams = priority.transpose(1, 2).flatten(2) if selector.across_heads else priority
    order = teams.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(teams, dtype=torch.bool)
    kept.scatter_(-1, order, (torch.arange(order.shape[-1], device=masses.device) < counts[..., None]).expand_as(order))
    if isinstance(selector, TopK) and selector.across_heads:
        kept = kept.unflatten(2, (lists, num_k)).transpose(1, 2)
    return kept.view_as(masses) & grid.visible


def assert_first_kept(selector, masses, given, grid):
    """The kernels make exactly those lists of `given` (the masses, or NaN for all of them), and their order of work."""
    from dilated_attention_pytorch.kernels import select_lists

    batch, lists = masses.shape[:2]
    team = select._team(selector, grid, lists)
    got, work = select_lists.heaviest_blocks(given, *team)
    want = listed(first_kept(selector, masses, grid), grid.last_full, batch * team.places)
    for ours, theirs in zip(got.tensors(), want.tensors(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(work, want.work(batch * lists))
