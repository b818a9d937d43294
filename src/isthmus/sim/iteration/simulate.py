"""`simulate`: simulates training iterations with replicas, shared links and gradient all-reduce."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.errors import InputError, PlanError
from isthmus.core.plan import StageTime, group_by_cluster
from isthmus.schedule import Operation
from isthmus.sim.iteration.all_reduce import GradientExchange, Holder
from isthmus.sim.iteration.fold_replicas import fold_replicas, unfold_replicas
from isthmus.sim.iteration.training import Replica, Training
from isthmus.sim.kernel import Kernel
from isthmus.sim.links.link_queue import Carrier
from isthmus.sim.pipeline import account
from isthmus.sim.pipeline.pipeline_processes import Barrier, Path, Pipeline
from isthmus.sim.pipeline.read_program import Program, read_program
from isthmus.sim.pipeline.run_pipeline import durations, make_carriers
from isthmus.sim.result import LinkRun, StageRun, TrainingRun


def simulate(training: Training, *, fold: bool = True, details: bool = True) -> TrainingRun:
    """Simulate `training` on a virtual clock and return the time and memory of its stages and links.

    `fold` simulates equal replicas once where that is exact (`fold_replicas`); `details` adds spans,
    messages, memory over time and the critical path. The result depends on `training` alone. Raises
    `InputError` for a missing link, `PlanError` for a schedule that deadlocks.
    """
    classes, class_of = fold_replicas(training) if fold else unfold_replicas(training)
    run = _Run(training, classes)
    run.go()
    return run.result(class_of, details)


class _Run:
    """One simulation: kernel, link queues, pipelines and gradient all-reduces."""

    def __init__(self, training: Training, classes: tuple[Replica, ...]) -> None:
        if not classes or training.iterations < 1:
            raise InputError(
                f"{training.iterations} iterations of {len(classes)} replicas", hint="at least 1"
            )
        self.training, self.classes, self.kernel = training, classes, Kernel()
        named = [(f"{a}>{b}", link) for (a, b), link in training.wires.items()]
        self.carriers = make_carriers(self.kernel, named, training.sharing, training.seed)
        schedules = {id(one.schedule): one.schedule for one in classes}
        programs = {key: read_program(schedule) for key, schedule in schedules.items()}
        self.pipelines = [
            self._pipeline(number, one, programs[id(one.schedule)]) for number, one in enumerate(classes)
        ]

    def carrier(self, source: str, target: str) -> Carrier:
        """Return the link queue from one cluster to another; raise `InputError` without a link."""
        if (source, target) not in self.training.wires:
            raise InputError(
                f"no link from {source} to {target}", hint="give one for each direction that is used"
            )
        return self.carriers[f"{source}>{target}"]

    def _pipeline(self, number: int, replica: Replica, program: Program) -> Pipeline:
        loads = replica.stages
        times = [StageTime(forward_s=x.forward_s, backward_s=x.backward_s) for x in loads]
        shares = [x.weight_share for x in loads]
        usual = durations(replica.schedule, times, shares, [x.update_s for x in loads])
        overrides = {(s, one): seconds for s, x in enumerate(loads) for one, seconds in x.overrides}

        def duration_s(stage: int, one: Operation) -> float:
            return overrides.get((stage, one), usual(stage, one)) if overrides else usual(stage, one)

        def path(sender: int, receiver: int) -> Path:
            source, target = loads[sender].cluster, loads[receiver].cluster
            if source == target:
                return None, loads[min(sender, receiver)].hop_s
            return self.carrier(source, target), 0.0

        return Pipeline(
            kernel=self.kernel,
            program=program,
            duration_s=duration_s,
            bytes_of=lambda stage: loads[stage].boundary_bytes,
            path=path,
            transport=self.training.transport,
            weight=replica.count,
            number=number,
        )

    def go(self) -> None:
        """Run to the end; raise `PlanError` on a deadlock."""
        exchanges = []
        if sum(replica.count for replica in self.classes) > 1:
            exchanges = [self._exchange(i) for i in range(self.training.iterations)]
        for number, pipeline in enumerate(self.pipelines):

            def barrier(iteration: int, stage: int, number: int = number) -> Barrier | None:
                return exchanges[iteration].barrier(number, stage) if exchanges else None

            pipeline.start(self.training.iterations, barrier)
        self.kernel.run()
        for number, pipeline in enumerate(self.pipelines):
            if stuck := pipeline.stuck():
                raise PlanError(
                    f"replica {number}, schedule {pipeline.schedule.name} deadlocks: {'; '.join(stuck)}",
                    hint="`check_schedule` reports the cause",
                )

    def _exchange(self, iteration: int) -> GradientExchange:
        steps, groups = self.training.local_steps, (0,) * len(self.classes)
        if steps > 1:
            groups = group_by_cluster([{load.cluster for load in one.stages} for one in self.classes])
        holders = [
            Holder(
                pipeline=pipeline,
                stage=stage,
                cluster=load.cluster,
                layers=load.layers,
                gradient_bytes=load.gradient_bytes,
                local_bytes_per_s=load.local_bytes_per_s,
                count=replica.count,
                averaged_bytes=load.averaged_bytes,
                group=group,
            )
            for pipeline, replica, group in zip(self.pipelines, self.classes, groups, strict=True)
            for stage, load in enumerate(replica.stages)
        ]
        return GradientExchange(self.kernel, holders, self.carrier, flow=-1 - iteration, local_steps=steps)

    def result(self, class_of: tuple[int, ...], details: bool) -> TrainingRun:
        """Return the result, from the logs of the pipelines."""
        end_s = max(float(end.value) for pipeline in self.pipelines for end in pipeline.ends)
        each_s = end_s / self.training.iterations
        by_class = [self._stages(number, each_s, details) for number in range(len(self.classes))]
        stages = [
            replace(stage, replica=given)
            for given, number in enumerate(class_of)
            for stage in by_class[number]
        ]
        run = TrainingRun(
            iteration_s=each_s,
            iterations=self.training.iterations,
            stages=tuple(stages),
            links=self._links(end_s),
            num_events=self.kernel.num_events,
        )
        if not details:
            return run
        first_given = {number: given for given, number in reversed(list(enumerate(class_of)))}
        pipelines = [(given, self.pipelines[number]) for number, given in sorted(first_given.items())]
        names = [[load.cluster for load in replica.stages] for replica in self.classes]
        path = account.critical_path(self.pipelines)
        return replace(
            run,
            spans=tuple(span for given, p in pipelines for span in account.spans_of(p, given)),
            flights=tuple(f for given, p in pipelines for f in account.flights_of(p, given, names[p.number])),
            critical_path=tuple(replace(s, replica=first_given.get(s.replica, s.replica)) for s in path),
        )

    def _stages(self, number: int, each_s: float, details: bool) -> list[StageRun]:
        results, pipeline, iterations = [], self.pipelines[number], self.training.iterations
        bidirectional = len(pipeline.schedule.routes) > 1
        for stage, (load, log) in enumerate(zip(self.classes[number].stages, pipeline.logs, strict=True)):
            busy_s, exposed_s = (seconds / iterations for seconds in account.times_s(log))
            kept = load.activation_bytes / (1 if bidirectional else pipeline.schedule.num_chunks)
            results.append(
                StageRun(
                    replica=number,
                    stage=stage,
                    cluster=load.cluster,
                    busy_s=busy_s,
                    exposed_communication_s=exposed_s,
                    bubble_s=max(0.0, each_s - busy_s - exposed_s),
                    peak_memory_bytes=account.peak_bytes(log, load.static_bytes, kept),
                    memory=account.memory_over_time(log, load.static_bytes, kept) if details else (),
                )
            )
        return results

    def _links(self, end_s: float) -> tuple[LinkRun, ...]:
        results = []
        for (source, target), link in self.training.wires.items():
            sent_bytes = self.carriers[f"{source}>{target}"].carried_bytes
            share = sent_bytes / (link.bytes_per_s * end_s) if end_s else 0.0
            each = sent_bytes / self.training.iterations
            results.append(LinkRun(source=source, target=target, num_bytes=each, utilisation=share))
        return tuple(results)
