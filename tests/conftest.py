"""Fixtures for every test."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("suite")

# The suite runs a process a core; more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` holds NaN: a row that nobody wrote is seen at once. Nondeterministic operators raise."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
