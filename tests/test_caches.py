"""Every cache of the library is registered, and can be emptied at any time."""

import ast
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.caches import cache_report, cached
from dilated_attention_pytorch.memory import clear_caches
from tests.tracing.calls import CALLS

SOURCE = Path(dap.__file__).parent
CONTAINERS = "dict list set OrderedDict defaultdict deque Counter WeakKeyDictionary WeakValueDictionary WeakSet".split()  # noqa: SIM905
DECORATORS = {"cached", "plain_cache", "value_cache"}

# What modules hold from call to call that is no cache: emptied, it would be wrong, or not come back.
STATE = {
    "caches._caches": "the registry itself",
    "patterns.base._classes": "the classes that a text may name",
    "integrations.hf_models.NAMES": "names that users have registered",
    "integrations.hf_models.warned": "classes that were warned of once",
    "distributed.control._groups": "process groups, which all ranks make together",
    "distributed.exchange._started": "devices that have sent a first message, which all ranks do together",
    "distributed.agreement._counts": "how many calls a process group has seen, the same on all ranks",
    "distributed.exchange._counting": "the counters that are open",
    "memory.pool._pools": "all pools, by weak references, to renew their locks after a fork",
    "backends.workers._pool": "threads",
    "backends.workers._lock": "their lock",
    "ops.fast_path._enabled": "a switch",
    "ops.checks._warned_of_order": "a warning that is given once",
}


def name_of(node):
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def is_empty_container(value):
    if isinstance(value, ast.Call):
        function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return name_of(function) in CONTAINERS and not value.args and not value.keywords
    return isinstance(value, ast.Dict | ast.List | ast.Set) and not getattr(value, "elts", getattr(value, "keys", ()))


def caches_in(source):
    """Names, in a module, of what it may keep from call to call: registered decorators, unregistered ones as
    `functools`, and containers that begin empty or names that are bound again."""
    found, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        if name_of(node) in ("lru_cache", "cache") or isinstance(node, ast.ImportFrom):
            names = [x.name for x in node.names] if isinstance(node, ast.ImportFrom) else [name_of(node)]
            module = node.module if isinstance(node, ast.ImportFrom) else "functools"
            of_tools = isinstance(node, ast.ImportFrom | ast.Attribute) and module == "functools"
            if isinstance(node, ast.Attribute):
                of_tools = name_of(node.value) == "functools"
            found |= {"functools"} if of_tools and {"lru_cache", "cache"} & set(names) else set()
    holders = [(tree, "")] + [(node, f"{node.name}.") for node in tree.body if isinstance(node, ast.ClassDef)]
    for holder, prefix in holders:
        for node in holder.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_container(node.value):
                found |= {prefix + name_of(target) for target in targets}
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made = [x.func for x in node.decorator_list if isinstance(x, ast.Call)]
                found |= {prefix + node.name} if any(name_of(x) in DECORATORS for x in made) else set()
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from functools import lru_cache", {"functools"}),
        ("import functools\n@functools.cache\ndef f(): ...", {"functools"}),
        ("_known: dict[int, int] = {}", {"_known"}),
        ("_known = OrderedDict[int, int]()\nOTHER = {1: 2}", {"_known"}),
        ("class A:\n    idle: ClassVar[list[int]] = []", {"A.idle"}),
        ("_x = None\ndef f():\n    global _x\n    _x = 1", {"_x"}),
        ("@cached(3, 'numbers')\ndef f(): ...\n@dataclass(frozen=True)\nclass B: ...", {"f"}),
        ("def f():\n    seen = {}", set()),
    ],
)
def test_caches_are_found(source, found):
    assert caches_in(source) == found


def test_every_cache_is_registered():
    found, loaded = set(), True
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        here = caches_in(path.read_text()) - ({"functools"} if module == "caches" else set())
        assert "functools" not in here, f"{path}: use `cached`, `plain_cache` or `value_cache`"
        found |= {f"{module}.{name}" for name in here}
        if here:
            try:
                importlib.import_module(f"dilated_attention_pytorch.{module}")
            except ImportError as error:  # an extra that is not installed here: what it has cannot be asked for
                assert module.startswith(("kernels", "integrations")), error  # noqa: PT017
                loaded = False
    registered = {each.name for each in cache_report() if not each.name.startswith("tests.")}
    assert not set(STATE) - found, "no longer there"
    if loaded:
        # `opened_once` is the only one that is made of a function of another module.
        assert found - set(STATE) == registered - {"patterns.opening.opened"}
    else:
        assert registered - {"patterns.opening.opened"} <= found - set(STATE)


def test_every_cache_says_what_it_holds():
    for each in cache_report():
        assert each.holds
        assert "up to" in each.holds if each.bound is None else each.bound >= 1


def results(names):
    found = []
    for name in names:
        torch.manual_seed(0)
        function, tensors = CALLS[name]()
        out = function(*tensors)
        found += out if isinstance(out, tuple) else [out]
    return [x for x in found if isinstance(x, torch.Tensor)]


def test_empty_caches_change_no_result():
    clear_caches()
    want = results(CALLS)
    filled = {each.name for each in cache_report() if each.entries}
    assert {"layout.cache._cache", "ops.grids.grid_of", "ops.dilated._branches_of"} <= filled
    assert next(each.nbytes for each in cache_report() if each.name == "layout.cache._cache") > 0
    clear_caches()
    assert not [each.name for each in cache_report() if each.entries or each.nbytes]
    got = results(CALLS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_cache_is_bounded_and_emptied():
    calls = []

    @cached(2, "squares")
    def square(x):
        calls.append(x)
        return x * x

    assert [square(x) for x in (1, 2, 2, 3, 1)] == [1, 4, 4, 9, 1]
    assert calls == [1, 2, 3, 1]
    (info,) = (each for each in cache_report() if each.holds == "squares")
    assert (info.entries, info.bound) == (2, 2)
    clear_caches()
    assert square(1) == 1
    assert calls == [1, 2, 3, 1, 1]


def test_other_threads_are_not_disturbed():
    """Calls that run while caches are emptied, again and again."""
    q = torch.randn(1, 64, 2, 8)
    pattern = dap.SlidingWindow(20, 0) | dap.GlobalTokens(3)

    def call(_=None):
        out = dap.block_sparse_attention(q, q, q, pattern, is_causal=True)
        return out, dap.dilated_attention(q, q, q, segment_lengths=[16, 32], dilation_rates=[1, 2])

    want = call()
    with ThreadPoolExecutor(2) as others:
        calls = [others.submit(call) for _ in range(100)]
        while not all(each.done() for each in calls):
            clear_caches()
    for each in calls:
        assert all(torch.equal(a, b) for a, b in zip(each.result(), want, strict=True))
