"""Bad input: a ValueError or TypeError that names the argument, the rule and the value, before anything is computed."""

import re
from importlib import import_module
from pkgutil import iter_modules

import pytest

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import Full, SlidingWindow, nn, ops
from dilated_attention_pytorch.nn.attention import PATTERN_FIELDS
from tests import bad_input
from tests.bad_input import by_kind
from tests.bad_input.ops import call

FOLDERS = [module.name for module in iter_modules(bad_input.__path__) if module.name != "by_kind"]
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


def answer(run):
    try:
        run()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return None, "taken"


@pytest.mark.parametrize("name", by_kind.BAD)
def test_every_argument_with_every_value_that_is_bad_for_its_kind(name, nothing_is_computed):
    wrong = {}
    for what, (run, kind, message) in by_kind.BAD[name].items():
        got = answer(run)
        if got[0] is not kind or not re.search(message, got[1]):
            wrong[what] = got
    assert not wrong


def test_the_fixture_would_notice(nothing_is_computed):
    for layout in (Full(), SlidingWindow(3, 3)):
        with pytest.raises(AssertionError, match="a kernel started"):
            call(layout=layout)()


def test_the_tables_are_long_and_name_what_is_wrong():
    assert len(CASES) >= 120
    for folder, name in CASES:
        _, kind, message = TABLES[folder][name]
        assert kind in (TypeError, ValueError), (folder, name)
        assert re.search("[a-z]{3}", message), (folder, name)


def test_no_argument_is_forgotten():
    """Each argument of each public callable of `ops` and `nn` has its kind in the table, if only None."""
    public = {f"{folder}.{name}" for folder, module in (("ops", ops), ("nn", nn)) for name in module.__all__}
    assert public - set(by_kind.CALLS) == {"ops.Explanation", "ops.BlockSparseWeights"}  # made by calls, not by users
    for name, (good, kinds) in by_kind.CALLS.items():
        _, names = by_kind.parameters_of(name)
        unused = names - set(kinds) - set(PATTERN_FIELDS)
        assert not unused, (name, unused)
        assert set(good) <= names, name
