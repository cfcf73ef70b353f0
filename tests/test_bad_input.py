"""Bad input: a ValueError or TypeError that names the argument, the rule and the value, before anything is computed."""

import re
from importlib import import_module
from pkgutil import iter_modules

import pytest

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import Full, SlidingWindow
from tests import bad_input
from tests.bad_input.ops import call

FOLDERS = [module.name for module in iter_modules(bad_input.__path__)]
TABLES = {folder: import_module(f"tests.bad_input.{folder}").BAD for folder in FOLDERS}
CASES = [(folder, name) for folder, table in TABLES.items() for name in table]


@pytest.fixture
def nothing_is_computed(monkeypatch):
    """A backend that starts is a failure of the check before it."""

    def started(*args, **kwargs):
        raise AssertionError("a kernel started on bad input")

    for backend in (dap.backends.blockwise, dap.backends.reference, dap.backends.sdpa):
        for name in ("forward", "attention"):
            if hasattr(backend, name):
                monkeypatch.setattr(backend, name, started)


@pytest.mark.parametrize(("folder", "name"), CASES, ids=[f"{folder}: {name}" for folder, name in CASES])
def test_bad_input(folder, name, nothing_is_computed):
    run, kind, message = TABLES[folder][name]
    with pytest.raises(kind, match=message):
        run()


def test_the_fixture_would_notice(nothing_is_computed):
    for layout in (Full(), SlidingWindow(3, 3)):
        with pytest.raises(AssertionError, match="a kernel started"):
            call(layout=layout)()


def test_the_tables_are_long_and_name_what_is_wrong():
    assert len(CASES) >= 100
    for folder, name in CASES:
        _, kind, message = TABLES[folder][name]
        assert kind in (TypeError, ValueError), (folder, name)
        assert re.search("[a-z]{3}", message), (folder, name)
