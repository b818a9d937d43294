"""The notebook of the Python client, run against a real server, agents and workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from tests.e2e.site import make_job

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "client.ipynb"


def code_of(notebook: Path) -> str:
    """The code cells of a notebook as one program."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_trains_a_job(pairs: DemoPool, tmp_path: Path) -> None:
    """Its code cells, in a process of their own: submit, plans, choose, watch to the end, logs, list, an error."""
    job = make_job(pairs.folder, "notebook", steps=8, policy="manual")
    (tmp_path / "job.yaml").write_text(job.model_dump_json())
    settings = {"ISTHMUS_SERVER": pairs.server, "ISTHMUS_TOKEN_FILE": str(pairs.folder / "user.token")}
    done = subprocess.run(
        [sys.executable, "-c", code_of(NOTEBOOK)],
        cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "north north-owner" in done.stdout
    assert "step 7: loss" in done.stdout
    assert "succeeded\n" in done.stdout
    assert "['notebook'" in done.stdout
    assert "no job 'no-such-job' - `isthmus jobs` lists your jobs" in done.stdout
