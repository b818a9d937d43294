"""`chrome_trace`: a simulation result as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from typing import Any

from isthmus.sim.simulation_result import SimulationResult

_LINKS_PROCESS = 1_000_000
"""Process id of the links' tracks, above those of the replicas."""


def chrome_trace(run: SimulationResult) -> dict[str, Any]:
    """Return `run`, which must include details, in the JSON form of the Trace Event Format (microseconds).

    A replica is a process and a stage a thread, with its memory as a counter. A link is a thread of the
    process `links`; a message is an asynchronous span from its send to its arrival.
    """
    events: list[dict[str, Any]] = []
    for stage in run.stages:
        name = f"stage {stage.stage} ({stage.cluster})"
        events.append(_metadata_event("thread_name", stage.replica, stage.stage, name))
        if stage.stage == 0:
            events.append(_metadata_event("process_name", stage.replica, 0, f"replica {stage.replica}"))
        events += [
            _event("C", f"memory of stage {stage.stage}", stage.replica, stage.stage, time_s, bytes=num_bytes)
            for time_s, num_bytes in stage.memory_over_time
        ]
    for span in run.spans:
        event = _event("X", span.what, span.replica, span.stage, span.start_s)
        events.append(event | {"cat": span.kind, "dur": (span.end_s - span.start_s) * 1e6})
    events += _link_events(run)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _link_events(run: SimulationResult) -> list[dict[str, Any]]:
    events = [_metadata_event("process_name", _LINKS_PROCESS, 0, "links")]
    places = {(link.source, link.target): place for place, link in enumerate(run.links)}
    for (source, target), place in places.items():
        events.append(_metadata_event("thread_name", _LINKS_PROCESS, place, f"{source} to {target}"))
    for number, flight in enumerate(run.message_traces):
        place = places[flight.source, flight.target]
        for phase, time_s in (("b", flight.sent_s), ("e", flight.arrives_s)):
            event = _event(phase, flight.what, _LINKS_PROCESS, place, time_s, bytes=flight.num_bytes)
            events.append(event | {"cat": "message", "id": number})
    return events


def _event(phase: str, name: str, process: int, thread: int, time_s: float, **args: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": time_s * 1e6, "args": args}


def _metadata_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
