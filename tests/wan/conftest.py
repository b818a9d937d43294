"""The native gateway for tests: compiled once for a run, into its temporary folder; what lies in src is not used."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from types import ModuleType

import pytest

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.native_gateway import native_gateway
from scripts.build_native import build_native, compiler


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
        spec = importlib.util.spec_from_file_location("isthmus.wan.roce.gateway._native", build_native(folder))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native(native_module: ModuleType) -> type[Gateway]:
    """Return the native form."""
    found = native_gateway(lambda: native_module)
    assert found is not None
    return found


@pytest.fixture(params=["python", "native"])
def form(request: pytest.FixtureRequest) -> type[Gateway]:
    """Run a test in both forms."""
    found: type[Gateway] = Gateway if request.param == "python" else request.getfixturevalue("native")
    return found
