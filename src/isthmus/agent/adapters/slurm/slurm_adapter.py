"""`SlurmAdapter`: cards of a Slurm cluster by its commands.

A hold is an allocation (`salloc --no-shell`) under our own name, with a watcher of its lease inside; a rank is a step
in it (`srun`) that runs `rank_runner`. Starts, stops and ends of workers go through files that agent and nodes share,
so they survive a dead slurmctld.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from isthmus.agent.adapters.local_adapter import CONFINED_START, WORKER_COMMAND, worker_environment
from isthmus.agent.adapters.local_queue_file import LocalQueueFile
from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    CardNode,
    Hold,
    HoldRequest,
    Probe,
    QueueMove,
    RankStart,
    SchedulerAdapter,
    SchedulerCheck,
    SchedulerLook,
    WorkerStatus,
)
from isthmus.agent.adapters.slurm.rank_runner import take_folder
from isthmus.agent.adapters.slurm.slurm_checks import check_slurm
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_holds import (
    JOB_PREFIX,
    KEEP,
    RUNNER,
    HoldFolder,
    allocation_units,
    keeper_environment,
)
from isthmus.agent.adapters.slurm.slurm_output import (
    ENDED_STATES,
    JOB_FIELDS,
    JobRow,
    NodeRow,
    parse_allocation,
    parse_boot_time,
    parse_jobs,
    parse_nodes,
)
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.agent.adapters.worker_limits import TEMPORARY_FOLDER
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import WorkerFolder

_KILLED_STATUS = 137
_NEVER = "0"
"""Owner in the `pid` file of a folder that was stopped before its start."""
_IMMEDIATE_S = 2
_ANSWER_POLL_S = 0.02
_HOLD_ID = re.compile(rf"{JOB_PREFIX}([0-9a-f]{{32}})-(\d+)")
_PREEMPTS = re.compile(r"Preempts: ([\d,]+)")
_STARTS = re.compile(r"to start at (\S+)")


class SlurmAdapter(SchedulerAdapter):
    """Hold cards of a Slurm cluster and run workers on them (see `SchedulerAdapter`).

    The nodes must see the folder `state` and the worker folders under the same paths.
    """

    capabilities = Capabilities(holds="scheduler", probes=True, preempts=True)

    def __init__(
        self, site: SlurmSite, state: Path, commands: SlurmCommands, program: Sequence[str] = WORKER_COMMAND
    ) -> None:
        self._site, self._commands, self._program = site, commands, tuple(program)
        self._holds = state.absolute() / "holds"
        self._queue = LocalQueueFile(state / "queue")
        self._names: dict[tuple[int, str], str] = {}
        self._missing: dict[str, str] = {}
        self._live: dict[str, list[JobRow]] | None = None
        self._children: dict[int, Path] = {}
        self._lock, self._children_lock = threading.RLock(), threading.RLock()

    def observe(self) -> SchedulerLook:
        """Ask for all jobs, the nodes and the run of slurmctld; names are asked of new own jobs only."""
        with self._lock:
            epoch = self._epoch()
            rows, nodes = self._jobs(), self._nodes()
            self._live = self._own(rows)
            own = {row.key for rows_of in self._live.values() for row in rows_of}
            holds = tuple(hold for hold in (self._hold(one) for one in self._known_ids()) if hold is not None)
            foreign = [row for row in rows if row.key not in own and row.state not in ENDED_STATES]
            taken = {card for hold in holds for cards in hold.cards for card in cards}
            return SchedulerLook(
                nodes=tuple(nodes), epoch=epoch, holds=holds, queue=self._queue.entries(),
                foreign=self._site.foreign_jobs(foreign, nodes, taken),
            )  # fmt: skip

    def probe(self, request: HoldRequest) -> Probe:
        """Ask `sbatch --test-only` for the start and the victims of each allocation."""
        starts_s, victims = [0.0], dict[str, None]()
        for group, num_cards, numbers in self._units(request):
            _, said = self._commands.run_fully(
                "sbatch", "--test-only", *self._asks(group, num_cards, len(numbers), preempts=request.preempts),
                "--wrap=true",
            )  # fmt: skip
            found = _STARTS.search(said)
            if found is None:
                raise UnavailableError(f"line 1 of the output of sbatch --test-only cannot be read: {said[:120]!r}")
            starts_s.append((datetime.fromisoformat(found[1]) - datetime.now()).total_seconds())  # noqa: DTZ005
            for listed in _PREEMPTS.findall(said):
                victims |= dict.fromkeys(f"slurm-{job}" for job in listed.split(","))
        return Probe(start_in_s=max(starts_s), victims=tuple(victims))

    def hold(self, request: HoldRequest) -> Hold:
        """Allocate free cards at once or not at all; renew the lease."""
        return self._acquire(request, preempts=False)

    def commit(self, request: HoldRequest) -> Hold:
        """As `hold`; with `preempts` wait for the cards in the partition whose jobs preempt."""
        return self._acquire(request, preempts=request.preempts)

    def release(self, hold_id: str) -> None:
        """Use up the id, then cancel its allocations by name; their watcher does it as well."""
        folder = HoldFolder(self._holds, hold_id)
        folder.release()
        names = ",".join(folder.job_name(number) for number in range(max(1, len(allocation_units(folder.ranks())))))
        self._commands.run("scancel", f"--user={os.geteuid()}", f"--name={names}")

    def start(self, rank: RankStart) -> None:
        """Start a step on the node of the rank's cards (see `SchedulerAdapter.start`)."""
        folder = rank.folder.absolute()
        if (folder / "pid").exists() or self._runs_for(folder):
            return
        known = HoldFolder(self._holds, rank.hold).granted()
        if known is None:
            raise UnavailableError(f"the hold of {folder} is not granted")
        node = rank.cards[0].split("/")[1]
        jobs, hold = known
        job = jobs[next(at for at, unit in enumerate(self._unit_cards(hold)) if rank.cards[0] in unit)]
        program = rank.command or (*self._program, str(folder))
        limits = WorkerFolder(folder).read_limits()
        environment = worker_environment(os.environ, rank.cards, {}, limits)
        if limits is not None:
            program = (*CONFINED_START, str(WorkerFolder(folder).limits_path), *program)
            environment["TMPDIR"] = str(folder / TEMPORARY_FOLDER)
        on_node = sorted(card for cards in hold.cards for card in cards if card.split("/")[1] == node)
        on_node.sort(key=lambda card: int(card.rpartition("/")[2]))
        places = ",".join(str(on_node.index(card)) for card in rank.cards)
        attempt = uuid.uuid4().hex
        (folder / "hold").write_text(rank.hold, encoding="ascii")
        step = (
            "srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--quiet",
            "--input=none", f"--output={_NO_OUTPUT}", "--kill-on-bad-exit=0", "--chdir=/", "--",
            *RUNNER, str(folder), str(self._holds / rank.hold), places, attempt, *program,
        )  # fmt: skip
        self._spawn(folder, _STEP, (str(folder / f"step.{attempt}"), *step), environment | self._slurm_variables())

    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status from the folder's files; a worker without `exit` has ended with its hold or its step."""
        folder = folder.absolute()
        if not (folder / "pid").exists():
            starting = self._runs_for(folder)
            return WorkerStatus(state="running" if starting or (folder / "pid").exists() else "absent")
        status = WorkerFolder(folder).read_exit()
        if status is None and self._has_lost(folder):
            status = WorkerFolder(folder).read_exit()
            status = _KILLED_STATUS if status is None else status
            with contextlib.suppress(OSError):  # on a full disk the next poll derives the same status
                WorkerFolder(folder).write_exit(status)
        return WorkerStatus(state="running") if status is None else WorkerStatus(state="exited", exit_status=status)

    def stop(self, folder: Path, *, force: bool) -> None:
        """Leave the signal where the worker's runner looks for it; a folder without one can no longer start."""
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "pid").exists() and take_folder(str(folder), _NEVER):
            WorkerFolder(folder).write_exit(_KILLED_STATUS)
            return
        if not force and (folder / "stop").exists():
            return
        temporary = folder / f"stop.{os.getpid()}.{threading.get_ident()}"
        temporary.write_text("KILL" if force else "TERM", encoding="ascii")
        temporary.replace(folder / "stop")

    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Order the pool's parts in the agent's own queue; Slurm's is never changed."""
        self._queue.reorder(moves, removed)

    def check(self) -> Sequence[SchedulerCheck]:
        """Return what `isthmus site check` finds."""
        return check_slurm(self._site, self._commands)

    def _acquire(self, request: HoldRequest, *, preempts: bool) -> Hold:
        units = self._units(request)
        folder = HoldFolder(self._holds, request.id)
        with self._lock, folder.locked():
            if folder.is_released:
                return Hold(id=request.id, state="ended")
            folder.renew(request)
            found = self._look_for(folder)
            if found is None and not (preempts and self._runs_for(folder.path)):
                self._ask(folder, units, preempts=preempts)
                found = self._look_for(folder)
            if folder.is_released:  # released while it was asked for
                self.release(request.id)
                return Hold(id=request.id, state="ended")
            return found or Hold(id=request.id, state="waiting", detail="no free cards")

    def _look_for(self, folder: HoldFolder) -> Hold | None:
        """Look once; return the hold if Slurm has all its allocations or is known to have granted them."""
        self._live = self._own(self._jobs())
        return self._hold(folder.id)

    def _hold(self, hold_id: str) -> Hold | None:
        """Return a hold by the newest list of jobs; one that is gone has ended only after two lists of one epoch."""
        folder = HoldFolder(self._holds, hold_id)
        live = {row.key: row for row in (self._live or {}).get(hold_id, []) if row.state not in ENDED_STATES}
        if folder.is_released:
            return None
        known = folder.granted()
        if live:
            self._missing.pop(hold_id, None)
            if known is not None:
                return known[1]
            if all(row.state == "R" for row in live.values()):
                return self._grant(folder, list(live.values()))
            return Hold(id=hold_id, state="waiting", detail="queued at Slurm")
        if known is None:
            return None
        epoch = self._epoch()
        if self._missing.get(hold_id) == epoch:
            folder.release()
            return None
        self._missing[hold_id] = epoch
        return known[1]

    def _grant(self, folder: HoldFolder, rows: list[JobRow]) -> Hold | None:
        """Find out which cards each rank of a running hold has; None unless all its allocations run."""
        ranks = folder.ranks()
        units = allocation_units(ranks)
        rows.sort(key=lambda row: self._number_of(row))
        if [self._number_of(row) for row in rows] != list(range(len(units))):
            return Hold(id=folder.id, state="waiting", detail="not all allocations are there")
        cards: dict[int, tuple[str, ...]] = {}
        for row, (group, num_cards, numbers) in zip(rows, units, strict=True):
            text = self._commands.run("scontrol", "show", "job", "-d", "-o", str(row.id))
            given = parse_allocation(text, self._site.resource(group))
            places = [
                tuple(f"{group}/{node}/{card}" for card in indices[at : at + num_cards])
                for node, indices in given.items()
                for at in range(0, len(indices) - num_cards + 1, num_cards)
            ]
            if len(places) < len(numbers):
                raise UnavailableError(f"Slurm's job {row.id} has too few cards for its ranks: {given}")
            cards |= dict(zip(numbers, places, strict=False))
        folder.grant([row.id for row in rows], tuple(cards[number] for number in range(len(ranks))))
        return Hold(id=folder.id, state="granted", cards=tuple(cards[number] for number in range(len(ranks))))

    def _ask(self, folder: HoldFolder, units: list[tuple[str, int, list[int]]], *, preempts: bool) -> None:
        """Start `salloc` for each allocation; without preemption wait for the answers, and keep all or none."""
        asked = []
        for number, (group, num_cards, numbers) in enumerate(units):
            said = folder.path / f"salloc.{number}"
            said.unlink(missing_ok=True)
            wait = () if preempts else (f"--immediate={_IMMEDIATE_S}",)
            asks = self._asks(group, num_cards, len(numbers), preempts=preempts)
            mark = (f"--comment=isthmus {folder.id}", "--dependency=singleton")
            environment = keeper_environment(self._commands.variables)
            arguments = (str(said), str(folder.path), folder.job_name(number), *wait, *mark, *asks)
            self._spawn(folder.path, KEEP, arguments, environment)
            asked.append(said)
        if preempts:
            return
        texts = [self._answer(said) for said in asked]
        if any("Granted job allocation" not in text for text in texts):
            names = ",".join(folder.job_name(number) for number in range(len(units)))
            self._commands.run("scancel", f"--user={os.geteuid()}", f"--name={names}")
            down = next((text for text in texts if _is_down(text)), None)
            if down is not None:
                raise UnavailableError(f"salloc failed: {' '.join(down.split())[:200]}")

    def _answer(self, said: Path) -> str:
        """Wait for what `salloc` says and return it; empty if it is late."""
        pause, text = threading.Event(), ""
        for _ in range(round(self._commands.timeout_s / _ANSWER_POLL_S)):
            with contextlib.suppress(FileNotFoundError):
                text = said.read_text(errors="replace")
            if text.startswith("status ") or "\nstatus " in text:
                return text
            pause.wait(_ANSWER_POLL_S)
        return ""

    def _asks(self, group: str, num_cards: int, num_ranks: int, *, preempts: bool) -> tuple[str, ...]:
        """Return the options that ask for cards."""
        partition = self._site.preempting_partition if preempts else self._site.partition(group)
        limit = (f"--time={self._site.max_minutes}",) if self._site.max_minutes else ()
        account = (f"--account={self._site.account}",) if self._site.account else ()
        resource = self._site.resource(group).removeprefix("gpu").removeprefix(":")
        cards = f"{resource}:{num_cards}" if resource else str(num_cards)
        return (
            f"--partition={partition}", f"--ntasks={num_ranks}", f"--gpus-per-task={cards}", "--chdir=/", *limit,
            *account,
        )  # fmt: skip

    def _units(self, request: HoldRequest) -> list[tuple[str, int, list[int]]]:
        for rank in request.ranks:
            self._site.partition(rank.node_group)
        if request.preempts and not self._site.preempting_partition:
            raise InputError("site.yaml names no preempting_partition", hint="set options.preempting_partition")
        return allocation_units([(rank.node_group, rank.num_cards) for rank in request.ranks])

    def _unit_cards(self, hold: Hold) -> list[set[str]]:
        """Return the cards of each allocation of a hold."""
        units = allocation_units(HoldFolder(self._holds, hold.id).ranks())
        return [{card for number in numbers for card in hold.cards[number]} for _, _, numbers in units]

    def _epoch(self) -> str:
        return parse_boot_time(self._commands.run("scontrol", "show", "config"))

    def _jobs(self) -> list[JobRow]:
        fields = ",".join(f"{field}:|" for field in JOB_FIELDS)
        return parse_jobs(self._commands.run("squeue", "--noheader", "--all", "--array", "-O", fields))

    def _nodes(self) -> list[CardNode]:
        rows: list[NodeRow] = parse_nodes(self._commands.run("scontrol", "show", "node", "-o"))
        return self._site.card_nodes(rows)

    def _own(self, rows: Sequence[JobRow]) -> dict[str, list[JobRow]]:
        """Return the jobs of this account that are holds, by hold."""
        mine = [row for row in rows if row.uid == os.geteuid()]
        if any(row.key not in self._names for row in mine):
            for line in self._commands.run(
                "squeue", "-h", "-a", "-r", "--me", "-O", "JobID:|,SubmitTime:|,Name:|"
            ).split("\n"):
                job, submitted, name = (*line.split("|"), "", "", "")[:3]
                if job.isdecimal():
                    self._names[int(job), submitted] = name
        keys = {row.key for row in mine}
        self._names = {key: name for key, name in self._names.items() if key in keys}
        found: dict[str, list[JobRow]] = {}
        for row in mine:
            hold = _HOLD_ID.fullmatch(self._names.get(row.key, ""))
            if hold is not None and (self._holds / hold[1]).is_dir():
                found.setdefault(hold[1], []).append(row)
        return found

    def _number_of(self, row: JobRow) -> int:
        found = _HOLD_ID.fullmatch(self._names.get(row.key, ""))
        return int(found[2]) if found is not None else -1

    def _known_ids(self) -> list[str]:
        """Return the ids of the holds that Slurm lists or that were granted and not released."""
        with contextlib.suppress(FileNotFoundError):
            on_disk = [folder.name for folder in self._holds.iterdir() if (folder / "granted.json").exists()]
            return list(dict.fromkeys((*(self._live or {}), *on_disk)))
        return list(self._live or {})

    def _has_lost(self, folder: Path) -> bool:
        """Return whether nothing of the claimed worker can run: its step has ended, or its hold in the last look."""
        with contextlib.suppress(OSError):
            attempt = (folder / "pid").read_text(encoding="ascii").split()[0]
            if attempt == _NEVER or (folder / f"step.{attempt}").exists():
                return True
            hold_id = (folder / "hold").read_text(encoding="ascii")
            ended = HoldFolder(self._holds, hold_id).is_released
            return ended and self._live is not None and hold_id not in self._live
        return False

    def _spawn(self, folder: Path, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a shell script for `folder` in a session of its own, which outlives the agent."""
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        try:
            pid = os.posix_spawnp(
                "sh", ["sh", "-c", script, "isthmus", *arguments], environment, file_actions=null, setsid=True
            )
        except OSError as error:
            raise UnavailableError(f"cannot start a process for {folder}: {error.strerror or error}") from error
        with self._children_lock:
            self._children[pid] = folder

    def _runs_for(self, folder: Path) -> bool:
        """Return whether a script that this adapter started for `folder` still runs; reap those that have ended."""
        with self._children_lock:
            for pid in list(self._children):
                try:
                    ended, _ = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    ended = pid
                if ended:
                    del self._children[pid]
            return folder in self._children.values()

    def _slurm_variables(self) -> dict[str, str]:
        variables = self._commands.variables
        return {"SLURM_CONF": variables["SLURM_CONF"]} if "SLURM_CONF" in variables else {}


_NO_OUTPUT = "none"

_STEP = """
ended=$1; shift
"$@"; echo $? >"$ended.part" && mv -f "$ended.part" "$ended"
"""
"""Runs `srun` and leaves its status in a file of this start: the step has ended, whatever became of `exit`."""


def _is_down(text: str) -> bool:
    """Return whether `salloc` failed because the scheduler did not answer."""
    return "Unable to contact" in text or "Socket timed out" in text or not text.strip()
