"""Rules of the keys of links: who gets which, when, and where they never are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.control.service.access.link_keyring import LinkKeyring
from isthmus.control.state.events import encode_event
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import FileError
from isthmus.core.job import CheckpointConfig, Job
from isthmus.core.messages.agent_messages import AgentOrders, ObservedPart, PartOrder, RunKeys
from isthmus.core.messages.switch_keys import job_number, job_switch_key, read_switch_secret
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Aggregators, Cluster
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

SITES = ("a", "b", "c")
PLAN = Plan(
    id="p",
    stages=tuple(Stage(cluster=site, node_group="x", layers=(number, number + 1)) for number, site in enumerate(SITES)),
    micro_batches=1,
    micro_batch_size=1,
    sequence_length=1,
)


def keys_at(site: str, job: str = "j", attempt: int = 1, store: MemoryStore | None = None) -> dict[str, str]:
    """Return what a server of `store` sends to `site` for a part of the job."""
    order = PartOrder.model_construct(job=job, attempt=attempt, desired="running", plan=PLAN)
    found = LinkKeyring(store or STORE).run_keys(order, site)
    assert found is not None
    return found.keys


STORE = MemoryStore()


def test_each_pair_of_sites_has_a_key_that_no_other_site_has() -> None:
    """Both sites of a pair get one key; three sites have six pairs, each with itself included, and six keys."""
    held = {site: keys_at(site) for site in SITES}
    assert all(held[one][other] == held[other][one] for one in SITES for other in SITES)
    assert all(set(held[site]) == set(SITES) for site in SITES)
    assert len({key for keys in held.values() for key in keys.values()}) == 6
    for outsider, one, other in (("a", "b", "c"), ("b", "a", "c"), ("c", "a", "b")):
        assert held[one][other] not in held[outsider].values()


def test_keys_are_those_of_one_attempt_of_one_job_of_one_store() -> None:
    """Another attempt, job or pool shares no key; another server of the same store derives the same."""
    found = [keys_at("a"), keys_at("a", attempt=2), keys_at("a", job="k"), keys_at("a", store=MemoryStore())]
    assert len({key for keys in found for key in keys.values()}) == 4 * 3
    assert keys_at("a") == found[0]


def test_copies_of_a_job_have_one_key_in_all_attempts() -> None:
    """Every site of a job with an object store gets it; another job or pool has another, a job without a store none."""

    def copy_key(job: str, attempt: int, site: str, store: MemoryStore, copy_store: str | None) -> str | None:
        spec = Job.model_construct(checkpoints=CheckpointConfig(copy_store=copy_store))
        order = PartOrder.model_construct(job=job, attempt=attempt, desired="running", plan=PLAN, spec=spec)
        found = LinkKeyring(store).run_keys(order, site)
        assert found is not None
        assert found.copies is None or found.copies not in repr(found)
        return found.copies

    key = copy_key("j", 1, "a", STORE, "s3://pool/copies")
    assert key is not None
    assert key == copy_key("j", 2, "b", STORE, "s3://pool/copies")
    others = {
        copy_key("k", 1, "a", STORE, "s3://pool/copies"),
        copy_key("j", 1, "a", MemoryStore(), "s3://pool/copies"),
    }
    assert key not in others | set(keys_at("a").values())
    assert copy_key("j", 1, "a", STORE, None) is None


def test_a_site_gets_its_keys_with_the_order_to_run_until_it_runs(server: Server) -> None:
    """1. Parts are prepared: no keys. 2. They are to run: keys, again if the answer was lost. 3. They run: no keys.

    Only agents get them: no event, no page of a user and no representation holds one.
    """
    found = server.prepared()

    def sync(site: Cluster, state: str) -> AgentOrders:
        return server.sync(report(site, ObservedPart(job=found.id, attempt=1, state=state), free_chips={"h20": 1}))

    assert sync(EAST, "prepared").run_keys == ()
    sync(WEST, "prepared")
    (east,), (west,) = (sync(site, "prepared").run_keys for site in (EAST, WEST))
    assert (east.job, east.attempt, set(east.keys)) == (found.id, 1, {"east", "west"})
    assert east.keys["west"] == west.keys["east"]
    assert sync(EAST, "prepared").run_keys == (east,)
    assert sync(EAST, "running").run_keys == ()
    written = [encode_event(event) for _, event in server.store.events()]
    written += [
        server.call("GET", f"/v1/jobs/{found.id}{page}", token="root").text for page in ("", "/plans", "/history")
    ]
    for key in (*east.keys.values(), *west.keys.values()):
        assert not any(key in text for text in written)
        assert key not in repr(east)
        assert key not in str(AgentOrders(run_keys=(east,)))


@pytest.mark.parametrize("key", ["", "00", "g" * 64, "0" * 65])
def test_a_key_has_64_hexadecimal_digits(key: str) -> None:
    """Anything else is refused, and the message does not repeat it where agents log it."""
    with pytest.raises(ValueError, match="string_pattern_mismatch"):
        RunKeys.model_validate_json(json.dumps({"job": "j", "attempt": 1, "keys": {"a": key}}))


def test_a_job_that_sums_by_switches_has_a_key_of_its_own() -> None:
    """It follows from the secret that server and switch share; no secret, no key; it is in no representation."""
    secret, switch = b"s" * 32, Aggregators(kind="switch", addresses=("10.0.0.9:8475",))

    def switch_key(job: str, secret: bytes | None, switches: tuple[Aggregators, ...]) -> str | None:
        order = PartOrder.model_construct(job=job, attempt=1, desired="running", plan=PLAN, switches=switches)
        found = LinkKeyring(STORE, secret).run_keys(order, "a")
        assert found is not None
        assert found.switch is None or found.switch not in repr(found)
        return found.switch

    key = switch_key("j", secret, (switch,))
    assert key == job_switch_key(secret, job_number("j")).hex()
    assert key not in (switch_key("k", secret, (switch,)), switch_key("j", b"t" * 32, (switch,)))
    assert switch_key("j", None, (switch,)) is None
    assert switch_key("j", secret, ()) is None


@pytest.mark.parametrize(("text", "mode", "why"), [
    ("", 0o600, "is not one line"), ("zz" * 32, 0o600, "is not one line"), ("00" * 15, 0o600, "is not one line"),
    ("00" * 32, 0o640, "other accounts may read"), ("00" * 600, 0o600, "larger than"),
])  # fmt: skip
def test_a_bad_file_of_the_secret_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    """No error shows what it has."""
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(FileError, match=why) as raised:
        read_switch_secret(file)
    assert not text or text not in str(raised.value)
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o600)
    assert read_switch_secret(file) == b"\xab" * 32
