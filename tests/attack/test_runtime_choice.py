"""Attacks by a job's `runtime`: a variable or a program of the user's must not become code at a site."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from isthmus.core.job_parts.runtime_choice import RuntimeChoice

pytestmark = pytest.mark.attack


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "PYTHONPATH", "PATH", "HOME", "ISTHMUS_CARDS", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN",
     "NCCL_CONF_FILE", "NCCL_DEBUG_FILE", "UCX_MODULE_DIR", "FI_PROVIDER_PATH", "nccl_debug"],
)  # fmt: skip
def test_variable_that_loads_or_names_files_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"no communication parameter|names a file"):
        RuntimeChoice.model_validate({"communication": {name: "/data/evil.so"}})


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_BUFFSIZE", "NCCL_SOCKET_NTHREADS", "UCX_TLS", "HCCL_BUFFSIZE"])
def test_parameter_of_a_library_is_taken(name: str) -> None:
    assert RuntimeChoice.model_validate({"communication": {name: "1"}}).communication == {name: "1"}
