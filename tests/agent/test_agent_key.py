"""The key of an agent under lost replies and kills: one of the keys in its file always counts, and soon only one."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.agent.service.agent_key import KEY_FILE_NAME, RENEW_S, AgentKey, draw_key
from isthmus.agent.service.sync_client import SyncClient
from isthmus.core.errors import AuthError, ConflictError, FileError, UnavailableError
from isthmus.core.process.state_folder_lock import lock_state_folder

pytestmark = pytest.mark.integration

LOST_BEFORE, LOST_AFTER = "the request is lost", "the reply is lost"


class Keys(SyncClient):
    """A server that accepts keys as the real one does; `faults` are what becomes of its next requests."""

    def __init__(self, first: str) -> None:
        self.valid, self.sent, self.faults = {first: ""}, "", list[str]()

    def use_token(self, token: str) -> None:
        self.sent = token

    def renew_key(self, digest: str) -> None:
        self._answer(lambda own: self.valid.update({digest: own}) if digest not in self.valid else None)

    def check_in(self) -> None:
        """A sync: the key that this one replaces ends."""
        self._answer(lambda own: self.valid.pop(self.valid[own], None))

    def _answer(self, act: object) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        own = hashlib.sha256(self.sent.encode()).hexdigest()
        if fault == LOST_BEFORE:
            raise UnavailableError(fault)
        if own not in self.valid:
            raise AuthError("no valid token")
        act(own)  # type: ignore[operator]
        if fault == LOST_AFTER:
            raise UnavailableError(fault)


def turn(key: AgentKey, server: Keys) -> None:
    """One sync of the agent's loop."""
    try:
        key.renew_if_due(server)
        server.check_in()
        key.confirm()
    except UnavailableError:
        pass


def start(state: Path, server: Keys, now: list[float]) -> AgentKey:
    key = AgentKey.load(state, lambda: now[0])
    assert key is not None
    server.use_token(key.token)
    return key


def test_a_key_is_renewed_after_a_day_and_the_old_one_ends_with_its_first_use(tmp_path: Path) -> None:
    """The file holds the new key alone, readable by its account alone."""
    now = [1000.0]
    server = Keys(draw_key(tmp_path, "north", lambda: now[0]))
    key = start(tmp_path, server, now)
    first = key.token
    turn(key, server)
    assert key.token == first
    now[0] += RENEW_S
    turn(key, server)
    assert key.token != first
    assert len(server.valid) == 1
    text = (tmp_path / KEY_FILE_NAME).read_text()
    assert (first in text, key.token in text) == (False, True)
    assert stat.S_IMODE((tmp_path / KEY_FILE_NAME).stat().st_mode) == 0o600
    assert key.token not in repr(vars(key))


@pytest.mark.attack
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    faults=st.lists(st.sampled_from(("", LOST_BEFORE, LOST_AFTER)), max_size=10),
    kills=st.lists(st.booleans(), min_size=14, max_size=14),
)
def test_no_agent_is_locked_out_by_lost_replies_and_kills(
    tmp_path_factory: pytest.TempPathFactory, faults: list[str], kills: list[bool]
) -> None:
    """Whatever is lost, and whenever the agent is killed between two turns, it goes on; then one key counts."""
    state, now = tmp_path_factory.mktemp("agent"), [1000.0]
    server = Keys(draw_key(state, "north", lambda: now[0]))
    key = start(state, server, now)
    now[0] += RENEW_S
    server.faults = list(faults)
    for killed in kills:
        if killed:
            key = start(state, server, now)
        try:
            turn(key, server)
        except AuthError:  # killed after the first use of the next key: the file has it
            key = start(state, server, now)
            turn(key, server)
        assert len(server.valid) <= 2
    server.faults = []
    for _ in range(2):
        turn(key, server)
    assert list(server.valid) == [hashlib.sha256(key.token.encode()).hexdigest()]
    key.renew_if_due(server)
    server.check_in()


def test_an_ended_key_is_reported_and_a_key_that_is_refused_is_drawn_again(tmp_path: Path) -> None:
    """An operator that revokes the key stops the agent; a clash of keys costs one turn."""
    now = [1000.0]
    server = Keys(draw_key(tmp_path, "north", lambda: now[0]))
    key = start(tmp_path, server, now)
    server.valid.clear()
    with pytest.raises(AuthError):
        turn(key, server)
    now[0] += RENEW_S

    def refuse(_: str) -> None:
        raise ConflictError("this key cannot be used")

    server.renew_key = refuse  # type: ignore[method-assign]
    before = key.token
    key.renew_if_due(server)
    assert key.token == before
    assert '"next":null' in (tmp_path / KEY_FILE_NAME).read_text()


def test_a_folder_has_the_key_of_one_cluster(tmp_path: Path) -> None:
    """It is drawn once; another cluster, a running agent and a damaged file are refused."""
    first = draw_key(tmp_path, "north", lambda: 1.0)
    assert draw_key(tmp_path, "north", lambda: 2.0) == first
    with pytest.raises(ConflictError, match="is that of cluster 'north'"):
        draw_key(tmp_path, "south", lambda: 1.0)
    with lock_state_folder(tmp_path, "agent"), pytest.raises(UnavailableError, match="another agent uses"):
        draw_key(tmp_path, "north", lambda: 1.0)
    (tmp_path / KEY_FILE_NAME).write_text("{")
    with pytest.raises(FileError, match="not the key of an agent"):
        draw_key(tmp_path, "north", lambda: 1.0)
