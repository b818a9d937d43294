"""The native gateway for tests: compiled once for a run, into its temporary folder, and taken only where one asks."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from isthmus.wan.roce.gateway.make_gateway import native_gateway
from scripts.build_native import build_native, compiler

NAME = "isthmus.wan.roce.gateway._native"


@pytest.fixture(scope="session")
def native_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Compile the module, some seconds; workers of one run share it."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        spec = importlib.util.spec_from_file_location(NAME, build_native(folder))
    assert spec is not None
    assert spec.loader is not None
    return importlib.util.module_from_spec(spec)


def _take(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `native_gateway` find this module, or none, whatever lies beside the sources."""
    native_gateway.cache_clear()
    monkeypatch.setitem(sys.modules, NAME, module)
    yield
    native_gateway.cache_clear()


@pytest.fixture
def built(native_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the native form."""
    yield from _take(native_module, monkeypatch)


@pytest.fixture(params=["python", "native"])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test in both forms."""
    form: str = request.param
    module = request.getfixturevalue("native_module") if form == "native" else None
    for _ in _take(module, monkeypatch):
        yield form
