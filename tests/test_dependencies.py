"""Minimum versions leave out the advisories named beside them, and `make audit` says when it cannot ask for others."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
ADVISED = re.compile(r'^\s*"(?P<requirement>[^"]+)",\s*#(?P<reason>.*CVE-\d{4}-\d+.*)$', re.MULTILINE)
"""A line of a requirement whose comment names an advisory."""
NEEDED = {"h11", "pyyaml", "cryptography", "starlette", "jinja2", "transformers"}
"""Packages that read what strangers send: each has a minimum with its reason."""


def requirements() -> list[Requirement]:
    """Return every requirement of the project, of all extras."""
    project = tomllib.loads(PROJECT)["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for texts in lists for text in texts if not text.startswith("isthmus[")]


def installed() -> dict[str, Version]:
    """Return the versions that CI installs."""
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:80])
    return {canonicalize_name(name): Version(version) for name, version in lines if not name.startswith("#")}


def test_packages_that_read_what_strangers_send_have_a_minimum_with_its_reason() -> None:
    """The advisory stands beside the version that ends it, so that a lower minimum is seen in review."""
    advised = {canonicalize_name(Requirement(found["requirement"]).name) for found in ADVISED.finditer(PROJECT)}
    assert advised >= NEEDED
    for found in ADVISED.finditer(PROJECT):
        assert any(part.operator == ">=" for part in Requirement(found["requirement"]).specifier), found[0]


def test_every_installed_version_meets_every_minimum() -> None:
    """No extra asks for less than another one, and CI installs nothing below."""
    versions = installed()
    for one in requirements():
        version = versions.get(canonicalize_name(one.name))
        if version is not None:
            assert version in one.specifier, f"{one} and {version}"
    assert set(versions) >= NEEDED


def audit(folder: Path, printed: str, status: int) -> subprocess.CompletedProcess[str]:
    """Run the script of `make audit` with a stand-in for pip-audit."""
    tool = folder / "pip-audit"
    (folder / "printed").write_text(printed)
    tool.write_text(f'#!/bin/sh\ncat "{folder / "printed"}"\nexit {status}\n')
    tool.chmod(0o755)
    command = ["sh", ROOT / "scripts" / "audit.sh", tool]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("printed", "status", "expected"),
    [
        ("No known vulnerabilities found", 0, 0),
        ("Found 1 known vulnerability in 1 package\nh11 0.14.0 GHSA-vqfr-h8mv-ghfj 0.16.0", 1, 1),
        ("ERROR:pip_audit._cli:absl-py: Dependency not found on PyPI and could not be audited", 1, 3),
        ("requests.exceptions.ConnectionError: Max retries exceeded with url: /pypi/h11/json", 1, 3),
    ],
)
def test_an_audit_without_its_server_says_so(tmp_path: Path, printed: str, status: int, expected: int) -> None:
    """A finding is one; silence of the server is neither a finding nor a pass, and what stands in for it is named."""
    done = audit(tmp_path, printed, status)
    assert done.returncode == expected
    assert printed.splitlines()[0] in done.stdout
    assert ("tests/test_dependencies.py" in done.stderr) == (expected == 3)


IMPORT_ALL = """
import importlib, pkgutil, sys
import isthmus
sys.modules.update(dict.fromkeys(sys.argv[1:]))
for one in pkgutil.walk_packages(isthmus.__path__, "isthmus."):
    if not one.name.endswith("__main__"):
        importlib.import_module(one.name)
"""


@pytest.mark.slow
def test_no_module_needs_a_package_of_developers() -> None:
    """Every module loads without them, as for a user who has all other extras: `make demo` installs no more."""
    project = tomllib.loads(PROJECT)["project"]
    names = {canonicalize_name(Requirement(text).name) for text in project["optional-dependencies"]["dev"]}
    modules = packages_distributions().items()
    owned = {module for module, owners in modules if {canonicalize_name(owner) for owner in owners} <= names}
    # A scheduler's adapter is tried by pytest, in the kit; accelerate is loaded by transformers where it is there.
    blocked = sorted(owned - {"pytest", "_pytest", "py", "accelerate"})
    assert {"ray", "hypothesis"} <= set(blocked)
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *blocked], check=True, timeout=300)
