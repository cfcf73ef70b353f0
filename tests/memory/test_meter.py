"""`memory.measure_peak`: what it reports, above what, and where it refuses."""

import pytest
import torch

from dilated_attention_pytorch.memory import can_measure, measure_peak, meter

MIB = 1 << 20

needs_linux = pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])


def touched(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


@needs_linux
def test_a_touched_allocation_is_reported():
    with measure_peak() as peak:
        x = touched(64)
    assert peak.peak_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert len(x) == 64 * MIB


@needs_linux
def test_the_peak_is_reported_and_not_the_level_at_the_end():
    with measure_peak() as peak:
        x = touched(64)
        del x
        y = touched(2)  # little, so that it does not matter whether the allocator has given the first one back by then
    assert peak.peak_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert len(y) == 2 * MIB


@needs_linux
def test_what_was_held_before_does_not_count():
    x = touched(128)
    with measure_peak() as peak:
        pass
    assert peak.peak_bytes < 4 * MIB
    assert len(x) == 128 * MIB


@needs_linux
def test_an_earlier_and_higher_mark_is_forgotten():
    x = touched(256)
    del x
    with measure_peak() as peak:
        y = touched(64)
    assert peak.peak_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert len(y) == 64 * MIB


@needs_linux
def test_memory_that_malloc_kept_counts_when_it_is_used_again():
    del (x := [touched(31)])[:]  # freeing a mapped chunk raises the size above which malloc maps, so the next ones stay
    pieces = [touched(1) for _ in range(64)]
    pin = torch.ones(64 << 10, dtype=torch.uint8)  # keeps the end of the heap, so that nothing below is returned
    del pieces
    with measure_peak() as peak:
        x = [touched(1) for _ in range(64)]
    assert peak.peak_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert len(x) + len(pin) == 64 + (64 << 10)


@needs_linux
def test_a_block_that_raises_is_measured_too():
    with pytest.raises(IndexError), measure_peak() as peak:
        touched(64)[64 * MIB]
    assert peak.peak_bytes == pytest.approx(64 * MIB, rel=0.1)


@needs_linux
def test_the_peak_is_not_known_inside_the_block():
    with measure_peak() as peak, pytest.raises(RuntimeError, match="after the with block"):
        _ = peak.peak_bytes


def test_without_clear_refs_it_is_an_error_that_names_it(monkeypatch, tmp_path):
    missing = tmp_path / "clear_refs"
    monkeypatch.setattr(meter, "_RESET", missing)
    assert can_measure("cpu") == (False, f"needs Linux, with a writable {missing} and a readable /proc/self/status")
    with pytest.raises(RuntimeError, match=r"measure_peak needs Linux, with a writable .*clear_refs"), measure_peak():
        pass


def test_without_a_high_water_mark_it_is_an_error_that_names_it(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t     100 kB\n")
    monkeypatch.setattr(meter, "_STATUS", status)
    assert meter._status_bytes("VmRSS") == 102400
    with pytest.raises(RuntimeError, match="field VmHWM"):
        meter._status_bytes("VmHWM")


def test_other_devices_are_refused():
    with pytest.raises(RuntimeError, match="cpu and cuda, not of meta"), measure_peak("meta"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA")
def test_cuda_without_cuda_is_an_error():
    with pytest.raises(RuntimeError, match="needs a CUDA device"), measure_peak("cuda"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocator_is_asked():
    held = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    with measure_peak("cuda") as peak:
        x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del x
        y = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    assert peak.peak_bytes == 64 * MIB
    assert len(held) + len(y) == 48 * MIB
