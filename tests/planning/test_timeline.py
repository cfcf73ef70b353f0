"""`viz.plot_memory`: what is drawn is what the plan says."""

import pytest
import torch

from dilated_attention_pytorch import BlockSparseRingMultiheadDilatedAttention, RandomBlocks, plan_memory
from dilated_attention_pytorch.viz import plot_memory
from dilated_attention_pytorch.viz.memory import KIND_COLOURS


def stacked(figure):
    """Height of the bars of each phase, by colour."""
    from matplotlib.colors import to_hex

    found = {}
    for bar in figure.axes[0].patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        found.setdefault(place, {})[to_hex(bar.get_facecolor())] = bar.get_height()
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_bars_are_the_bytes_of_the_plan(world_size, tmp_path):
    plan = plan_memory(RandomBlocks(9), 1 << 20, 1, torch.bfloat16, True, world_size, device="H200")
    figure = plot_memory(plan, tmp_path / "memory.png")
    bars = stacked(figure)
    assert (tmp_path / "memory.png").stat().st_size > 5000
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(plan.phases)
    for place, (phase, total) in enumerate(plan.phases.items()):
        for kind, count in plan.by_kind(phase).items():
            assert bars[place][KIND_COLOURS[kind]] * 2**30 == pytest.approx(count)
        assert sum(bars[place].values()) * 2**30 == pytest.approx(total)


def test_every_kind_has_a_colour_and_measured_peaks_are_marks():
    module = BlockSparseRingMultiheadDilatedAttention(64, 4)
    plan = plan_memory(module, 4096, training=True, device="cpu")
    assert {item.kind for item in plan.items} <= KIND_COLOURS.keys()
    figure = plot_memory(plan, measured={"forward": 5 << 20, "backward": 9 << 20})
    (marks,) = figure.axes[0].lines
    places = [list(plan.phases).index(phase) for phase in ("forward", "backward")]
    assert list(marks.get_xdata()) == places
    assert list(marks.get_ydata()) == [5.0, 9.0]
    with pytest.raises(ValueError, match=r"measured must name phases of the plan.*got 'lunch'"):
        plot_memory(plan, measured={"lunch": 3})
