"""Numbers that no site and no job has, in every field of a report or a submission: refused, or they change nothing.

A coordinator that raises while it handles an event is rebuilt from its log: who can make it raise stops the pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.placement.plan_request import PlanRequest
from isthmus.control.queries.explain_wait import answer_query, query_queue
from isthmus.control.service.planner_process import answer_request
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.state.events import AgentReported, JobSubmitted, TariffPublished
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import AgentReport
from isthmus.core.plan import Prediction
from isthmus.core.pool import Link, Pool
from isthmus.core.views.api_views import Submission
from tests.attack.fuzzing import places, replaced
from tests.control.driver import RULES, Driver, identity
from tests.control.priced import chip_price, tariff
from tests.control.samples import plan, submission
from tests.control.test_server_api import Server
from tests.plan.hand import model_of

pytestmark = pytest.mark.attack

EXTREMES = (
    0, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**308, 10**400, 5e-324, 1e-300, 1e-30, 1e30, 1e300, 1.7e308,
    "1e400", "1e-400", "9" * 400,
)  # fmt: skip
"""Numbers as JSON spells them, and sizes as a file spells them."""


def numbers(document: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every number of a document."""
    for path in places(document):
        value = document
        for key in path:
            value = value[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path


def report_document() -> dict[str, Any]:
    """A report of site `a`, with every kind of number that one has."""
    return {
        "cluster": {
            "name": "a", "owner": "owner-a", "storage_bytes": 10**13,
            "node_groups": [{
                "name": "g", "chip": "H20", "nodes": 1, "chips_per_node": 4, "chips_per_domain": 4,
                "network_gbps": 400.0, "virtual": {"compute_scale": 1.0, "memory_scale": 1.0},
                "price_per_chip_hour": 1.0, "cpus_per_node": 8.0, "memory_bytes_per_node": 10**12,
            }],
            "aggregators": [
                {"kind": "switch", "count": 1, "network_gbps": 100.0, "slots": 8, "slot_bytes": 256},
                {"kind": "server", "count": 1, "network_gbps": 100.0},
            ],
        },
        "incarnation": "1", "run_lease_s": 60.0, "free_chips": {"g": 3}, "free_storage_bytes": 10**12,
        "identity": json.loads(identity("a").model_dump_json()),
        "parts": [{
            "job": "j", "attempt": 1, "state": "running", "unsaved_s": 1.0, "waiting": "w", "waiting_since_s": 1.0,
            "protection": {"step": 1, "num_bytes": 1}, "released_at_s": 1.0,
            "events": [{"rank": 0, "number": 1, "kind": "stalled", "time_s": 1.0, "step": 1, "seconds": 1.0}],
        }],
        "local_jobs": [
            {"name": "l", "chips": {"g": 1}, "level": "high", "running": True, "unsaved_s": 1.0, "ends_at_s": 300.0},
            {"name": "m", "chips": {"g": 1}, "level": "high", "running": False},
        ],
        "peer_checks": [{"cluster": "b", "number": 1, "reached": True, "round_trip_s": 0.01, "gbps": 1.0}],
        "copies": [{"owner": "u", "version": "0" * 64, "num_bytes": 1}], "fetch_gbps": 1.0, "fence": 0, "clock_s": 9.0,
        "metrics": [{
            "job": "j", "attempt": 1, "rank": 0, "step": 0, "values": {"step_s": 1.0},
            "spans": [{"kind": "forward", "micro_batch": 0, "start_s": 1.0, "end_s": 2.0}],
        }],
        "logs": [{"job": "j", "attempt": 1, "rank": 0, "offset": 0, "text": "x"}],
    }  # fmt: skip


def busy_pool() -> Driver:
    """`j` runs at `a` and `b`, all priced; `a` was away and its part has ended since; `k` of another user waits."""
    pool = Driver("a", "b")
    pool.identities["a"] = identity("a")
    pool.submit("j", plan("a", "b"), steps=100)
    pool.obey()
    pool.obey()
    priced = tariff(chip_price("a", 1), chip_price("b", 1))
    pool.tell(TariffPublished(now_s=pool.now_s, by="root", owner="", tariff=priced))
    pool.submit("k", plan(*["a"] * 4), user="other")
    pool.now_s += RULES.agent_timeout_s + 1
    pool.coordinator.record_report("b", pool.now_s)
    for event in pool.coordinator.due_events(pool.now_s):
        pool.tell(event)
    assert not pool.coordinator.state.clusters["a"].connected
    return pool


def go_on(pool: Driver, tracker: ProgressTracker) -> None:
    """What the server does next for others: events of another site and user, and every view."""
    coordinator = pool.coordinator
    coordinator.orders("a")
    pool.report("b", *(pool.done("b", order) for order in coordinator.orders("b")))
    pool.submit("n", plan("b"), user="other")
    pool.wait(1.0)
    paces = tracker.job_progress()
    for one in answer_query(query_queue(coordinator.state, pool.now_s, paces, None)):
        one.model_dump_json()
    for job in coordinator.state.jobs:
        coordinator.job_view(job).model_dump_json()
    coordinator.pool_view().model_dump_json()
    again = Coordinator(RULES)
    again.state = restore_state(serialize_state(coordinator.state))
    again.pool_view().model_dump_json()


REPORT_PATHS = list(numbers(report_document()))


@pytest.mark.parametrize("path", REPORT_PATHS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("state", ["running", "released"])
def test_no_number_of_a_report_stops_the_pool(path: tuple[Any, ...], state: str) -> None:
    """A site that is back after its absence reports one number that cannot be; the jobs of others go on."""
    document = report_document()
    document["parts"][0]["state"] = state
    for value in EXTREMES:
        try:
            report = AgentReport.model_validate_json(json.dumps(replaced(document, path, value)))
        except ValidationError:
            continue
        pool, tracker = busy_pool(), ProgressTracker()
        tracker.record_metrics(report.metrics)
        try:
            pool.tell(AgentReported.from_report(report, pool.now_s))
        except IsthmusError:
            continue
        pool.coordinator.record_report("a", pool.now_s, report)
        go_on(pool, tracker)


CLUSTER_PATHS = [path for path in REPORT_PATHS if path[0] == "cluster"]


@pytest.mark.parametrize("path", CLUSTER_PATHS, ids=lambda path: ".".join(map(str, path)))
def test_no_number_of_a_cluster_stops_the_planner(path: tuple[Any, ...]) -> None:
    """Jobs are planned beside a cluster whose owner reports what cannot be."""
    document = report_document()
    for value in EXTREMES:
        try:
            mine = AgentReport.model_validate_json(json.dumps(replaced(document, path, value))).cluster
        except ValidationError:
            continue
        asked = json.loads(plan_request(mine))
        reply = answer_request(json.dumps(asked), cpu_s=1.0)
        assert not reply.error, f"{value}: {reply.error}"
        assert reply.plans is not None
        assert reply.plans.plans, f"{value}: no plan"


def plan_request(cluster: Any) -> str:
    """A request for plans of a small job over `cluster` and an honest one."""
    other = cluster.model_validate(report_document()["cluster"] | {"name": "b", "owner": "owner-b"})
    links = tuple(Link(source=one, target=two, bandwidth_gbps=1, delay_ms=1) for one, two in (("a", "b"), ("b", "a")))
    pool = Pool(clusters=(cluster, other), links=links)
    given = submission("job")
    free = {one.name: {group.name: group.num_chips for group in one.node_groups} for one in pool.clusters}
    job = given.job.model_copy(update={"training": given.job.training.model_copy(update={"sequence_length": 16})})
    return PlanRequest(job=job, model=model_of(4, 64), pool=pool, free_chips=free).model_dump_json(by_alias=True)


PREDICTED = Prediction(iteration_s=2.0, tgs_tokens_per_card_s=1.0, samples_per_s=1.0, peak_memory_bytes=(1,))


def _submission_document() -> dict[str, Any]:
    wish = submission("k", steps=100, deadline_s=60.0, placement={"max_chips": 4}, parallel={"tp": 1, "dp": 1})
    return json.loads(wish.model_dump_json(by_alias=True))


SUBMISSION_PATHS = list(numbers(_submission_document()))


@pytest.mark.parametrize("path", SUBMISSION_PATHS, ids=lambda path: ".".join(map(str, path)))
def test_no_number_of_a_job_stops_the_jobs_of_others(path: tuple[Any, ...]) -> None:
    """A user submits a job with one number that cannot be, and it is planned; others see their queue."""
    document = _submission_document()
    for value in EXTREMES:
        try:
            wish = Submission.model_validate_json(json.dumps(replaced(document, path, value)))
        except ValidationError:
            continue
        pool = busy_pool()
        pool.tell(JobSubmitted(now_s=pool.now_s, job_id="x", user="u", submission=wish))
        if "x" in pool.asked:
            pool.answer("x", plan("b").model_copy(update={"predicted": PREDICTED}))
        go_on(pool, ProgressTracker())


def test_a_job_of_endless_steps_hides_no_queue_of_others() -> None:
    """The interface answers another user below 500."""
    server = Server()
    server.shell.start()
    with server.http:
        for steps in (10**12, 10**30, 10**308, 10**400):
            document = _submission_document()
            document["job"]["training"]["steps"] = steps
            server.call("POST", "/v1/jobs", document, token="ann")
            for path in ("/v1/queue", "/v1/jobs", "/v1/pool", "/v1/usage", "/v1/ledger"):
                for token in ("bob", "root"):
                    assert server.call("GET", path, token=token).status_code < 500
    server.shell.close()


CONFIG_NUMBERS = (
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "hidden_size", "vocab_size", "num_hidden_layers", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "sliding_window", "rms_norm_eps", "rope_theta",
)  # fmt: skip


@pytest.mark.parametrize("name", [*CONFIG_NUMBERS, "factor", "original_max_position_embeddings"])
def test_no_number_of_a_models_config_ends_a_request_with_a_server_error(name: str) -> None:
    """Users send the config of their model: the checks of a submission profile it."""
    config = model_of(4, 64).config | {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
    server = Server()
    server.shell.start()
    with server.http:
        for value in (*EXTREMES, "x", None, [1], {"a": 1}, True):
            for architecture in ("LlamaForCausalLM", "MixtralForCausalLM"):
                scaling = {"factor": 2.0, "original_max_position_embeddings": 512, "type": "linear"}
                scaled = config | {"rope_scaling": scaling, "max_position_embeddings": 1024} | {name: value}
                if name in scaling:
                    scaled["rope_scaling"] = scaling | {name: value}
                document = _submission_document()
                document["model"] |= {"config": scaled, "architecture": architecture}
                assert server.call("POST", "/v1/jobs", document, token="ann").status_code < 500, value
                data = json.dumps(document).replace("1.7e+308", "Infinity")
                headers = {"Authorization": "Bearer ann", "Content-Type": "application/json"}
                assert server.http.post("/v1/jobs", content=data, headers=headers).status_code < 500
    server.shell.close()
