"""`pip install` from the checkout, as the README says it: a wheel with everything that the commands read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.follow_guide import ROOT, copy_repository


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_checkout_installs_as_the_readme_says(tmp_path: Path) -> None:
    """Into an empty environment, without its dependencies, which are those of this one; the commands run from there."""
    (line,) = re.findall(r"^pip install '(\.\[[\w,]+\])'", (ROOT / "README.md").read_text(), re.MULTILINE)
    copy = tmp_path / "checkout"
    copy.mkdir()
    copy_repository(copy)
    (copy / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, env=plain)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps"]
    done = subprocess.run([*pip, line], cwd=copy, env=plain, capture_output=True, text=True, check=False)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("pip finds no hatchling here, the build backend")
    assert done.returncode == 0, done.stderr
    found = plain | {"PYTHONPATH": sysconfig.get_path("purelib")}
    for words in (("schema", "job"), ("chips",), ("demo", "--help")):
        ran = subprocess.run([venv / "bin" / "isthmus", *words], env=found, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    code = "import isthmus, sys; sys.exit(not isthmus.__file__.startswith(sys.prefix))"
    assert subprocess.run([venv / "bin" / "python", "-c", code], env=found, check=False).returncode == 0
