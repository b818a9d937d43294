"""An owner or a user who asks for much slows no other owner or user."""

from __future__ import annotations

import asyncio
import itertools
import resource
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from isthmus.control.placement import MAX_PLANNED_CLUSTERS, PlanRequest, planned_clusters
from isthmus.control.placement.planned_clusters import MAX_BESIDE_OTHERS
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.control.queries.quotas import Quotas, check_live_jobs
from isthmus.control.rest.body_limit import BodyLimits
from isthmus.control.service.planner_queue import PlannerQueue, make_plan_request
from isthmus.control.state.events import Event, JobDeleted, MakePlans, PlansMade, PoolSet
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import QuotaError
from isthmus.core.job import CheckpointConfig, DataConfig, Job, PlacementConstraints, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Pool
from isthmus.core.views.api_views import JobFilter, Submission
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot, cluster_slots
from isthmus.plan.search.finish.explain_refusals import MAX_EXPLAINED
from isthmus.plan.search.pipelines.candidate_slots import MAX_CANDIDATES, MAX_IN_PIPELINES, candidate_slots
from isthmus.plan.time.calibration import DATA_SHEET
from tests.control.driver import Driver
from tests.control.serving import EAST, POOL, WEST, cluster, report, submission
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack

SMALL_MODEL = Model(
    path="small", architecture="LlamaForCausalLM", num_layers=6, hidden_size=1024, vocab_size=32000,
    config={
        "num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 32000,
    },
)  # fmt: skip


def make_job() -> Job:
    """Return a job that may combine owners."""
    return Job(
        name="job",
        model="small",
        data=DataConfig(paths=("text",)),
        training=TrainingConfig(steps=1, sequence_length=1024, global_batch_size=32),
        checkpoints=CheckpointConfig(folder="checkpoints"),
        output="output",
        placement=PlacementConstraints(several_owners=True),
    )


def make_pool(num_hostile: int, hostile_chip: str = "L40S") -> Pool:
    """Return six linked clusters of three owners, and those of a fourth owner, linked to the first one."""
    honest = [(f"site{i}", f"owner{i % 3}", ("H100", "A100")[i % 2]) for i in range(6)]
    hostile = [(f"flood{i:03}", "hostile", hostile_chip) for i in range(num_hostile)]
    names = [name for name, _, _ in honest]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    pairs += [(names[0], name) for name, _, _ in hostile]
    return Pool.model_validate(
        {
            "clusters": [
                {
                    "name": name,
                    "owner": owner,
                    "node_groups": [{"name": "g", "chip": chip, "nodes": 1, "chips_per_node": 2}],
                }
                for name, owner, chip in honest + hostile
            ],
            "links": [{"between": list(ends), "bandwidth_gbps": 50, "round_trip_ms": 2} for ends in pairs],
        }
    )


def planned(pool: Pool) -> tuple[float, int]:
    """Return the seconds of a step of the best plan, and the number of refusals in the answer."""
    free = {one.name: {group.name: group.num_chips for group in one.node_groups} for one in pool.clusters}
    answer = propose_plans(PlanRequest(job=make_job(), model=SMALL_MODEL, pool=pool, free_chips=free))
    assert answer.plans
    assert answer.plans[0].predicted
    return answer.plans[0].predicted.iteration_s, len(answer.refused)


def test_three_hundred_clusters_of_one_owner_change_no_plan_for_the_worse() -> None:
    """A job is planned as well beside 300 clusters of a hostile owner as without them, with a bounded answer."""
    alone_s, _ = planned(make_pool(0))
    beside_s, num_refused = planned(make_pool(300))
    assert beside_s <= alone_s * (1 + 1e-9)
    assert num_refused <= MAX_EXPLAINED + 2


def slots_of(pool: Pool) -> list[ChipSlot]:
    """Return all slots of a pool."""
    placement = PlacementConstraints(several_owners=True)
    return [slot for one in pool.clusters for slot in cluster_slots(pool, one, placement, None)]


@pytest.mark.parametrize("chip", ["L40S", "H200"])
def test_an_owner_with_many_clusters_takes_no_other_owners_turn(chip: str) -> None:
    """Of 306 slots 24 are combined: all six of the other owners, although the 300 claim to be faster."""
    pool = make_pool(300, chip)

    def no_wait_s(slot: ChipSlot) -> float:
        return 1e18 / (slot.chips * slot.chip.flop_per_s("bf16"))

    found = candidate_slots(slots_of(pool), Routes(pool, DATA_SHEET), no_wait_s, 1e6)
    assert (len(found.combined), len(found.in_pipelines)) == (MAX_CANDIDATES, MAX_IN_PIPELINES)
    for kept in (found.combined, found.in_pipelines):
        assert {slot.cluster for slot in kept if slot.owner != "hostile"} == {f"site{i}" for i in range(6)}


def plan_request(pool: Pool, **placement: Any) -> PlanRequest:
    """Return the request that the planner gets for a job on a pool."""
    job = make_job()
    job = job.model_copy(update={"placement": job.placement.model_copy(update=placement)})
    free = {one.name: {"g": 2} for one in pool.clusters}
    gbps = {f"{one.source}>{one.target}": 1.0 for one in pool.links}
    asked = MakePlans(
        job_id="job", round=1, submission=Submission(job=job, model=SMALL_MODEL), clusters=pool.clusters,
        free_chips=free, free_gbps=gbps,
    )  # fmt: skip
    found = make_plan_request(asked, pool)
    assert found is not None
    return found


@pytest.mark.parametrize("chip", ["L40S", "H200"])
def test_a_planning_request_grows_with_no_owners_clusters(chip: str) -> None:
    """With 60 or 600 clusters of one owner it has 24 of them, all six of others, and what concerns these only."""
    found = [plan_request(make_pool(number, chip)) for number in (60, 600)]
    for one in found:
        names = {cluster.name for cluster in one.pool.clusters}
        assert len(names) == 6 + MAX_BESIDE_OTHERS
        assert {f"site{i}" for i in range(6)} <= names == set(one.free_chips)
        assert {end for link in one.pool.links for end in (link.source, link.target)} <= names
        assert len(one.free_gbps) == len(one.pool.links)
    assert len({len(one.pool.links) for one in found}) == 1


def test_a_planning_request_has_all_clusters_of_few_and_all_that_the_job_names() -> None:
    """58 hostile clusters leave all 64; of 300 named ones, those that the placement admits are planned with."""
    assert len(plan_request(make_pool(58)).pool.clusters) == MAX_PLANNED_CLUSTERS
    wanted = ("flood299", "site5")
    assert {one.name for one in plan_request(make_pool(300), clusters=wanted).pool.clusters} == set(wanted)
    assert len(plan_request(make_pool(300), owners=("hostile",)).pool.clusters) == MAX_PLANNED_CLUSTERS


def test_the_only_cluster_that_may_read_the_data_is_planned_with_however_many_owners_are_faster() -> None:
    """70 owners with faster clusters do not displace the one without which no plan of the job exists."""
    pool = make_pool(71, "H200")
    owned = tuple(
        one.model_copy(update={"owner": f"owner-of-{one.name}"}) if one.owner == "hostile" else one
        for one in pool.clusters
    )
    free = {one.name: {"g": 2} for one in owned}
    slow = min(owned, key=lambda one: (one.node_groups[0].chip != "A100", one.name))
    job = make_job()
    job = job.model_copy(update={"placement": job.placement.model_copy(update={"data_owners": (slow.owner,)})})
    kept = planned_clusters(owned, (), free, job, SMALL_MODEL)
    assert len(kept) == MAX_PLANNED_CLUSTERS
    assert slow in kept


def test_clusters_without_free_chips_take_no_turn() -> None:
    """An owner's clusters without a free chip come after its others, so that they displace none."""
    pool = make_pool(70)
    busy = {"site0", "site3", *(f"flood{i:03}" for i in range(8))}
    free = {one.name: {"g": 0 if one.name in busy else 2} for one in pool.clusters}
    kept = planned_clusters(pool.clusters, pool.links, free, make_job(), SMALL_MODEL)
    assert len(kept) == 6 + MAX_BESIDE_OTHERS
    assert busy & {one.name for one in kept} == {"site0", "site3"}


def test_owners_who_have_as_much_as_all_others_share_all_places() -> None:
    """Of two owners with 50 clusters each has 32; one with 50 beside one with 40 has no fewer than that."""
    for count in (50, 40):
        pool = make_pool(94)
        owned = tuple(
            one.model_copy(update={"owner": "a" if place < count else "b"}) for place, one in enumerate(pool.clusters)
        )
        free = {one.name: {"g": 2} for one in owned}
        kept = planned_clusters(owned[: count + 50], pool.links, free, make_job(), SMALL_MODEL)
        assert Counter(one.owner for one in kept) == {"a": 32, "b": 32}


def test_replicas_over_all_linked_slots_are_tried_however_many_there_are() -> None:
    """Beside the combinations, rings of replicas over more than 24 slots are tried, each linked to the next."""
    names = [f"site{i:02}" for i in range(40)]
    pool = Pool.model_validate(
        {
            "clusters": [
                {
                    "name": name,
                    "owner": "a",
                    "node_groups": [{"name": "g", "chip": "H100", "nodes": 1, "chips_per_node": 2}],
                }
                for name in names
            ],
            "links": [
                {"between": [a, b], "bandwidth_gbps": 50, "round_trip_ms": 2}
                for i, a in enumerate(names[:39])
                for b in names[i + 1 : 39]
            ],
        }
    )
    found = candidate_slots(slots_of(pool), Routes(pool, DATA_SHEET), lambda _: 1.0, 1e6)
    assert [len(ring) for ring in found.wide] == [39, 26]


def test_a_search_that_is_ended_answers_with_the_best_plans_so_far_and_says_so() -> None:
    """The planner's limit of CPU time ends a long search; its plans name that, or a refusal does."""
    pool = make_pool(40)
    free = {one.name: {"g": 2} for one in pool.clusters}
    request = PlanRequest(job=make_job(), model=SMALL_MODEL, pool=pool, free_chips=free)
    asked = itertools.count()
    answer = propose_plans(request, should_continue=lambda: next(asked) < 400)
    assert answer.plans
    assert answer.plans[0].predicted
    assert any("ended at its limit of CPU time" in note for note in answer.plans[0].predicted.assumptions)
    none = propose_plans(request, should_continue=lambda: False)
    assert none.plans == ()
    assert "ended at its limit of CPU time without a plan" in none.refused[-1].reason


class StepPlanner:
    """A planner that lets one search after another through, and records whose they are."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._steps, self._ready = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, request: PlanRequest) -> PlanSet:
        """Record the search, and return once it is let through."""
        self.begun.append(request.job.name)
        self._ready.release()
        assert self._steps.acquire(timeout=10)
        return PlanSet(plans=())

    def step(self, count: int = 1) -> None:
        """Let searches through, each once it has begun."""
        for _ in range(count):
            assert self._ready.acquire(timeout=10)
            self._steps.release()

    def let_through(self, count: int) -> None:
        """Let searches through that have begun."""
        self._steps.release(count)

    def await_begun(self) -> None:
        """Wait until one more search has begun."""
        assert self._ready.acquire(timeout=10)


def asked_by(user: str, number: int, priority: str = "middle") -> MakePlans:
    """Return the planner request of a user's job; the job's name is `USER-NUMBER`."""
    name = f"{user}-{number}"
    wish: Submission = submission(name=name, priority=priority)
    return MakePlans(job_id=name, round=1, submission=wish, user=user, clusters=(EAST,), free_chips={})


def make_queue(planner: Callable[[PlanRequest], PlanSet], answered: list[Event], num_workers: int = 1) -> PlannerQueue:
    """Return a planner queue that collects its answers."""
    return PlannerQueue(planner, None, lambda: 0.0, answered.append, num_workers=num_workers)


def test_three_hundred_requests_of_one_user_hold_up_no_other_users() -> None:
    """1. A user queues 300 requests. 2. Another queues one. 3. It is planned next, after the search that runs."""
    planner, answered = StepPlanner(), list[Event]()
    queue = make_queue(planner, answered)
    for number in range(300):
        queue.enqueue(asked_by("many", number))
    planner.step()
    queue.enqueue(asked_by("few", 0, "low"))
    queue.enqueue(asked_by("few", 1))
    planner.step(3)
    planner.await_begun()
    assert planner.begun.index("few-1") <= 3
    closing = threading.Thread(target=queue.close)
    closing.start()
    planner.let_through(1)
    closing.join(10)
    assert len(answered) <= 5


def test_beside_one_users_search_another_users_begins_at_once() -> None:
    """Of two workers one user has one, however many requests it has queued."""
    planner, answered = StepPlanner(), list[Event]()
    queue = make_queue(planner, answered, num_workers=2)
    for number in range(300):
        queue.enqueue(asked_by("many", number))
    planner.await_begun()
    queue.enqueue(asked_by("few", 0))
    planner.await_begun()
    assert planner.begun == ["many-0", "few-0"]
    closing = threading.Thread(target=queue.close)
    closing.start()
    planner.let_through(2)
    closing.join(10)
    assert {event.job_id for event in answered if isinstance(event, PlansMade)} == {"many-0", "few-0"}


def test_three_hundred_jobs_of_one_user_delay_no_plan_of_another_users() -> None:
    """The coordinator plans `auto` jobs one at a time: the second user's job is next although it came last."""
    pool = Driver("a")
    pool.tell(PoolSet(now_s=1, planner_turns=True))
    for number in range(300):
        pool.submit(f"many-{number}", user="many")
    pool.submit("few", user="few")
    first = pool.coordinator.state.indexes.auto_planning
    assert first == {"many-0"}
    pool.answer("many-0")
    assert pool.coordinator.state.indexes.auto_planning == {"few"}


@contextmanager
def serving(quotas: Quotas, pool: Pool | None = POOL) -> Iterator[Server]:
    """Serve with these quotas."""
    made = Server(quotas, pool)
    made.shell.start()
    with made.http:
        yield made
    made.shell.close()


def test_high_priority_is_refused_without_a_grant() -> None:
    """Neither a submission nor a dry run nor a bulk request may claim it; a granted user and an admin may."""
    urgent = submission(priority="high")
    with serving(Quotas(high_priority_users=frozenset({"bob"}))) as server:
        for site in (EAST, WEST):
            server.sync(report(site))
        for path in ("/v1/jobs", "/v1/jobs:dry-run"):
            refused = server.call("POST", path, urgent)
            assert (refused.status_code, refused.json()["error"]) == (403, "AuthError")
            assert "user 'ann' may not submit jobs of priority 'high'" in refused.json()["message"]
            assert "--high-priority-user" in refused.json()["hint"]
        bulk = {"submissions": [urgent.model_dump(mode="json", by_alias=True)]}
        assert server.call("POST", "/v1/jobs:bulk", bulk).json()[0]["error"]["error"] == "AuthError"
        assert server.call("GET", "/v1/jobs").json() == []
        assert server.submit("bob", priority="high").user == "bob"
        assert server.submit("root", priority="high").user == "root"


def test_priority_high_is_granted_to_a_token_and_withdrawn_at_once() -> None:
    """1. The admin grants it to a token of ann. 2. Its jobs may be high, those of bob not. 3. It is taken back."""
    urgent = submission(priority="high")
    with serving(Quotas()) as server:
        token = next(one["id"] for one in server.call("GET", "/v1/tokens", token="root").json() if one["name"] == "ann")
        path = f"/v1/tokens/{token}/grant"
        assert server.call("POST", "/v1/jobs", urgent).status_code == 403
        for stranger in ("ann", "bob", "owner-east"):
            assert server.call("POST", path, {"high": True}, token=stranger).status_code == 403
        granted = server.call("POST", path, {"high": True}, token="root")
        assert (granted.status_code, granted.json()["high"]) == (200, True)
        assert server.submit("ann", priority="high").user == "ann"
        assert server.call("POST", "/v1/jobs", urgent, token="bob").status_code == 403
        bulk = {"submissions": [urgent.model_dump(mode="json", by_alias=True)]}
        assert server.call("POST", "/v1/jobs:bulk", bulk).json()[0]["id"]
        rotated = server.call("POST", f"/v1/tokens/{token}/rotate", {"grace_s": 60}, token="root").json()
        assert server.submit(rotated["token"], priority="high").user == "ann"
        for one in (token, rotated["id"]):
            assert server.call("POST", f"/v1/tokens/{one}/grant", {"high": False}, token="root").json()["high"] is False
        for holder in ("ann", rotated["token"]):
            refused = server.call("POST", "/v1/jobs", urgent, token=holder)
            assert (refused.status_code, refused.json()["error"]) == (403, "AuthError")
        acts = [one["action"] for one in server.call("GET", "/v1/audit", token="root").json()["records"]]
        assert (acts.count("high-priority-granted"), acts.count("high-priority-withdrawn")) == (1, 2)


def test_a_grant_is_for_tokens_that_submit_jobs() -> None:
    """An owner's or admin's token, and an unknown one, are refused with the reason."""
    with serving(Quotas()) as server:
        for one in server.call("GET", "/v1/tokens", token="root").json():
            status = server.call("POST", f"/v1/tokens/{one['id']}/grant", {"high": True}, token="root").status_code
            assert status == (200 if one["role"] == "user" else 409)
        assert server.call("POST", "/v1/tokens/t-0/grant", {"high": True}, token="root").status_code == 404


def test_a_grant_that_another_server_withdraws_counts_no_more_after_the_next_tick() -> None:
    """Tokens are followed by a version that every change of a grant moves."""
    with serving(Quotas()) as server:
        (token,) = (one for one in server.store.tokens() if one.name == "ann")
        server.store.put_token(token.model_copy(update={"high": True}))
        server.shell.gate.registry.refresh()
        server.submit("ann", priority="high")
        server.store.put_token(token)
        server.shell.gate.registry.refresh()
        assert server.call("POST", "/v1/jobs", submission(priority="high")).status_code == 403


def test_a_user_has_no_more_live_jobs_than_the_quota() -> None:
    """The one too many is refused with 429, alone or in bulk; another user's and an ended job's place are free."""
    with serving(Quotas(live_jobs_per_user=2)) as server:
        first = server.submit("ann")
        body = {"submissions": [submission().model_dump(mode="json", by_alias=True)] * 3}
        results = server.call("POST", "/v1/jobs:bulk", body).json()
        assert [one["error"] and one["error"]["error"] for one in results] == [None, "QuotaError", "QuotaError"]
        refused = server.call("POST", "/v1/jobs", submission())
        assert (refused.status_code, refused.json()["error"]) == (429, "QuotaError")
        assert "user 'ann' has 2 jobs that have not ended, at most 2" in refused.json()["message"]
        assert "--max-jobs-per-user" in refused.json()["hint"]
        server.submit("bob")
        server.call("POST", f"/v1/jobs/{first.id}/cancel")
        server.submit("ann")


def test_a_job_of_15_mb_is_refused_and_kept_nowhere() -> None:
    """The answer is 413 with the size and the limit; the log and the state hold nothing of it."""
    large, above = (
        submission(data={"paths": [f"/data/{number:0200}" for number in range(count)]}) for count in (70_000, 6_000)
    )
    with serving(Quotas()) as server:
        for job, why in ((large, "a job takes at most 1,048,576"), (above, "at most 1,048,576 are accepted")):
            refused = server.call("POST", "/v1/jobs", job)
            assert (refused.status_code, refused.json()["error"]) == (413, "TooLargeError")
            assert why in refused.json()["message"]
            assert "--max-job-kib" in refused.json()["hint"]
        assert server.call("GET", "/v1/jobs").json() == []
        assert not any(event.kind == "job-submitted" for _, event in server.store.events(0))


CHUNK_BYTES = 64 << 10


class Upload:
    """A body of `num_bytes` in chunks, as a client sends it; it counts the bytes that the server takes."""

    def __init__(self, num_bytes: int, body: bytes = b"") -> None:
        self.num_bytes, self.body, self.num_taken, self.answer = num_bytes, body, 0, list[dict[str, Any]]()

    async def receive(self) -> dict[str, Any]:
        chunk = self.body[self.num_taken :][:CHUNK_BYTES] or b"[" * min(CHUNK_BYTES, self.num_bytes - self.num_taken)
        self.num_taken += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": self.num_taken < self.num_bytes}

    async def send(self, message: dict[str, Any]) -> None:
        self.answer.append(message)

    def post(self, server: Server, path: str, *, announced: bool, token: str = "ann") -> int:
        """Send it; return the status of the answer."""
        headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]
        headers += [(b"content-length", str(self.num_bytes).encode())] if announced else []
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
            "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        asyncio.run(server.http.app(scope, self.receive, self.send))  # type: ignore[arg-type]
        return int(self.answer[0]["status"])


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs:dry-run", "/v1/tokens/t-1/rotate", "/v1/jobs/x/preempt"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_given_up_before_it_is_parsed(path: str, *, announced: bool) -> None:
    """An announced length costs no byte; without one the server takes the limit and one chunk, and parses nothing."""
    with serving(Quotas()) as server:
        upload = Upload(15 << 20)
        tracemalloc.start()
        status = upload.post(server, path, announced=announced)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert status == 413
        limit = BodyLimits(Quotas().job_bytes).of(path, "user")
        assert upload.num_taken <= (0 if announced else limit + CHUNK_BYTES)
        assert peak_bytes < 2 * limit + (1 << 20)


def test_an_admin_may_submit_what_exceeds_the_quota() -> None:
    """An admin's submissions are exempt from quotas, up to the largest body of all."""
    large = submission(data={"paths": [f"/data/{number:0200}" for number in range(20_000)]})
    with serving(Quotas()) as server:
        assert server.call("POST", "/v1/jobs", large, token="root").status_code == 201


INVALID = {
    "lists": (lambda: b'{"submissions": [' + b"[]," * (5 << 20) + b"[]]}", 413),
    "fields": (lambda: b"{" + b",".join(b'"f%d":1' % number for number in range(400_000)) + b"}", 413),
    "fields within the count": (lambda: b"{" + b",".join(b'"f%d":1' % number for number in range(290_000)) + b"}", 422),
    "jobs": (lambda: b'{"submissions": [' + b"{}," * 50_000 + b"{}]}", 422),
    "one field of text": (lambda: b'{"submissions": "' + b"[]," * (4 << 20) + b'"}', 422),
    "a text without an end": (lambda: b'{"submissions": "' + b'\\",' * (4 << 20), 422),
}
"""Bodies of a bulk request, each made when it is needed, and the statuses of their answers."""


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_body_costs_no_more_than_its_limit(kind: str) -> None:
    """5 million empty lists, each an error of half a kilobyte, would take 3 GB; they are counted before."""
    make_body, status = INVALID[kind]
    body = make_body()
    with serving(Quotas()) as server:
        upload = Upload(len(body), body)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        assert upload.post(server, "/v1/jobs:bulk", announced=True) == status
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 5 * len(body) + (16 << 20)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 << 10


def test_an_owner_registers_no_more_clusters_than_the_quota() -> None:
    """The one too many cannot join; those that have joined go on, as do other owners and those of the pool file."""
    quotas = Quotas(clusters_per_owner=2)
    with serving(quotas, pool=None) as server:
        for number in range(2):
            server.sync(report(cluster(f"flood{number}", "owner-east")))
        flood = report(cluster("flood2", "owner-east"))
        refused = server.call("POST", "/v1/agents/flood2/sync", flood, token="owner-east")
        assert (refused.status_code, refused.json()["error"]) == (429, "QuotaError")
        assert "owner 'owner-east' has 2 clusters, at most 2 are accepted: 'flood2'" in refused.json()["message"]
        server.sync(report(cluster("flood1", "owner-east")))
        server.sync(report(cluster("other", "owner-west")))
    with serving(Quotas(clusters_per_owner=0)) as server:
        server.sync(report(EAST))


def test_ended_jobs_of_a_user_fill_no_memory() -> None:
    """Large jobs that are submitted and cancelled one after another count until they are deleted."""
    pool = Driver("a")
    pool.submit("j")
    size = pool.coordinator.state.indexes.stored_by_user["u"]
    quotas = Quotas(stored_bytes_per_user=2 * size)
    check_live_jobs(quotas, pool.coordinator.state, "u")
    pool.cancel("j")
    pool.submit("k")
    with pytest.raises(QuotaError, match="the jobs of user"):
        check_live_jobs(quotas, pool.coordinator.state, "u")
    check_live_jobs(quotas, pool.coordinator.state, "other")
    again = restore_state(serialize_state(pool.coordinator.state))
    assert again.indexes.stored_by_user == pool.coordinator.state.indexes.stored_by_user == {"u": 2 * size}
    pool.tell(JobDeleted(now_s=pool.now_s, job_id="j"))
    check_live_jobs(quotas, pool.coordinator.state, "u")
    pool.cancel("k")
    pool.tell(JobDeleted(now_s=pool.now_s, job_id="k"))
    assert pool.coordinator.state.indexes.stored_by_user == {}


def test_a_page_of_large_jobs_parses_a_bounded_part_of_them() -> None:
    """Forty jobs of a megabyte: a list has sixteen at a time, and a filter that none meets goes on as often."""
    pool = Driver("a")
    for number in range(40):
        paths = DataConfig(paths=tuple(f"{number}/{place:0>100}" for place in range(10_000)))
        pool.submit(f"j{number:02d}", data=paths)
    for wanted, num_found in ((JobFilter(), 40), (JobFilter(name="nothing"), 0)):
        found, pages, after = list[str](), 0, None
        while pages == 0 or after is not None:
            page, after = pool.coordinator.find_jobs("u", wanted, after=after, limit=10_000, newest_first=False)
            found += [one.id for one in page]
            pages += 1
        assert (len(found), pages) == (num_found, 3)
