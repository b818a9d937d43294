"""`isthmus wan admit`, `tunnels`, `proxy` and `gateway`: answers, refusals, and options that contradict each other."""

from __future__ import annotations

import json
import os
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


TUNNELS = """
topology:
  pipes:
    - {name: p1, from: nanjing, to: hangzhou, capacity_gbps: 10, delay_ms: 4}
    - {name: p2, from: nanjing, to: hangzhou, capacity_gbps: 4, delay_ms: 9}
booked:
  - request: {name: job-1, from: nanjing, to: hangzhou, bandwidth_gbps: 5}
    pipes: [p1]
    rates_gbps: [5]
    delay_ms: 4
    jitter_ms: 0
    loss: 0
requests:
  - {name: edge-1, from: nanjing, to: hangzhou, bandwidth_gbps: 8}
  - {name: edge-2, from: nanjing, to: hangzhou, bandwidth_gbps: 9.5}
"""


def test_tunnels_are_divided_over_what_bookings_leave(tmp_path: Path) -> None:
    """Where no tunnel has a path, one is divided by the bandwidth of its paths; the other one is refused."""
    file = tmp_path / "network.yaml"
    file.write_text(TUNNELS)
    status, text = run("wan", "tunnels", file, "--json")
    answer = json.loads(text)
    assert status == 1
    assert [(one["name"], one["weights"]) for one in answer["tunnels"]] == [("edge-1", {"0": 5.0, "1": 3.0})]
    assert [path["pipes"] for path in answer["tunnels"][0]["paths"]] == [["p1"], ["p2"]]
    assert [(one["name"], one["nearest_gbps"]) for one in answer["refused"]] == [("edge-2", 5.0)]
    file.write_text(TUNNELS.replace("bandwidth_gbps: 9.5", "bandwidth_gbps: 4"))
    status, text = run("wan", "tunnels", file)
    assert status == 1
    assert text.startswith("edge-2: p1, 4 Gbit/s, 4 ms\nedge-1: refused, ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("requests:", "down: [p1]\nrequests:"), "p1, which is down"),
        (("bandwidth_gbps: 5}", "bandwidth_gbps: 5}\n    rate: 5"), "rate"),
        (("rates_gbps: [5]", "rates_gbps: [11]"), "which has less free"),
        (("rates_gbps: [5]", "rates_gbps: [5, 5]"), "2 rates for 1 pipes"),
        (("name: edge-2", "name: edge-1"), "the same name"),
        (
            (
                "requests:",
                "transfers: [{name: t, from: nanjing, to: hangzhou, num_bytes: 1, deadline_s: 9}]\nrequests:",
            ),
            "t is a transfer",
        ),
    ],
)
def test_a_file_whose_tunnels_cannot_be_planned_is_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    """Bookings that do not fit, pipes that are down, transfers: exit status 2, with the name."""
    file = tmp_path / "network.yaml"
    file.write_text(TUNNELS.replace(*change, 1))
    status, text = run("wan", "tunnels", file)
    assert status == 2
    assert message in text


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
WITHOUT_SYS_NICE = """import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(24, 23)  # PR_CAPBSET_DROP, CAP_SYS_NICE
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
os.execv(sys.argv[1], sys.argv[1:])"""


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


def test_real_time_priority_that_is_not_permitted_is_said(key: Path) -> None:
    """Who asks for it does not get a gateway without it; the error names the privilege, not the state's folder."""
    words = [*GATEWAY, "--key", f"b={key}", "--frames", "127.0.0.1:0", "--real-time"]
    command = [sys.executable, "-c", WITHOUT_SYS_NICE, sys.executable, "-m", "isthmus", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 8
    assert "real-time priority: Operation not permitted" in done.stderr
    assert "CAP_SYS_NICE" in done.stderr


def test_a_gateway_states_its_addresses_and_ends_with_its_counts(tmp_path: Path, key: Path) -> None:
    """One JSON object when it listens, on loopback, and one at SIGTERM; it leaves its priority as it is."""
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
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        final = json.loads(rest)
        assert process.returncode == 0
        assert final["links"][0] | {"site": "b", "frames_taken": 0, "is_open": False} == final["links"][0]
    finally:
        process.kill()


BOOKED = """
topology:
  pipes:
    - {name: p1, from: nanjing, to: hangzhou, capacity_gbps: 10, delay_ms: 4}
    - {name: p2, from: nanjing, to: hangzhou, capacity_gbps: 10, delay_ms: 9}
requests:
  - {name: job-1, from: nanjing, to: hangzhou, bandwidth_gbps: 6, flows: [{to_network: 10.2.0.0/16}]}
transfers:
  - {name: data, from: nanjing, to: hangzhou, num_bytes: 1000000000, deadline_s: 60, flows: [{protocol: tcp, to_port: 443}]}
"""  # noqa: E501 - one line of a file


def test_transfers_are_admitted_beside_training_and_moved_with_it_when_a_pipe_fails(tmp_path: Path) -> None:
    """The answer's bookings stand in the next file, which says which pipes are down."""
    file = tmp_path / "network.yaml"
    file.write_text(BOOKED)
    status, text = run("wan", "admit", file, "--json")
    answer = json.loads(text)
    assert status == 0
    assert [one["pipes"] for one in answer["booked"]] == [["p1"]]
    (transfer,) = answer["transfers"]
    assert transfer["end_s"] < 60
    topology = {"pipes": [
        {"name": name, "from": "nanjing", "to": "hangzhou", "capacity_gbps": 10} for name in ("p1", "p2")
    ]}  # fmt: skip
    kept = {key: answer[key] for key in ("booked", "booked_transfers")}
    file.write_text(json.dumps({"topology": topology, "down": ["p1"], **kept}))
    status, text = run("wan", "admit", file, "--json")
    answer = json.loads(text)
    assert (status, answer["refused"]) == (0, [])
    assert "job-1" in answer["moved"]
    assert [one["pipes"] for one in (*answer["booked"], *answer["booked_transfers"])] == [["p2"], ["p2"]]
    file.write_text(json.dumps({"topology": topology, "down": ["p9"]}))
    status, text = run("wan", "admit", file)
    assert (status, "no pipe 'p9'" in text) == (5, True)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rates_gbps", [], "0 rates for 1 pipes"),
        ("rates_gbps", [11.0], "less free"),
        ("pipes", ["p9"], "no pipe 'p9'"),
    ],
)
def test_bookings_that_no_network_has_given_are_refused(
    tmp_path: Path, field: str, value: list[object], message: str
) -> None:
    """Rates left out, beyond a pipe, or on a pipe that is not there, free nothing for others."""
    file = tmp_path / "network.yaml"
    file.write_text(BOOKED)
    _, text = run("wan", "admit", file, "--json")
    booked = json.loads(text)["booked"][0] | {field: value}
    topology = {"pipes": [{"name": "p1", "from": "nanjing", "to": "hangzhou", "capacity_gbps": 10}]}
    file.write_text(json.dumps({"topology": topology, "booked": [booked]}))
    status, text = run("wan", "admit", file)
    assert status != 0
    assert message in text


def test_an_edge_is_shaped_by_what_is_booked(tmp_path: Path) -> None:
    """Without --apply the settings are printed: a class for each booking, and one for all other packets."""
    file, booked = tmp_path / "network.yaml", tmp_path / "booked.json"
    file.write_text(BOOKED)
    booked.write_text(run("wan", "admit", file, "--json")[1])
    status, text = run("wan", "shape", booked, "--node", "nanjing", "--gbps", 20)
    assert status == 0
    assert "1:10 job-1: 6 Gbit/s, 1 filters" in text
    assert "other packets: 9 Gbit/s, up to 20" in text
    status, text = run("wan", "shape", booked, "--node", "nanjing", "--gbps", 20, "--at", 59, "--json")
    assert [one["name"] for one in json.loads(text)["classes"]] == ["all packets", "other packets", "job-1"]
    status, text = run("wan", "shape", booked, "--node", "nanjing", "--gbps", 5)
    assert (status, "has promised 11 Gbit/s" in text) == (2, True)
    status, text = run("wan", "shape", booked, "--node", "nanjing", "--gbps", 20, "--state", tmp_path / "s")
    assert (status, "--state without --apply" in text) == (2, True)


@pytest.mark.attack
@pytest.mark.parametrize(
    "content", ["", "[1]", '{"eth0": {}}', '{"eth1": {"device_kbps": 1, "classes": [], "filters": []}}']
)
def test_a_state_file_of_something_else_changes_no_device(tmp_path: Path, content: str) -> None:
    """Broken, foreign, or of another device: exit status 2, before anything is set."""
    file, booked, state = tmp_path / "network.yaml", tmp_path / "booked.json", tmp_path / "state.json"
    file.write_text(BOOKED)
    booked.write_text(run("wan", "admit", file, "--json")[1])
    state.write_text(content)
    words = ("--node", "nanjing", "--gbps", 20, "--apply", "eth0", "--state", state)
    status, text = run("wan", "shape", booked, *words)
    assert status == 2
    assert str(state.name) in text
