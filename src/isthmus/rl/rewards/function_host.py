"""Calls a user's function: `python -I function_host.py KIND FILE.py NAME`, requests on standard input.

Each line is a JSON list of arguments; each is answered by a JSON line, `{"answer": value}` or `{"error": text}`. The
answer of a `reward` is a number, that of an `environment` text, a list of token numbers, or null. What the function
prints goes to standard error. This file imports nothing of Isthmus.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_ERROR_CHARS = 1000


def load_function(file: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the Python file; its folder is searched for what it imports."""
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location("user_function", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name)
    if not callable(found):
        raise TypeError(f"{name} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _observation(found: Any) -> str | list[int] | None:
    """Return what an environment answered; raises `TypeError` for what is neither text, tokens nor None."""
    if found is None or isinstance(found, str):
        return found
    return [operator.index(one) for one in found]


def main(arguments: list[str]) -> int:
    """Answer requests until standard input ends."""
    kind, *where = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    function: Callable[..., Any] | None = None
    for line in sys.stdin:
        try:
            function = function or load_function(*where)
            found = function(*json.loads(line))
            answer = json.dumps({"answer": float(found) if kind == "reward" else _observation(found)})
        except Exception as error:  # a function can raise anything
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]})
        answers.write(answer + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
