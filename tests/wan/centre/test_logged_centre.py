"""A decision centre with a log: what it has promised outlives a kill, what has ended is dropped, damage is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from isthmus.core.errors import FileError, InputError
from isthmus.wan.centre.centre_config import CentreConfig, read_centre_token
from isthmus.wan.centre.centre_requests import AskMessage, LookMessage, NameMessage
from isthmus.wan.centre.logged_centre import LoggedCentre
from isthmus.wan.centre.network_log import LOG_FILE
from isthmus.wan.control.wan_topology import PathRequest, WanTopology

NETWORK = WanTopology.model_validate(
    {
        "pipes": [
            {"name": "short", "from": "a", "to": "b", "capacity_gbps": 1, "delay_ms": 4, "domain": "north"},
            {"name": "long", "from": "a", "to": "b", "capacity_gbps": 1, "delay_ms": 9, "domain": "south"},
        ]
    }
)


def ask(name: str, gbps: float, end_s: float = 1e9) -> AskMessage:
    """Ask for a path from a to b."""
    request = PathRequest.model_validate({"name": name, "from": "a", "to": "b", "bandwidth_gbps": gbps, "end_s": end_s})
    return AskMessage(request=request)


def test_a_restarted_centre_has_promised_what_it_had_promised(tmp_path: Path) -> None:
    """States, paths and what is left of each pipe are those before the kill, after any event."""
    events = [
        (1.0, ask("one", 0.6)), (2.0, NameMessage(kind="confirm", name="one")), (3.0, ask("two", 0.6)),
        (40.0, NameMessage(kind="renew", name="two")), (41.0, ask("three", 0.6)), (50.0, ask("four", 0.3)),
        (51.0, NameMessage(kind="release", name="one")), (52.0, ask("five", 0.6)),
    ]  # fmt: skip
    centre = LoggedCentre(NETWORK, tmp_path / "log")
    for number, (now_s, message) in enumerate(events):
        centre.handle(message, now_s)
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "log", copy)  # as a kill at this moment leaves it
        again = LoggedCentre(NETWORK, copy)
        for name in ("one", "two", "three", "four", "five"):
            assert again.handle(LookMessage(name=name), now_s) == centre.handle(LookMessage(name=name), now_s)
        again.close()
    states = {
        name: centre.handle(LookMessage(name=name), 53.0).state for name in ("one", "two", "three", "four", "five")
    }
    assert states == {"one": "unknown", "two": "held", "three": "unknown", "four": "held", "five": "held"}
    centre.close()


def test_nothing_is_promised_twice(tmp_path: Path) -> None:
    """A path that does not fit is refused with its reason, also after a restart; a repeated request changes nothing."""
    centre = LoggedCentre(NETWORK, tmp_path)
    assert centre.handle(ask("one", 0.8), 1.0).pipes == ("short",)
    assert centre.handle(ask("one", 0.8), 1.5).state == "held"
    assert centre.handle(ask("two", 0.8), 2.0).pipes == ("long",)
    centre.handle(NameMessage(kind="confirm", name="one"), 3.0)
    centre.close()
    again = LoggedCentre(NETWORK, tmp_path)
    refused = again.handle(ask("three", 0.5), 4.0)
    assert refused.state == "refused"
    assert "0.5 Gbit/s free" in refused.reason
    again.close()


def test_what_is_not_confirmed_in_time_is_free_again(tmp_path: Path) -> None:
    """A client that dies while it holds a path loses it after a minute, a booked one stays."""
    centre = LoggedCentre(NETWORK, tmp_path)
    centre.handle(ask("held", 0.9), 1.0)
    centre.handle(ask("booked", 0.9), 1.0)
    assert centre.handle(NameMessage(kind="confirm", name="booked"), 2.0).state == "booked"
    for now_s in range(3, 90):
        centre.advance(float(now_s))
    assert centre.handle(LookMessage(name="held"), 91.0).state == "unknown"
    assert centre.handle(LookMessage(name="booked"), 91.0).state == "booked"
    centre.close()


def test_a_start_drops_the_events_of_paths_that_have_ended(tmp_path: Path) -> None:
    """After a start the log has what live paths need, and gives the same state again."""
    centre = LoggedCentre(NETWORK, tmp_path)
    for number in range(20):
        centre.handle(ask(f"short-{number}", 0.1), number * 2.0)
        centre.handle(NameMessage(kind="release", name=f"short-{number}"), number * 2.0 + 1)
    centre.handle(ask("stays", 0.4), 50.0)
    centre.handle(NameMessage(kind="confirm", name="stays"), 51.0)
    before = centre.handle(LookMessage(name="stays"), 52.0)
    centre.close()
    size = (tmp_path / LOG_FILE).stat().st_size
    for _ in range(2):
        again = LoggedCentre(NETWORK, tmp_path)
        assert again.handle(LookMessage(name="stays"), 53.0) == before
        again.close()
        assert (tmp_path / LOG_FILE).stat().st_size < size / 4


def test_a_damaged_log_is_refused_and_a_cut_line_dropped(tmp_path: Path) -> None:
    """An unfinished last line was never answered; damage before it is named with its line."""
    centre = LoggedCentre(NETWORK, tmp_path)
    centre.handle(ask("one", 0.4), 1.0)
    centre.handle(ask("two", 0.4), 2.0)
    centre.close()
    file = tmp_path / LOG_FILE
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    again = LoggedCentre(NETWORK, tmp_path)
    assert again.handle(LookMessage(name="one"), 3.0).state == "held"
    assert again.handle(LookMessage(name="two"), 3.0).state == "unknown"
    again.close()
    file.write_bytes(b"{}\n" + content)
    with pytest.raises(FileError, match="jsonl:1:"):
        LoggedCentre(NETWORK, tmp_path)


def test_a_port_beyond_loopback_needs_a_token_and_tls(tmp_path: Path) -> None:
    """What would book for strangers, or show the token, is refused before it listens."""
    with pytest.raises(InputError, match="any caller"):
        CentreConfig(listen=("10.0.0.9", 7600))
    with pytest.raises(InputError, match="in the clear"):
        CentreConfig(listen=("10.0.0.9", 7600), token="t" * 64)
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    with pytest.raises(FileError, match="5 characters"):
        read_centre_token(token)
    token.chmod(0o640)
    with pytest.raises(FileError, match="chmod 600"):
        read_centre_token(token)
