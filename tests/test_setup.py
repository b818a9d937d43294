"""Rules of `scripts/setup.sh`: one line per step, silent tools, and the end of the log when a step fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup.sh"
WARNING = "WARNING: Location 'file:///absent/simple/x/' is ignored: it is either a non-existing path or lacks a scheme."

PYTHON = f"""#!/bin/sh
# A Python whose environments hold a pip that prints many warnings and ends with $PIP_STATUS.
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p "$3/bin"
cat >"$3/bin/python" <<'PIP'
#!/bin/sh
for number in $(seq 100); do echo "{WARNING}"; done
echo "the reason"
exit $PIP_STATUS
PIP
printf '#!/bin/sh\\n' >"$3/bin/isthmus"
chmod +x "$3/bin/python" "$3/bin/isthmus"
"""


def set_up(folder: Path, pip_status: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for Python and the system's packages."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {"python3": PYTHON, "apt-get": "#!/bin/sh\nexit 1\n", "ip": "#!/bin/sh\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(folder / "venv"), "PYTHON": str(tools / "python3"),
        "TORCH": "torch==1", "PIP_STATUS": str(pip_status), **variables,
    }  # fmt: skip
    return subprocess.run(["sh", SCRIPT], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(60)
def test_set_up_prints_its_steps_and_nothing_of_its_tools(tmp_path: Path) -> None:
    """What pip says goes to the log."""
    done = set_up(tmp_path, pip_status=0)
    assert done.returncode == 0, done.stderr
    assert [line[:5] for line in done.stderr.splitlines() if line[0] == "["] == [f"[{n}/5]" for n in range(1, 6)]
    assert "the reason" not in done.stderr
    assert "the reason" in (tmp_path / "venv" / "setup.log").read_text()
    assert (tmp_path / "venv" / "ready").exists()
    assert "[server,postgres,agent,wan,train,dev]" in (tmp_path / "venv" / "setup.log").read_text()


@pytest.mark.timeout(60)
def test_the_demo_needs_none_of_the_tools_of_the_tests(tmp_path: Path) -> None:
    """`make demo` is the first command of a new user; `make test` adds the tools afterwards."""
    assert set_up(tmp_path, pip_status=0, TOOLS="").returncode == 0
    assert "[server,postgres,agent,wan,train]" in (tmp_path / "venv" / "setup.log").read_text()
    assert (tmp_path / "venv" / "runs").exists()
    assert not (tmp_path / "venv" / "ready").exists()


@pytest.mark.timeout(60)
def test_a_failed_step_shows_the_end_of_the_log_without_ignored_locations(tmp_path: Path) -> None:
    """It names the step, the command and its status, and leaves no mark of success."""
    done = set_up(tmp_path, pip_status=3)
    assert done.returncode == 3
    assert "error: step 3 of 5 failed with status 3" in done.stderr
    assert "the reason" in done.stderr
    assert "is ignored" not in done.stderr
    assert not (tmp_path / "venv" / "ready").exists()
