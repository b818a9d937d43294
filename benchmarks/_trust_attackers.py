"""Stand-in attackers, one per role: a stranger, a user, an owner, and an agent of another owner.

An attack is a function of the target and a random number generator. It returns what it gained, "" if nothing. The
target is a job of user `ann` that runs at sites `east` and `west`; the attackers hold tokens of user `mallory` and of
the owner of site `north`.
"""

from __future__ import annotations

import json
import socket
import string
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import httpx

from tests.control.serving import cluster, report, submission

NORTH = cluster("north")
SOCKET_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Target:
    """The server at `url`, the running job `job`, its attempt and output folder, and the tokens of the attackers."""

    url: str
    job: str
    attempt: int
    user_token: str
    owner_token: str
    output: str
    refused: Counter[str] = field(default_factory=Counter)
    """Answers that the audit log must name, by the actor that it names."""

    def request(self, token: str, method: str, path: str, body: object = None) -> httpx.Response:
        """Send one request with `token`; "" sends none."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(base_url=self.url, headers=headers, timeout=30) as http:
            answer = http.request(method, path, json=body)
        if answer.status_code in (401, 403) or (answer.status_code == 404 and self.job in path):
            actors = {self.user_token: "mallory", self.owner_token: "owner-north"}
            self.refused[actors.get(token, "")] += 1
        return answer

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server."""
        url = httpx.URL(self.url)
        return url.host, url.port or 80


Attack = Callable[[Target, Random], str]
JOB_READS = ("", "/plans", "/queue", "/metrics", "/logs", "/history")


def _gained(answer: httpx.Response, what: str) -> str:
    return f"{what}: HTTP {answer.status_code} {answer.text[:120]}" if answer.is_success else ""


def _any_route(target: Target, chance: Random) -> tuple[str, str]:
    job = f"/v1/jobs/{target.job}"
    reads = [("GET", job + one) for one in JOB_READS] + [("GET", "/v1/jobs"), ("GET", "/v1/pool"), ("GET", "/metrics")]
    writes = [("POST", job + "/cancel"), ("DELETE", job), ("POST", "/v1/tokens"), ("POST", "/v1/agents/east/sync")]
    return chance.choice(reads + writes)


# A stranger: reaches the server's port and has no token.


def call_without_token(target: Target, chance: Random) -> str:
    """Call any route without a token."""
    method, path = _any_route(target, chance)
    return _gained(target.request("", method, path), f"{method} {path} without a token")


def guess_token(target: Target, chance: Random) -> str:
    """Call any route with a token that differs from a valid one in one character."""
    method, path = _any_route(target, chance)
    place = chance.randrange(len(target.user_token))
    other = chance.choice([one for one in string.ascii_letters if one != target.user_token[place]])
    token = target.user_token[:place] + other + target.user_token[place + 1 :]
    return _gained(target.request(token, method, path), f"{method} {path} with a guessed token")


def send_garbage(target: Target, chance: Random) -> str:
    """Send random bytes, a request without an end, or two lengths, and close."""
    line = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    texts = [
        chance.randbytes(chance.randrange(1, 4096)),
        line + b"X-A: " + b"a" * chance.randrange(1, 200_000),
        line + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        line + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/jobs HTTP/1.1\r\n\r\n",
        line + b"Content-Length: 999999999999\r\n\r\n",
    ]
    answer = b""
    with suppress(OSError), socket.create_connection(target.address, timeout=SOCKET_TIMEOUT_S) as stranger:
        stranger.sendall(chance.choice(texts))
        stranger.shutdown(socket.SHUT_WR)
        while len(answer) < 2**16 and (read := stranger.recv(4096)):
            answer += read
    return f"garbage was answered {answer[:60]!r}" if b" 200 " in answer or b" 201 " in answer else ""


# User mallory: may submit jobs, and owns none of ann's.


def read_foreign_job(target: Target, chance: Random) -> str:
    """Read another user's job, or ask for it by a prefix of its id."""
    job = target.job if chance.random() < 0.7 else target.job[: chance.randrange(4, len(target.job))]
    path = f"/v1/jobs/{job}{chance.choice(JOB_READS)}"
    return _gained(target.request(target.user_token, "GET", path), f"mallory read {path}")


def stop_foreign_job(target: Target, chance: Random) -> str:
    """Cancel, delete, preempt for, or choose a plan of another user's job."""
    job = f"/v1/jobs/{target.job}"
    victim = {"cluster": "east", "job": target.job, "attempt": target.attempt}
    method, path, body = chance.choice(
        [
            ("POST", f"{job}/cancel", None),
            ("DELETE", job, None),
            ("POST", f"{job}/choose", {"plan": "p2"}),
            ("POST", f"{job}/preempt", {"victims": [victim]}),
        ]
    )
    return _gained(target.request(target.user_token, method, path, body), f"mallory: {method} {path}")


def list_foreign_jobs(target: Target, chance: Random) -> str:
    """List jobs with the filters that could show another user's."""
    query = chance.choice(["", "?user=ann", f"?after={target.job}", "?owner=owner-east", "?name=tiny"])
    for path in (f"/v1/jobs{query}", "/v1/queue"):
        answer = target.request(target.user_token, "GET", path)
        if answer.is_success and any(target.job in (one.get("id"), one.get("job")) for one in answer.json()):
            return f"{path} lists ann's job"
    return ""


def claim_high_priority(target: Target, chance: Random) -> str:
    """Submit a job of priority `high`, which would evict others, without a grant."""
    body = submission(key=chance.randbytes(8).hex(), priority="high").model_dump(mode="json", by_alias=True)
    return _gained(target.request(target.user_token, "POST", "/v1/jobs", body), "priority high without a grant")


def act_as_admin(target: Target, chance: Random) -> str:
    """Make a token, read the audit log, declare a site gone, or sync as an agent, with a user's token."""
    body = report(NORTH).model_dump(mode="json", by_alias=True)
    method, path, sent = chance.choice(
        [
            ("POST", "/v1/tokens", {"role": "admin", "name": "mallory"}),
            ("GET", "/v1/audit", None),
            ("POST", "/v1/agents/east/sync", body),
            ("POST", "/v1/agents/north/sync", body),
            ("GET", "/metrics", None),
        ]
    )
    return _gained(target.request(target.user_token, method, path, sent), f"a user: {method} {path}")


def resume_foreign_job(target: Target, chance: Random) -> str:
    """Submit a job that continues another user's, or writes into its folders."""
    folder = f"checkpoints/{target.job}"
    fields: list[dict[str, object]] = [
        {"resume": target.job},
        {"checkpoints": {"folder": folder}},
        {"output": target.output},
    ]
    body = submission(key=chance.randbytes(8).hex()).model_dump(mode="json", by_alias=True)
    body["job"] |= chance.choice(fields)
    return _gained(target.request(target.user_token, "POST", "/v1/jobs", body), f"mallory uses {body['job']}")


def send_huge_body(target: Target, chance: Random) -> str:
    """Submit a job with a huge or deeply nested field."""
    body = submission(key="k").model_dump(mode="json", by_alias=True)
    body["job"]["name"] = chance.choice(["n" * 10**6, "\x1b[2Jtiny", "a\nb", "\u202etxt", "../../x"])
    if chance.random() < 0.5:
        body["model"]["config"] = {"x": "y" * 17 * 2**20}
    return _gained(target.request(target.user_token, "POST", "/v1/jobs", body), "a hostile submission")


def read_foreign_statement(target: Target, chance: Random) -> str:
    """Ask for statements and entries of others, of any month, and for the check of the ledger."""
    party = chance.choice([f"job/{target.job}", "user/ann", "owner/owner-east", "user/root"])
    month = chance.choice(["1970-01", "2026-11", "9999-12", "2999-12", "x", "2026-11%00"])
    path = chance.choice([f"/v1/statements/{party}?month={month}", "/v1/ledger/check"])
    entries = target.request(target.user_token, "GET", "/v1/ledger")
    if not entries.is_success or entries.json()["entries"]:
        return f"mallory sees the ledger: {entries.text[:120]}"
    answer = target.request(target.user_token, "GET", path)
    return (
        f"{path}: HTTP {answer.status_code}" if answer.status_code >= 500 else _gained(answer, f"mallory read {path}")
    )


# The owner of site `north`, and its agent: may report for `north`, which holds no part of the job.


def report_for_foreign_site(target: Target, chance: Random) -> str:
    """Sync for another owner's site, under its name, or under its name with one's own owner."""
    name = chance.choice(["east", "west"])
    site = cluster(name, owner=chance.choice([None, "owner-north"]))
    path = f"/v1/agents/{chance.choice([name, 'north'])}/sync"
    body = report(site).model_dump(mode="json", by_alias=True)
    return _gained(target.request(target.owner_token, "POST", path, body), f"owner-north reported {name}")


def read_as_owner(target: Target, chance: Random) -> str:
    """Read or stop a user's job with an owner's token, or see other owners' clusters."""
    if chance.random() < 0.3:
        seen = target.request(target.owner_token, "GET", "/v1/pool").json()["clusters"]
        foreign = [one["cluster"]["name"] for one in seen if one["cluster"]["owner"] != "owner-north"]
        return f"owner-north sees {foreign}" if foreign else ""
    method, path = chance.choice(
        [("GET", f"/v1/jobs/{target.job}"), ("POST", f"/v1/jobs/{target.job}/cancel"), ("GET", "/v1/jobs")]
    )
    return _gained(target.request(target.owner_token, method, path), f"owner-north: {method} {path}")


def price_foreign_cluster(target: Target, chance: Random) -> str:
    """Publish prices of another owner's cluster or of a link, backwards, without end, or as numbers that cannot be."""
    price = chance.choice([1, "1e999999999", "-0", "9" * 99, 10**400, "NaN"])
    named = chance.choice([
        {"cluster": "east", "node_group": "h20", "per_chip_hour": price},
        {"link": "east>west", "per_gbps_hour": price},
        {"cluster": "north", "node_group": "h20", "per_chip_hour": 1, "from": "9999-12-31T23:59:59-14:00"},
        {"cluster": "north", "node_group": "h20", "per_chip_hour": 1, "from": "0001-01-01T00:00:00+14:00"},
    ])  # fmt: skip
    body = {"currency": "EUR", "prices": [named]}
    answer = target.request(target.owner_token, "POST", "/v1/tariffs", body)
    return f"HTTP {answer.status_code}" if answer.status_code >= 500 else _gained(answer, f"owner-north priced {named}")


def _sync_north(target: Target, **fields: object) -> httpx.Response:
    body = report(NORTH, incarnation="north-1").model_dump(mode="json", by_alias=True) | fields
    return target.request(target.owner_token, "POST", "/v1/agents/north/sync", json.loads(json.dumps(body)))


def report_foreign_part(target: Target, chance: Random) -> str:
    """Report a part of a job that was never placed at this site as failed, released or running."""
    state = chance.choice(["running", "succeeded", "failed", "released"])
    worker = {"rank": chance.randrange(4), "cluster": chance.choice(["east", "north"]), "host": "192.0.2.9", "port": 99}
    part = {"job": target.job, "attempt": target.attempt, "state": state, "fault": None, "workers": [worker]}
    _sync_north(target, parts=[part])
    return ""


def write_foreign_log(target: Target, chance: Random) -> str:
    """Send log text of another site's rank, also at an offset that would hide what follows."""
    offset = chance.choice([0, 1, 2**31, 2**62, 2**63 - 1])
    chunk = {"job": target.job, "attempt": target.attempt, "rank": chance.randrange(2), "offset": offset}
    if _sync_north(target, logs=[chunk | {"text": "FORGED"}]).is_success:
        target.refused["owner-north"] += 1
    return ""


def write_foreign_metrics(target: Target, chance: Random) -> str:
    """Send metrics of another site's rank, also of steps far ahead."""
    step = chance.choice([0, 10**6, 10**12, 2**63 - 1])
    line = {"job": target.job, "attempt": target.attempt, "rank": chance.randrange(2), "step": step}
    if _sync_north(target, metrics=[line | {"values": {"loss": -12345.0}}]).is_success:
        target.refused["owner-north"] += 1
    return ""


def report_extreme_numbers(target: Target, chance: Random) -> str:
    """Report numbers that no site has; the server's state must survive them."""
    number = chance.choice([10**400, 2**64, 1e300, 1.7e308, 5e-324, -1, "1e400"])
    site = cluster("north").model_dump(mode="json", by_alias=True)
    field, place = chance.choice([
        ("storage_bytes", site), ("nodes", site["node_groups"][0]), ("chips_per_node", site["node_groups"][0]),
        ("price_per_chip_hour", site["node_groups"][0]), ("compute_scale", site["node_groups"][0]["virtual"]),
    ])  # fmt: skip
    place[field] = number
    part = {"job": target.job, "attempt": target.attempt, "state": "released", "released_at_s": 0.0}
    answer = _sync_north(target, cluster=site, clock_s=number, parts=[part])
    return f"HTTP {answer.status_code} for {field} {number}" if answer.status_code >= 500 else ""


def send_huge_detail(target: Target, chance: Random) -> str:
    """Report a part with megabytes of detail."""
    detail = "x" * 2**20 * chance.randint(1, 8)
    part = {"job": target.job, "attempt": target.attempt, "state": "failed", "detail": detail}
    _sync_north(target, parts=[part])
    return ""


ATTACKS: dict[str, tuple[Attack, ...]] = {
    "stranger": (call_without_token, guess_token, send_garbage),
    "user": (
        read_foreign_job,
        stop_foreign_job,
        list_foreign_jobs,
        claim_high_priority,
        act_as_admin,
        resume_foreign_job,
        send_huge_body,
        read_foreign_statement,
    ),
    "owner": (report_for_foreign_site, read_as_owner, price_foreign_cluster),
    "agent": (report_foreign_part, write_foreign_log, write_foreign_metrics, send_huge_detail, report_extreme_numbers),
}
