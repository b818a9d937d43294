"""Parsers of Slurm's output. What cannot be read is an error that names the line, never "no jobs".

Names and comments of jobs are free text in which another user may write line ends and separators, so the list of all
jobs has none of them; only this account's own jobs are asked for their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType

from isthmus.core.errors import UnavailableError

_MAX_SHOWN = 120
_MAX_NODES = 100_000
_STATES = frozenset({
    "PD", "R", "S", "CF", "CG", "CD", "CA", "F", "TO", "NF", "PR", "BF", "DL", "OOM", "RD", "RF", "RH", "RQ", "RS",
    "RV", "SE", "SI", "SO", "ST",
})  # fmt: skip
ENDED_STATES = frozenset({"CD", "CA", "F", "TO", "NF", "PR", "BF", "DL", "OOM"})
"""States in which a job has no cards and gets none again under its id."""

JOB_FIELDS = (
    "JobID", "StateCompact", "UserID", "PriorityLong", "Partition", "SubmitTime", "NumNodes", "NumTasks", "NodeList",
    "Requeue", "tres-per-node", "tres-per-job", "tres-per-task", "EndTime",
)  # fmt: skip
"""Fields of `squeue -O` for every job; none is free text of its user."""


_NO_TIMES = frozenset({"", "N/A", "NONE", "Unknown", "None", "(null)"})


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job in the list of all jobs. Slurm may use an id again: `key` does not repeat."""

    id: int
    state: str
    uid: int
    priority: int
    partition: str
    submitted: str
    num_nodes: int
    num_tasks: int
    nodes: tuple[str, ...]
    requeue: bool
    # What it asked for: per node, per job and per task, such as `gres:gpu:2`.
    asked: tuple[str, str, str]
    # When it ends at the latest if it runs, in seconds since the epoch; None without a limit.
    ends_at_s: float | None = None

    @property
    def key(self) -> tuple[int, str]:
        """The job among all that ever had its id."""
        return self.id, self.submitted

    def num_cards(self, resource: str) -> int:
        """Return how many cards called `resource` the job asked for."""
        per_node, per_job, per_task = (_count(text, resource) for text in self.asked)
        return max(per_job, per_node * self.num_nodes, per_task * self.num_tasks)


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """A node: its partitions, its resources as configured, and whether it gives them out."""

    name: str
    partitions: tuple[str, ...]
    resources: str
    usable: bool

    def num_cards(self, resource: str) -> int:
        """Return how many cards called `resource` it has."""
        return _count(self.resources, resource)

    @property
    def resource_names(self) -> tuple[str, ...]:
        """The names of its resources, with their types: `gpu`, `gpu:h20`."""
        listed = re.sub(r"\([^)]*\)", "", self.resources).split(",")
        return tuple(re.sub(r":\d+[kKmMgGtT]?$", "", one) for one in listed if one)


def parse_jobs(text: str, known: Mapping[str, JobRow] = MappingProxyType({})) -> dict[str, JobRow]:
    """Return by line the jobs of `squeue -h -a -O JOB_FIELDS`, each field ended by `|`.

    Lines of `known`, an earlier answer, are not parsed again.
    """
    rows: dict[str, JobRow] = {}
    for number, line in enumerate(text.splitlines(), 1):
        row = known.get(line)
        if row is None:
            try:
                row = _parse_job(line)
            except ValueError as error:
                raise _unreadable("squeue", number, line) from error
        rows[line] = row
    return rows


def _parse_job(line: str) -> JobRow:
    """Return the job of one line; raise `ValueError` for any other line."""
    fields = line.split("|")
    if len(fields) != len(JOB_FIELDS) + 1 or fields[1] not in _STATES:
        raise ValueError(line)
    return JobRow(
        id=int(fields[0]), state=fields[1], uid=int(fields[2]), priority=int(fields[3]), partition=fields[4],
        submitted=fields[5], num_nodes=_first_number(fields[6]), num_tasks=_first_number(fields[7]),
        nodes=tuple(expand_nodes(fields[8])), requeue=fields[9] == "1",
        asked=(fields[10], fields[11], fields[12]), ends_at_s=_time_s(fields[13]) if fields[1] == "R" else None,
    )  # fmt: skip


def _time_s(text: str) -> float | None:
    """Return a time in this machine's zone, as Slurm prints it, in seconds since the epoch; None for no time."""
    if text in _NO_TIMES:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError(text) from error


def parse_nodes(text: str) -> list[NodeRow]:
    """Return the nodes of `scontrol show node -o`."""
    rows: list[NodeRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, state = re.match(r"NodeName=(\S+) ", line), re.search(r" State=(\S+) ", line)
        partitions, resources = re.search(r" Partitions=(\S*) ", line), re.search(r" Gres=(\S*) ", line)
        if name is None or state is None or resources is None:
            raise _unreadable("scontrol show node", number, line)
        words = set(re.split(r"[+*~#!%$@^-]", state[1]))
        rows.append(
            NodeRow(
                name=name[1],
                partitions=tuple(partitions[1].split(",")) if partitions else (),
                resources=resources[1],
                usable=bool(words & {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"})
                and not words & {"DRAIN", "DOWN", "FAIL", "MAINT", "NOT_RESPONDING", "INVAL"}
                and "*" not in state[1],
            )
        )
    return rows


def parse_allocation(text: str, resource: str) -> dict[str, tuple[int, ...]]:
    """Return the indices of the cards of a job on each node, from `scontrol show job -d -o` of an own job."""
    found: dict[str, tuple[int, ...]] = {}
    for nodes, granted in re.findall(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)", text):
        cards: list[int] = []
        for kind, indices in re.findall(r"(?:^|,)([^:(),]+)(?::[^:()]+)?:\d+\(IDX:([\d,-]+)\)", granted):
            if kind == resource.partition(":")[0]:
                cards += _expand_numbers(indices)
        for node in expand_nodes(nodes):
            found[node] = tuple(cards)
    if not found:
        raise _unreadable("scontrol show job", 1, text)
    return found


def parse_boot_time(text: str) -> str:
    """Return BOOT_TIME of `scontrol show config`: it names the run of slurmctld."""
    found = re.search(r"^BOOT_TIME\s*= (\S+)$", text, re.MULTILINE)
    if found is None:
        raise _unreadable("scontrol show config", 1, text)
    return found[1]


def expand_nodes(text: str) -> Iterator[str]:
    """Yield the names of a node list such as `a[1-3,5],b07`; raise `ValueError` for other text."""
    if text in ("", "(null)", "N/A"):
        return
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text):
        found = re.fullmatch(r"([^\[\],]+)(?:\[([\d,-]+)\])?", part)
        if found is None:
            raise ValueError(f"not a list of nodes: {text}")
        if found[2] is None:
            yield found[1]
            continue
        for span in found[2].split(","):
            first, _, last = span.partition("-")
            if int(last or first) - int(first) > _MAX_NODES:
                raise ValueError(f"too many nodes: {text}")
            for number in range(int(first), int(last or first) + 1):
                yield f"{found[1]}{number:0{len(first)}d}"


def _expand_numbers(text: str) -> list[int]:
    spans = [span.partition("-") for span in text.split(",")]
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def _first_number(text: str) -> int:
    """Return the first number of a field such as `4` or `2-4`."""
    return int(text.partition("-")[0])


@lru_cache(maxsize=4096)
def _count(text: str, resource: str) -> int:
    """Return how many of `resource` (`gpu`, or with its type `gpu:h20`) a list of resources names."""
    total = 0
    for one in re.sub(r"\([^)]*\)", "", text).split(","):
        name = one.removeprefix("gres:").removeprefix("gres/").replace("=", ":")
        if name == resource:
            total += 1
        elif name.startswith(f"{resource}:") and name.rpartition(":")[2].isdigit():
            total += int(name.rpartition(":")[2])
    return total


def _unreadable(command: str, number: int, line: str) -> UnavailableError:
    return UnavailableError(
        f"line {number} of the output of {command} cannot be read: {line[:_MAX_SHOWN]!r}",
        hint="is this a release of Slurm from 20.11 on?",
    )
