"""`isthmus wan admit`, `proxy` and `gateway`: answers, refusals, and options that contradict each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_plan_commands import run

NETWORK = """
topology:
  pipes:
    - {name: p1, from: nanjing, to: hangzhou, capacity_gbps: 10, delay_ms: 4}
requests:
  - {name: job-1, from: nanjing, to: hangzhou, bandwidth_gbps: 6}
  - {name: job-2, from: nanjing, to: hangzhou, bandwidth_gbps: 6}
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return the file of a key."""
    file = tmp_path / "link.key"
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o600)
    return file


def test_requests_are_admitted_in_order_until_a_pipe_is_full(tmp_path: Path) -> None:
    """The second request is refused with what is left; `booked` of the answer may stand in the next file."""
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK)
    status, text = run("wan", "admit", file, "--json")
    answer = json.loads(text)
    assert status == 1
    assert [one["request"]["name"] for one in answer["admitted"]] == ["job-1"]
    assert [one["nearest_gbps"] for one in answer["refused"]] == [4.0]
    again = json.loads(json.dumps({"topology": {"pipes": [
        {"name": "p1", "from": "nanjing", "to": "hangzhou", "capacity_gbps": 10}
    ]}, "booked": answer["booked"], "requests": []}))  # fmt: skip
    file.write_text(json.dumps(again))
    status, text = run("wan", "admit", file)
    assert (status, text.strip()) == (0, "the file has no requests")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("capacity_gbps: 10", "capacity_gbps: -1"), "capacity_gbps"),
        (("bandwidth_gbps: 6}", "bandwith_gbps: 6}"), "bandwith_gbps"),
        (("topology:", "topology: [1"), "network.yaml"),
    ],
)
def test_a_file_with_an_error_names_its_field(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """Impossible values, misspelt fields, broken YAML: exit status 2 and the place."""
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK.replace(*change, 1))
    status, text = run("wan", "admit", file)
    assert status == 2
    assert message in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to do"),
        (("--peer", "hangzhou"), "SITE=VALUE"),
        (("--peer", "wuhan=10.0.0.2:7400"), "no key for wuhan"),
        (("--peer", "hangzhou=10.0.0.2"), "host:port"),
        (("--peer", "hangzhou=10.0.0.2:1", "--workers", "0.0.0.0"), "--clients"),
        (("--listen", "127.0.0.1:0", "--allow", "10.0.0.1/8"), "invalid network"),
    ],
)
def test_options_of_a_proxy_that_contradict_are_refused(
    tmp_path: Path, key: Path, words: tuple[str, ...], message: str
) -> None:
    """Nothing is bound or dialled: exit status 2, with the value and what to do."""
    status, text = run("proxy", "--site", "nanjing", "--key", f"hangzhou={key}", "--state", tmp_path / "s", *words)
    assert status == 2
    assert message in text


def test_a_key_that_others_may_read_is_refused(tmp_path: Path, key: Path) -> None:
    """A key file with mode 0644 is refused, as is one of another length; no message shows the key."""
    words = ("proxy", "--site", "nanjing", "--key", f"hangzhou={key}", "--state", tmp_path, "--listen", "127.0.0.1:0")
    key.chmod(0o644)
    status, text = run(*words)
    assert (status, "chmod 600" in text, "abab" in text) == (2, True, False)
    key.chmod(0o600)
    key.write_text("abab")
    status, text = run(*words)
    assert (status, "32 bytes" in text, "abab" in text) == (2, True, False)


GATEWAY = ("gateway", "--site", "a", "--near", "10.1.0.0/16", "--far", "b=10.2.0.0/16", "--gbps", "0.1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "TUN device"),
        (("--frames", "0.0.0.0:0"), "without authentication"),
        (("--frames", "127.0.0.1:0", "--tun", "roce0"), "TUN device"),
        (("--frames", "127.0.0.1:0", "--far", "c=10.3.0.0/16"), "no key for c"),
        (("--frames", "127.0.0.1:0", "--near", "10.2.7.0/24"), "overlaps"),
        (("--frames", "127.0.0.1:0", "--nic", "ten=127.0.0.1:1"), "no IP address"),
        (("--frames", "127.0.0.1:0", "--gbps", "0"), "link_gbps"),
        (("--frames", "127.0.0.1:0", "--listen", "here"), "host:port"),
    ],
)
def test_options_of_a_gateway_that_contradict_are_refused(key: Path, words: tuple[str, ...], message: str) -> None:
    """Nothing is bound or dialled: exit status 2, with the value and what to do."""
    status, text = run(*GATEWAY, "--key", f"b={key}", *words)
    assert status == 2
    assert message in text


def test_a_gateway_states_its_addresses_and_ends_with_its_counts(tmp_path: Path, key: Path) -> None:
    """One JSON object when it listens, on loopback, and one at SIGTERM."""
    words = [*GATEWAY, "--key", f"b={key}", "--frames", "127.0.0.1:0", "--state", str(tmp_path / "s"), "--json"]
    process = subprocess.Popen([sys.executable, "-m", "isthmus", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        decoder, text = json.JSONDecoder(), ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline()
        found, _ = decoder.raw_decode(text)
        assert found["listen"].startswith("127.0.0.1:")
        assert found["frames"].startswith("127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        final = json.loads(rest)
        assert process.returncode == 0
        assert final["links"][0] | {"site": "b", "frames_taken": 0, "is_open": False} == final["links"][0]
    finally:
        process.kill()
