import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    """Hashes wrap around, hidden scores overflow, and empty sums have the logarithm −inf: numpy, which the interpreter
    runs on, would warn of it all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
