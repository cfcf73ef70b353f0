"""The items of a call, and their peak."""

from dilated_attention_pytorch.planning.estimate import Item, peak_of


def test_the_peak_is_the_fullest_phase():
    items = [
        Item("a", "tensors", 5, ("layout", "forward")),
        Item("b", "workspace", 9, ("layout",)),
        Item("c", "gradients", 7, ("forward", "backward")),
    ]
    assert peak_of(items) == {"layout": 14, "forward": 12, "backward": 7}
