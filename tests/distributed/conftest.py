import pytest

from tests.distributed.processes import Ranks


@pytest.fixture(scope="session")
def ranks():
    four = Ranks()
    yield four
    four.close()
