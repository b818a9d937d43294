"""`render_metrics`: the metrics as one text, for an admin all, for an owner those of its clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from isthmus.control.queries.monitoring.pool_figures import MAX_LINKS, JobFigures, PoolFigures
from isthmus.control.service.auth import Caller
from isthmus.control.service.metrics.server_metrics import ServerMetrics
from isthmus.core.job_parts.rollout_figures import ROLLOUT_FIGURES
from isthmus.core.text.gauge_text import GaugeText
from isthmus.core.views.api_views import PoolView

CONTENT_TYPE = CONTENT_TYPE_LATEST
_WHERE = ("cluster", "owner")
_GROUP = ("chip", "cluster", "node_group", "owner")
_LINK = ("source", "target")


def render_metrics(
    caller: Caller,
    metrics: ServerMetrics,
    pool: PoolView,
    server_gauges: Mapping[str, tuple[str, float]],
    figures: PoolFigures,
) -> bytes:
    """Return the metrics in Prometheus text format.

    `pool` is already restricted to what the caller may see; `server_gauges` maps the names of further gauges to
    (help text, value).
    """
    gauges = GaugeText()
    if caller.role != "admin":
        _add_clusters(gauges, pool, figures)
        _add_rollouts(gauges, pool, metrics)
        return gauges.encoded()
    states = sorted(metrics.jobs_by_state().items())
    gauges.add_series("isthmus_jobs", "Jobs by state.", ("state",), [((state,), count) for state, count in states])
    for name, (text, value) in server_gauges.items():
        gauges.add(name, text, value)
    _add_clusters(gauges, pool, figures)
    _add_queue(gauges, figures)
    _add_jobs(gauges, figures)
    _add_rollouts(gauges, pool, metrics)
    _add_links(gauges, pool, figures)
    return generate_latest(metrics.registry) + gauges.encoded()


def _add_clusters(gauges: GaugeText, pool: PoolView, figures: PoolFigures) -> None:
    sites = [((view.cluster.name, view.cluster.owner), view) for view in pool.clusters]
    groups = [
        ((group.chip, where[0], group.name, where[1]), group.num_chips, view.free_chips.get(group.name, 0))
        for where, view in sites
        for group in view.cluster.node_groups
    ]
    series = gauges.add_series
    series(
        "isthmus_cluster_connected", "1 while the agent reports.", _WHERE, [(w, view.connected) for w, view in sites]
    )
    reports = [(where, view.last_report_s) for where, view in sites]
    series("isthmus_agent_last_report_timestamp_seconds", "Time of the agent's last report.", _WHERE, reports)
    storage = [(where, view.free_storage_bytes) for where, view in sites]
    series("isthmus_cluster_free_storage_bytes", "Free storage that the agent reports.", _WHERE, storage)
    takes = [(where, view.duty.state == "open") for where, view in sites]
    series("isthmus_cluster_takes_parts", "1 unless the site is cordoned or drained.", _WHERE, takes)
    series("isthmus_chips", "Installed chips.", _GROUP, [(labels, chips) for labels, chips, _ in groups])
    series("isthmus_chips_free", "Chips available to jobs.", _GROUP, [(labels, free) for labels, _, free in groups])
    names = {where[0] for where, _ in sites}
    parts = [(labels, count) for labels, count in sorted(figures.parts.items()) if labels[0] in names]
    series("isthmus_parts", "Parts of jobs at a site by state.", (*_WHERE, "state"), parts)


def _add_queue(gauges: GaugeText, figures: PoolFigures) -> None:
    waiting = [((priority,), count) for priority, count in sorted(figures.waiting.items())]
    gauges.add_series("isthmus_queue_jobs", "Jobs that wait by priority.", ("priority",), waiting)
    text = "Time that the first of the jobs that wait for chips has waited."
    gauges.add("isthmus_queue_oldest_wait_seconds", text, figures.oldest_wait_s)
    text = "Running jobs without series of their own."
    gauges.add("isthmus_jobs_left_out", text, figures.num_jobs_left_out)


def _add_jobs(gauges: GaugeText, figures: PoolFigures) -> None:
    jobs = [((job.id, job.user), job) for job in figures.jobs]
    for name, text, read in _OF_JOB:
        gauges.add_series(name, text, ("job_id", "user"), [(labels, read(job)) for labels, job in jobs])


def _add_rollouts(gauges: GaugeText, pool: PoolView, metrics: ServerMetrics) -> None:
    seen = {view.cluster.name for view in pool.clusters}
    figures = [(labels, found) for labels, found in sorted(metrics.rollout_figures().items()) if labels[1] in seen]
    for name, text in ROLLOUT_FIGURES.items():
        series = [((cluster, job), found[name]) for (job, cluster), found in figures if name in found]
        if series:
            gauges.add_series(f"isthmus_rl_{name}", text, ("cluster", "job_id"), series)


def _add_links(gauges: GaugeText, pool: PoolView, figures: PoolFigures) -> None:
    links = [((link.source, link.target), link) for link in pool.links[:MAX_LINKS]]
    use = [((one.source, one.target), one.reserved_gbps) for one in pool.use[:MAX_LINKS]]
    series, measured = gauges.add_series, sorted(figures.measured_gbps.items())
    capacity = [(ends, link.bandwidth_gbps) for ends, link in links]
    series("isthmus_link_capacity_gbps", "Bandwidth of a link by the operator's file, Gbit/s.", _LINK, capacity)
    series("isthmus_link_reserved_gbps", "Bandwidth of a link that jobs have reserved, Gbit/s.", _LINK, use)
    series("isthmus_link_measured_gbps", "Bandwidth of a link as its sites measured it, Gbit/s.", _LINK, measured)


_OF_JOB: tuple[tuple[str, str, Callable[[JobFigures], float | None]], ...] = (
    ("isthmus_job_steps_done", "Steps that a running job has done.", lambda job: job.steps_done),
    ("isthmus_job_planned_steps", "Steps that a running job is to do.", lambda job: job.steps),
    ("isthmus_job_attempt", "Attempt of a running job, from 1.", lambda job: job.attempt),
    ("isthmus_job_worker_restarts", "Workers of a running job that were replaced.", lambda job: job.worker_restarts),
    ("isthmus_job_step_seconds", "Measured time of a step, smoothed over about five.", lambda job: job.step_s),
    ("isthmus_job_predicted_step_seconds", "Time of a step by the job's plan.", lambda job: job.predicted_step_s),
    (
        "isthmus_job_checkpoint_timestamp_seconds",
        "Time of the last checkpoint or, without one, of the start, as if the job had run since then.",
        lambda job: job.saved_s,
    ),
    (
        "isthmus_job_checkpoint_interval_seconds",
        "Time between two checkpoints by the job's steps.",
        lambda job: job.save_interval_s,
    ),
)
