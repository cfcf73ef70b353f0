"""The shape of the project: public names, what an import loads, and who may import whom."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import compat, memory, planning

SOURCE = Path(dap.__file__).parent

# A folder imports only from folders to its left (DESIGN: the way data flows).
ORDER = "caches patterns layout options memory kernels backends ops distributed planning nn models".split()  # noqa: SIM905
READERS = {
    "integrations": set(ORDER),
    "viz": {"patterns", "layout"},
    "testing": set(ORDER),
    "cli": {*ORDER, "viz", "testing", "integrations"},
}
# What a function imports when it is called, although it lies to the right.
LATER = {
    ("layout", "kernels"),  # what makes lists on a GPU
    ("memory", "planning"),  # public names that can be imported from either
    ("memory", "backends"),  # how large the buffers of a call are, for `AttentionBuffers.preallocate_buffers`
    ("ops", "viz"),  # `BlockSparseWeights.plot`
}


def test_every_public_name_is_there():
    missing = [name for name in dap.__all__ if not hasattr(dap, name)]
    assert not missing
    assert dap.__all__ == sorted(dap.__all__)
    assert len(set(dap.__all__)) == len(dap.__all__)


# Importable from the root as they always were, though a program seldom needs them.
ELSEWHERE = """
Antidiagonal AttentionBuffers AttentionCost BlockGate BlockSparseHierarchical BlockSparseRingDilatedAttention
BlockSparseRingMultiheadDilatedAttention BlockSparseWeights BufferType Explanation GlobalBlocks LocalBlocks
MeanPooled MemoryPool MinMaxBound Moments Pattern PersistentPatternCache RingError SampledRows SparsePatternConfig
Traffic block_masses count_traffic create_block_sparse_attention gate_loss hierarchical kept_mass recommend
set_pattern_cache split_budget
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", [*ELSEWHERE, *compat.__all__])
def test_names_of_folders_and_old_names_are_in_the_root_too(name):
    assert name not in dap.__all__
    assert name in dir(dap)
    scope = {}
    exec(f"from dilated_attention_pytorch import {name}", scope)
    assert pickle.loads(pickle.dumps(scope[name])) is scope[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'dilated_attention_pytorch' has no attribute 'FlashAttention'"):
        dap.FlashAttention  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'FlashAttention'"):
        exec("from dilated_attention_pytorch import FlashAttention")


def test_versions_agree():
    from importlib.metadata import version

    assert dap.__version__ == version("dilated-attention-pytorch")


@pytest.mark.slow
def test_importing_loads_torch_and_nothing_else_heavy():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import dilated_attention_pytorch\n"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))\n"
        "print([m for m in sys.modules if m in ('torch._dynamo', 'torch._inductor', 'matplotlib', 'triton', 'rich')])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops, heavy = run.stdout.splitlines()
    stdlib = set(sys.stdlib_module_names)
    assert [m for m in ast.literal_eval(tops) if m not in stdlib] == ["dilated_attention_pytorch"]
    baseline = "import sys, torch; print([m for m in sys.modules if m in ('torch._dynamo', 'torch._inductor')])"
    run = subprocess.run([sys.executable, "-c", baseline], capture_output=True, text=True, check=True)
    assert heavy == run.stdout.strip()


def imports_of(path):
    """Folders of the package that a file imports when it is loaded, and those that its functions import."""
    package = path.relative_to(SOURCE).parts[:-1]
    at_once, later = set(), set()

    def look(node, found):
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            found = later
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module.split(".") if node.module else ()))
            found |= {target[0]} if target else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dilated_attention_pytorch."):
            found.add(node.module.split(".")[1])
        for child in ast.iter_child_nodes(node):
            look(child, found)

    look(ast.parse(path.read_text()), at_once)
    return at_once, later


@pytest.mark.parametrize("folder", [*ORDER, *READERS])
def test_a_file_imports_only_from_its_left(folder):
    allowed = {folder, *READERS.get(folder, ORDER[: ORDER.index(folder)] if folder in ORDER else ())}
    files = list((SOURCE / folder).rglob("*.py")) or [SOURCE / f"{folder}.py"]
    for path in files:
        at_once, later = imports_of(path)
        assert at_once <= allowed, path
        assert later <= allowed | {right for left, right in LATER if left == folder}, path


def test_the_planner_can_be_imported_from_memory_too():
    everything = {}
    exec("from dilated_attention_pytorch.memory import *", everything)
    for name in planning.__all__:
        assert getattr(memory, name) is everything[name] is getattr(planning, name)
    with pytest.raises(AttributeError, match=r"module 'dilated_attention_pytorch\.memory' has no attribute 'plan'"):
        _ = memory.plan


def test_only_kernels_import_triton():
    for path in SOURCE.rglob("*.py"):
        if "kernels" not in path.parts:
            assert "import triton" not in path.read_text(), path


@pytest.mark.parametrize("path", sorted(SOURCE.glob("block_sparse_*.py")), ids=lambda path: path.stem)
def test_historical_paths_hold_nothing_but_imports(path):
    body = ast.parse(path.read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in body[1:])


def test_one_implementation_per_concept():
    for old in compat.__all__:
        assert getattr(compat, old).__name__ not in compat.__all__


def test_the_reference_stays_short():
    assert len((SOURCE / "backends" / "reference.py").read_text().splitlines()) < 100


WHOLE = set(
    "bad_input benchmarks caches docs examples links public_api regressions security seeds site site_pages".split()  # noqa: SIM905
)


def test_the_tests_mirror_the_source():
    """A test lies in the folder of what it tests; the root is for the whole project, and so is `tracing`."""
    tests = Path(__file__).parent
    folders = {path.parent.name for path in tests.glob("*/test_*.py")}
    sources = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert folders - {"gpu", "tracing"} <= sources
    assert {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")} == WHOLE
