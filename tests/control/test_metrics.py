"""The server's metrics: what Prometheus reads, who may read what, and that they agree with the pool."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from isthmus.control.queries.monitoring.pool_figures import PoolFigures
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.metrics.render_metrics import render_metrics
from isthmus.control.service.metrics.server_metrics import ServerMetrics
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics, WorkerAddress
from isthmus.core.views.api_views import ClusterView, PoolView
from tests.control.serving import EAST, POOL, WEST, plan_across, report
from tests.control.test_server_api import Server

NO_FIGURES = PoolFigures(jobs=(), num_jobs_left_out=0, oldest_wait_s=0.0, waiting={}, parts={}, measured_gbps={})
Samples = dict[tuple[str, ...], float]


def samples(server: Server, token: str = "root") -> Samples:
    """Every sample by its name and the values of its labels, in the order of their names."""
    answer = server.call("GET", "/metrics", token=token)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (one.name, *one.labels.values()): one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    }


def test_jobs_chips_and_agents_are_what_the_pool_says(server: Server) -> None:
    """Jobs by state, chips by cluster, agents' last reports, and who leads."""
    server.prepared()
    server.submit(policy="manual")
    server.until(lambda: samples(server).get(("isthmus_jobs", "choosing")) == 1)
    found = samples(server)
    assert found["isthmus_jobs", "preparing"] == 1
    assert found["isthmus_chips", "H20", "east", "h20", "owner-east"] == 2
    assert found["isthmus_chips_free", "H20", "east", "h20", "owner-east"] == 1
    assert found["isthmus_agent_last_report_timestamp_seconds", "east", "owner-east"] == 1000
    assert found["isthmus_cluster_connected", "west", "owner-west"] == 1
    assert (found[("isthmus_leader",)], found[("isthmus_epoch",)]) == (1, 1)
    assert found["isthmus_events_total", "job-submitted"] == 2
    assert found[("isthmus_append_seconds_count",)] <= found[("isthmus_append_events_sum",)]
    assert found[("isthmus_append_events_sum",)] == found[("isthmus_last_event",)] == len(list(server.store.events()))


def test_the_wait_ends_when_all_ranks_run(server: Server) -> None:
    """From submission to running, once. (Less than a silent site is given, as the server ticks by itself.)"""
    job = server.prepared()
    server.now_s += 4
    for life in ("prepared", "running"):
        for rank, site in enumerate((EAST, WEST)):
            address = WorkerAddress(rank=rank, cluster=site.name, host="127.0.0.1", port=4000 + rank)
            workers = (address,) if life == "running" else ()
            server.sync(report(site, ObservedPart(job=job.id, attempt=1, state=life, workers=workers)))
    found = samples(server)
    assert found[("isthmus_queue_wait_seconds_sum",)] == 4
    assert found[("isthmus_queue_wait_seconds_count",)] == 1


def test_a_deleted_job_is_not_counted_and_a_restart_counts_the_same(server: Server) -> None:
    """The gauge of jobs is the fold of the log; counters begin at 0 with their process."""
    gone, _ = server.submit(), server.submit()
    server.call("POST", f"/v1/jobs/{gone.id}/cancel")
    server.call("DELETE", f"/v1/jobs/{gone.id}")
    counts = server.shell.server_metrics.jobs_by_state()
    assert sum(counts.values()) == 1
    again = ControlService(server.store, POOL, planner=plan_across)
    assert again.server_metrics.jobs_by_state() == counts
    again.close()


def test_an_owner_sees_its_own_clusters_a_user_nothing(server: Server) -> None:
    """What the token may not see is not in the text."""
    server.sync(report(EAST))
    server.sync(report(WEST))
    found = samples(server, "owner-east")
    assert {"east"} < {label for key in found for label in key[1:]} <= {"east", "owner-east", "h20", "H20"}
    assert {name.split("_")[1] for name, *_ in found} == {"cluster", "agent", "chips"}
    assert server.call("GET", "/metrics", token="ann").status_code == 403
    assert server.call("GET", "/metrics", token=None).status_code == 401


def test_figures_of_the_samples_are_those_of_the_newest_step_while_the_job_runs() -> None:
    """By job and cluster; a step that comes late changes nothing, unknown values are dropped, an end removes them."""
    metrics = ServerMetrics()
    metrics.restore_job_states({"j": "running"})

    def line(job: str, step: int, **values: float | None) -> StepMetrics:
        return StepMetrics(job=job, attempt=1, rank=0, step=step, values=values, cluster="east")

    metrics.record_figures([line("j", 3, reward=0.5, other=1.0), line("j", 2, reward=0.1), line("k", 9, reward=0.2)])
    metrics.record_figures([line("j", 3, decode_s=1.5, entropy=None)])
    assert metrics.rollout_figures() == {("j", "east"): {"reward": 0.5, "decode_s": 1.5}}
    pool = PoolView(clusters=(ClusterView(cluster=EAST, connected=True, free_chips={}),), links=())
    text = render_metrics(Caller(role="owner", name="owner-east"), metrics, pool, {}, NO_FIGURES).decode()
    assert 'isthmus_rl_reward{cluster="east",job_id="j"} 0.5' in text
