"""The class of attack is impossible: no file of `src` has a call that makes code of data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "isthmus"

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop"}
"""Modules whose readers run what they read. `pickletools` only lists opcodes."""

TORCH_MODULES = ("torch.distributed.checkpoint", "torch.package", "torch.hub")
"""Parts of torch that unpickle or import what they read."""

BUILTINS = {"eval", "exec", "compile", "__import__"}

CALLS = {
    "torch.load", "torch.jit.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list", "dist.send_object_list",
    "dist.recv_object_list", "dist.scatter_object_list", "os.system", "os.popen",
}  # fmt: skip
"""Calls that unpickle, by the names under which this code base imports their modules, and shells."""

LAST_WORDS = {name.rpartition(".")[2] for name in (*CALLS, *BUILTINS)} | {"import_module"}
"""Of the names of these calls: only those of the same last word are looked at as a whole, which takes time."""

FORBIDDEN_KEYWORDS = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
"""Keywords, and the one value that is allowed."""

ALLOWED = {
    "__init__.py": {"importlib.import_module"},
    "cli/app/find_command.py": {"importlib.import_module"},
    "cli/commands/process_setup.py": {"importlib.import_module"},
    "wan/roce/gateway/native_gateway.py": {"importlib.import_module"},
}
"""Imports by names that are constants of this code."""


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{one.name}" for one in node.names)


def findings(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module could make code of data."""
    for node in ast.walk(tree):
        for module in imported(node):
            if module.partition(".")[0] in MODULES or module.startswith(TORCH_MODULES):
                yield f"import {module}"
        if isinstance(node, ast.Call):
            last_word = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = ast.unparse(node.func) if last_word in LAST_WORDS else ""
            if name in BUILTINS or name in CALLS or name.endswith(("importlib.import_module", "builtins.eval")):
                yield name
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_KEYWORDS:
                    value = keyword.value
                    if not isinstance(value, ast.Constant) or value.value is not FORBIDDEN_KEYWORDS[keyword.arg]:
                        yield f"{keyword.arg}={ast.unparse(value)}"


@pytest.mark.attack
def test_no_source_file_makes_code_of_data() -> None:
    """No pickle, marshal, eval, exec, torch.load, trust_remote_code or shell anywhere in `src`."""
    found = {
        (str(file.relative_to(SOURCE)), one)
        for file in SOURCE.rglob("*.py")
        for one in findings(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert {(file, one) for file, one in found if one not in ALLOWED.get(file, ())} == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "torch.load(file)",
        "torch.load(file, weights_only=True)",
        "eval(text)",
        "f(trust_remote_code=flag)",
        "f(shell=True)",
        "f(weights_only=False)",
    ],
)
def test_the_search_sees_each_kind(text: str) -> None:
    """Each line is found, so an empty result means that there is none."""
    assert list(findings(ast.parse(text)))
