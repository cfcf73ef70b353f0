"""SECURITY.md, held by reading the source: no pickle, no network, no code from data."""

import ast
import re
from pathlib import Path

import pytest

import dilated_attention_pytorch

ROOT = Path(__file__).parent.parent
SOURCE = Path(dilated_attention_pytorch.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

PICKLE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NETWORK = {"socket", "socketserver", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib"}
SERVING = {"socket", "socketserver", "http", "urllib"}  # what a page on localhost needs
SHELL = {"subprocess", "pty"}
CODE = {"eval", "exec", "compile", "__import__", "execfile"}
CALLS = {"torch.load", "torch.hub.load", "torch.utils.cpp_extension.load", "os.system", "os.popen"}


def name_of(node):
    """`torch.hub.load` of an expression, "" if it is no plain name."""
    if isinstance(node, ast.Attribute):
        base = name_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def offences(code, *, serves=False):
    """What a file does that SECURITY.md says it does not."""
    found = []
    forbidden = PICKLE | SHELL | NETWORK - (SERVING if serves else set())
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in forbidden]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in forbidden:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            if name == "torch.load" and any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            ):
                continue
            if name in CODE | CALLS:
                found.append(f"{name}(…)")
            elif name.split(".")[-1] == "import_module" and not isinstance(node.args[0], ast.Constant):
                found.append("import_module of a name that is not in the source")
            for keyword in node.keywords:
                # remote code of a model's authors; arrays of objects
                if keyword.arg in ("trust_remote_code", "allow_pickle") and getattr(keyword.value, "value", 1):
                    found.append(f"{keyword.arg}=True")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_pickle_no_network_no_code_from_data(path):
    assert not offences(
        path.read_text(), serves=path.is_relative_to(SOURCE / "cli" / "explore") or path.stem == "explore"
    )


def test_the_package_leaves_files_of_tensors_to_safetensors():
    assert not [path for path in FILES if re.search(r"\btorch\.(load|save)\(", path.read_text())]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_unpickle_nothing(path):
    assert not offences(path.read_text())


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from urllib.request import urlopen",
        "import os, requests.adapters",
        "x = torch.load(path)",
        "x = torch.load(path, weights_only=False)",
        "torch.hub.load(a, b)",
        "eval(text)",
        "def f():\n    exec(text)",
        "importlib.import_module(name)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=flag)",
        "import subprocess",
    ],
)
def test_an_offence_is_seen(code):
    assert offences(code)


@pytest.mark.parametrize(
    "code", ["model.eval()", "torch.compile(f)", "from .pickle import x", "import_module('triton')", "re.compile(x)"]
)
def test_what_is_none_is_not(code):
    assert not offences(code)


def test_serving_is_for_the_explorer_alone():
    assert offences("import http.server") == ["http.server"]
    assert offences("import http.server", serves=True) == []
    assert offences("import requests", serves=True) == ["requests"]
