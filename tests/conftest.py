"""Fixtures for every test."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter; it must be asked for before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from dilated_attention_pytorch.backends import blockwise

# The suite runs a process a core; more threads would only wait for each other.
torch.set_num_threads(1)

# A GPU machine may have PyTorch and pytest and nothing else: `pytest -m gpu` runs there all the same.
HAVE_HYPOTHESIS = find_spec("hypothesis") is not None
if HAVE_HYPOTHESIS:
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("suite")
else:
    others = (path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "gpu")
    collect_ignore_glob = [*(f"{folder}/*" for folder in others), "test_*"]


def pytest_report_header():
    return [] if HAVE_HYPOTHESIS else ["hypothesis is not installed: only tests/gpu is collected"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` holds NaN: a row that nobody wrote is seen at once. Nondeterministic operators raise."""
    blockwise.Scratch.idle.clear()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    """What takes minutes begins first: an idle worker then takes the short ones."""
    items.sort(key=lambda item: item.path.name != "test_compiles.py")
