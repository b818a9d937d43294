"""Builds the native gateway into a wheel where `ISTHMUS_NATIVE=1` asks for it; else the wheel is pure Python."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeGatewayHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling names it
        """Compile, and mark the wheel as one of this platform."""
        if os.environ.get("ISTHMUS_NATIVE") != "1":
            return
        spec = importlib.util.spec_from_file_location("build_native", Path(self.root) / "scripts" / "build_native.py")
        assert spec is not None  # noqa: S101 - the file is part of the source distribution
        assert spec.loader is not None  # noqa: S101
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        module = Path(script.build_native())
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["artifacts"].append(str(module.relative_to(self.root)))
