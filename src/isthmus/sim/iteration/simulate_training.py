"""`simulate_training`: simulates training iterations with replicas, shared links and gradient all-reduce."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.errors import InputError, PlanError
from isthmus.sim.iteration.gradient_all_reduce import GradientAllReduce
from isthmus.sim.iteration.layer_segment import gradient_holders
from isthmus.sim.iteration.merge_equal_replicas import expand_replicas, merge_equal_replicas
from isthmus.sim.iteration.replica_bounds import load_durations
from isthmus.sim.iteration.simulated_training import Replica, SimulatedTraining
from isthmus.sim.kernel import Kernel
from isthmus.sim.links.link_queue import LinkQueue
from isthmus.sim.pipeline import log_analysis
from isthmus.sim.pipeline.compile_schedule import CompiledSchedule, compile_schedule
from isthmus.sim.pipeline.pipeline_processes import Barrier, MessagePath, Pipeline
from isthmus.sim.pipeline.run_pipeline import make_link_queues
from isthmus.sim.simulation_result import LinkResult, SimulationResult, StageResult


def simulate_training(
    training: SimulatedTraining, *, merge_replicas: bool = True, details: bool = True
) -> SimulationResult:
    """Simulate `training` on a virtual clock and return the time and memory of its stages and links.

    `merge_replicas` simulates equal replicas once where that is exact (`merge_equal_replicas`); `details` adds spans,
    messages, memory over time and the critical path. The result depends on `training` alone. Raises
    `InputError` for a missing link, `PlanError` for a schedule that deadlocks.
    """
    classes, class_of = merge_equal_replicas(training) if merge_replicas else expand_replicas(training)
    run = _Simulation(training, classes)
    run.run()
    result = run.result(class_of, details)
    run.clear()
    return result


class _Simulation:
    """One simulation: kernel, link queues, pipelines and gradient all-reduces."""

    def __init__(self, training: SimulatedTraining, classes: tuple[Replica, ...]) -> None:
        if not classes or training.iterations < 1:
            raise InputError(f"{training.iterations} iterations of {len(classes)} replicas", hint="at least 1")
        self.training, self.classes, self.kernel = training, classes, Kernel()
        named = [(f"{a}>{b}", link) for (a, b), link in training.links.items()]
        self.link_queues = make_link_queues(self.kernel, named, training.sharing, training.seed)
        schedules = {id(one.schedule): one.schedule for one in classes}
        programs = {key: compile_schedule(schedule) for key, schedule in schedules.items()}
        self.pipelines = [
            self._make_pipeline(number, one, programs[id(one.schedule)]) for number, one in enumerate(classes)
        ]

    def link_queue(self, source: str, target: str) -> LinkQueue:
        """Return the link queue from one cluster to another; raise `InputError` without a link."""
        if (source, target) not in self.training.links:
            raise InputError(f"no link from {source} to {target}", hint="give one for each direction that is used")
        return self.link_queues[f"{source}>{target}"]

    def _make_pipeline(self, number: int, replica: Replica, program: CompiledSchedule) -> Pipeline:
        loads = replica.stages

        def path(sender: int, receiver: int) -> MessagePath:
            source, target = loads[sender].cluster, loads[receiver].cluster
            if source == target:
                return None, loads[min(sender, receiver)].hop_s
            return self.link_queue(source, target), 0.0

        return Pipeline(
            kernel=self.kernel,
            compiled=program,
            duration_s=load_durations(replica),
            boundary_bytes=lambda stage: loads[stage].boundary_bytes,
            path=path,
            transport=self.training.transport,
            weight=replica.count,
            index=number,
        )

    def run(self) -> None:
        """Run to the end; raise `PlanError` on a deadlock."""
        exchanges = []
        if sum(replica.count for replica in self.classes) > 1:
            exchanges = [self._gradient_all_reduce(i) for i in range(self.training.iterations)]
        for number, pipeline in enumerate(self.pipelines):

            def barrier(iteration: int, stage: int, number: int = number) -> Barrier | None:
                return exchanges[iteration].barrier(number, stage) if exchanges else None

            pipeline.start(self.training.iterations, barrier)
        self.kernel.run()
        for number, pipeline in enumerate(self.pipelines):
            if stuck := pipeline.blocked_stages():
                raise PlanError(
                    f"replica {number}, schedule {pipeline.schedule.name} deadlocks: {'; '.join(stuck)}",
                    hint="`check_schedule` reports the cause",
                )

    def clear(self) -> None:
        """Drop the pipelines and their logs, which refer to each other: cycles that only the collector would free."""
        for pipeline in self.pipelines:
            pipeline.logs.clear()
        self.pipelines.clear()

    def _gradient_all_reduce(self, iteration: int) -> GradientAllReduce:
        steps = self.training.local_steps
        return GradientAllReduce(
            self.kernel,
            self.pipelines,
            gradient_holders(self.classes, steps),
            self.link_queue,
            flow=-1 - iteration,
            local_steps=steps,
            strategy=self.training.synchronisation,
        )

    def result(self, class_of: tuple[int, ...], details: bool) -> SimulationResult:
        """Return the result, from the logs of the pipelines."""
        end_s = max(float(end.value) for pipeline in self.pipelines for end in pipeline.ends)
        each_s = end_s / self.training.iterations
        by_class = [self._stage_results(number, each_s, details) for number in range(len(self.classes))]
        stages = [replace(stage, replica=given) for given, number in enumerate(class_of) for stage in by_class[number]]
        run = SimulationResult(
            iteration_s=each_s,
            iterations=self.training.iterations,
            stages=tuple(stages),
            links=self._link_results(end_s),
            num_events=self.kernel.num_events,
        )
        if not details:
            return run
        first_given = {number: given for given, number in reversed(list(enumerate(class_of)))}
        pipelines = [(given, self.pipelines[number]) for number, given in sorted(first_given.items())]
        names = [[load.cluster for load in replica.stages] for replica in self.classes]
        path = log_analysis.critical_path(self.pipelines)
        return replace(
            run,
            spans=tuple(span for given, p in pipelines for span in log_analysis.timeline_spans(p, given)),
            message_traces=tuple(
                f for given, p in pipelines for f in log_analysis.message_traces(p, given, names[p.index])
            ),
            critical_path=tuple(replace(s, replica=first_given.get(s.replica, s.replica)) for s in path),
        )

    def _stage_results(self, number: int, each_s: float, details: bool) -> list[StageResult]:
        results, pipeline, iterations = [], self.pipelines[number], self.training.iterations
        bidirectional = len(pipeline.schedule.routes) > 1
        for stage, (load, log) in enumerate(zip(self.classes[number].stages, pipeline.logs, strict=True)):
            busy_s, exposed_s = (seconds / iterations for seconds in log_analysis.busy_and_exposed_s(log))
            kept = load.activation_bytes / (1 if bidirectional else pipeline.schedule.num_chunks)
            results.append(
                StageResult(
                    replica=number,
                    stage=stage,
                    cluster=load.cluster,
                    busy_s=busy_s,
                    exposed_communication_s=exposed_s,
                    bubble_s=max(0.0, each_s - busy_s - exposed_s),
                    peak_memory_bytes=log_analysis.peak_memory_bytes(log, load.static_bytes, kept),
                    memory_over_time=log_analysis.memory_over_time(log, load.static_bytes, kept) if details else (),
                )
            )
        return results

    def _link_results(self, end_s: float) -> tuple[LinkResult, ...]:
        results = []
        for (source, target), link in self.training.links.items():
            sent_bytes = self.link_queues[f"{source}>{target}"].sent_bytes
            share = sent_bytes / (link.bytes_per_s * end_s) if end_s else 0.0
            each = sent_bytes / self.training.iterations
            results.append(LinkResult(source=source, target=target, num_bytes=each, utilisation=share))
        return tuple(results)
