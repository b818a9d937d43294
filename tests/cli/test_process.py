"""The command line as a process: what it imports, how it starts, how Ctrl-C and a closed pipe end it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.control.processes import until

pytestmark = pytest.mark.integration

FORBIDDEN = {"torch", "transformers", "fastapi", "uvicorn", "psutil", "numpy", "cryptography"}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_command_line_imports_the_base_install_only() -> None:
    """Help, report and all commands load without torch, the server's or the agent's packages."""
    loaded = json.loads(
        python(
            "import sys, json; from isthmus.cli.app import cli_reference, entry, typer_app; "
            "print(json.dumps(list(sys.modules)))"
        )
    )
    assert not {name.split(".")[0] for name in loaded} & FORBIDDEN


@pytest.mark.slow
def test_ctrl_c_while_a_server_is_silent_leaves_nothing() -> None:
    """1. A server accepts and never answers. 2. SIGINT. 3. Exit 130 at once, not a word, no trace.

    The signal comes once the client sleeps: CPython notices one that comes just before the system call only after it.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environ = os.environ | {
            "ISTHMUS_SERVER": url,
            "ISTHMUS_TOKEN": "t",
            "XDG_CONFIG_HOME": "/nonexistent",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from isthmus.cli import main; sys.exit(main(['jobs']))"],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        connection, _ = silent.accept()
        with connection:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += connection.recv(1 << 16)
            until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "the client waits")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.slow
def test_the_tests_pass_in_a_background_job() -> None:
    """A script's background job ignores SIGINT; the session of the tests restores it for the processes it starts."""
    test = f"{__file__}::{test_ctrl_c_while_a_server_is_silent_leaves_nothing.__name__}"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "pytest", "-q", test]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly() -> None:
    """`isthmus schema pool | head -1`: the reader goes, we go, without a traceback."""
    command = f"{sys.executable} -c 'from isthmus.cli import main; import sys; sys.exit(main([\"chips\"]))' | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_ctrl_c_while_the_commands_are_loaded_is_quiet() -> None:
    """Ctrl-C right after the start gives exit 130 and no traceback."""
    code = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "isthmus.cli.commands.job_commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from isthmus.cli import main
sys.exit(main(["jobs"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
