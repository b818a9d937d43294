"""`SlurmCluster`: a real Slurm cluster on loopback, with its own keys, ports and nodes, as a test fixture.

Debian packages: slurmctld, slurmd, slurm-client, munge. Two clusters are separate trust domains: a client chooses one
with `SLURM_CONF`. Every node is a `slurmd` of its own on this host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.free_ports import free_ports

PROGRAMS = ("slurmctld", "slurmd", "squeue", "salloc", "munged")

_PID_FILE_S = 10.0
"""Time in which a started slurmctld writes its process id."""
_SWEEP_S = 10.0
"""Time for what daemons have left to end."""

_CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/ctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/ctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobcomp.txt
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes={gres}
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,enable_user_top,preempt_youngest_first
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=2
NodeName={name}[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port}-{last_port} CPUs=16 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000 Gres={gres}:{cards} State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PriorityJobFactor=1 \
PreemptMode=REQUEUE GraceTime=2
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PriorityJobFactor=10 PreemptMode=OFF
"""


class SlurmCluster:
    """One cluster `name` with `nodes` nodes of `cards` cards below `root`; `start` before use, `end` after.

    Slurm calls a card `gres`. With a `topology`, a `topology.conf`, it knows its switches.
    """

    def __init__(
        self, name: str, root: Path, nodes: int = 2, cards: int = 4, gres: str = "gpu", topology: str = ""
    ) -> None:
        self.topology = topology
        self.name, self.root, self.num_nodes, self.num_cards, self.gres = name, root, nodes, cards, gres
        self.conf = root / "etc" / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.num_crashes = self.num_kills = 0

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [f"{self.name}{number}" for number in range(1, self.num_nodes + 1)]

    def start(self) -> None:
        """Start munged, slurmctld and a slurmd per node; wait until every node is idle."""
        for folder in ("munge", "etc", "state", "run", "log", "dev", "spool"):
            (self.root / folder).mkdir(parents=True, mode=0o755)
        for node in self.nodes:
            (self.root / "spool" / node).mkdir(mode=0o755)
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + self.num_nodes)
        self.conf.write_text(
            _CONF.format(
                name=self.name, host=host, root=self.root, ctld_port=ports[0], first_port=ports[1], last_port=ports[-1],
                nodes=self.num_nodes, cards=self.num_cards, gres=self.gres,
            )
        )  # fmt: skip
        if self.topology:
            self.conf.write_text(self.conf.read_text() + "TopologyPlugin=topology/tree\n")
            (self.root / "etc" / "topology.conf").write_text(self.topology)
        devices = [self.root / "dev" / f"gpu{number}" for number in range(self.num_cards)]
        for device in devices:
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        (self.root / "etc" / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={self.name}[1-{self.num_nodes}] Name={self.gres} "
            f"File={self.root}/dev/gpu[0-{self.num_cards - 1}]\n"
        )
        munge = self.root / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        self._run(
            "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/sock", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self.start_controller()
        for node in self.nodes:
            self._run("slurmd", "-N", node)
        self.wait_idle()

    def start_controller(self) -> None:
        """Start slurmctld, or start it again after `kill_controller`, from its saved state."""
        self._run("slurmctld")

    def kill_controller(self) -> None:
        """End slurmctld with SIGKILL."""
        deadline_s = time.monotonic() + _PID_FILE_S
        while not self._pid_file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        _kill(self._pid_file, signal.SIGKILL)
        self.num_kills += 1
        self._pid_file.unlink(missing_ok=True)

    def save_state(self) -> None:
        """Have slurmctld save its state, by an orderly restart: killed later, it shows no job again that has ended."""
        self.revive_controller()
        pid = int(self._pid_file.read_text())
        self._pid_file.unlink()
        os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _PID_FILE_S
        while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self.start_controller()
        self.wait_answer()
        self.wait_registered()

    def revive_controller(self) -> None:
        """Start slurmctld again if it has crashed, as systemd does: 22.05 does now and then after a restart."""
        with contextlib.suppress(OSError, ValueError):
            if not psutil.pid_exists(int(self._pid_file.read_text())):
                self._pid_file.unlink()
                self.start_controller()
                self.num_crashes += 1

    @property
    def _pid_file(self) -> Path:
        return self.root / "run" / "ctld.pid"

    def end(self) -> None:
        """Cancel all jobs, then end every daemon."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root", timeout_s=5)
        with contextlib.suppress(AssertionError):
            self.wait_empty(5)
        # slurmctld first: it would start what waits on the cards of what has ended.
        for file in (self.root / "run" / "ctld.pid", *(self.root / "run" / f"{node}.pid" for node in self.nodes)):
            _kill(file, signal.SIGKILL)
        _kill(self.root / "munge" / "pid", signal.SIGTERM)
        deadline_s = time.monotonic() + _SWEEP_S
        while self._kill_steps() and time.monotonic() < deadline_s:  # one that is killed may have started another
            time.sleep(0.05)

    def _kill_steps(self) -> int:
        """Kill what daemons that are gone have left, by its environment; return how much there was."""
        num = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.conf):
                    process.kill()
                    num += 1
        return num

    def run(self, *command: str, timeout_s: float = 20.0) -> str:
        """Return the output of a client command at this cluster."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def wait_idle(self, timeout_s: float = 90.0) -> None:
        """Wait until every node is idle."""
        self._wait(
            lambda: self.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%t").split() == ["idle"] * self.num_nodes,
            timeout_s,
        )

    def wait_answer(self, timeout_s: float = 90.0) -> None:
        """Wait until slurmctld answers."""
        self._wait(lambda: bool(self.run("squeue", "-h", "-o", "%A") or True), timeout_s)

    def wait_registered(self, timeout_s: float = 90.0) -> None:
        """Wait until every node has registered with slurmctld."""
        self._wait(lambda: not set("*~#$@^") & set(self.run("sinfo", "-h", "-N", "-o", "%t")), timeout_s)

    def wait_empty(self, timeout_s: float = 90.0) -> None:
        """Wait until no job is left."""
        self._wait(lambda: not self.live_jobs(), timeout_s)

    def live_jobs(self) -> list[str]:
        """Return the ids of jobs that have or want cards; a killed slurmctld may show ended ones as completing."""
        return self.run("squeue", "-h", "-t", "pending,running,suspended,configuring", "-o", "%A").split()

    def num_held(self) -> int:
        """Return how many allocations of an agent run."""
        return sum(name.startswith("isthmus-") for name in self.run("squeue", "-h", "-t", "R", "-o", "%j").split())

    def _wait(self, holds, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.revive_controller()
            with contextlib.suppress(subprocess.SubprocessError):
                if holds():
                    return
            assert time.monotonic() < deadline_s, f"the nodes of {self.name} are not ready: {self.root}/log"
            time.sleep(0.05)

    def _run(self, *command: str) -> None:
        subprocess.run(
            command, env=self.environment, check=True, timeout=20, capture_output=True, stdin=subprocess.DEVNULL
        )


@contextlib.contextmanager
def slurm_clusters(folder: Path, nodes: int, cards: int, *names: str) -> Iterator[dict[str, SlurmCluster]]:
    """Run clusters of `nodes` nodes with `cards` cards each below `folder`; return them by name."""
    clusters = {name: SlurmCluster(name, folder / name, nodes, cards) for name in names}
    try:
        for cluster in clusters.values():
            cluster.start()
        yield clusters
    finally:
        for cluster in clusters.values():
            cluster.end()


def missing_programs() -> Sequence[str]:
    """Return the programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def _kill(pid_file: Path, number: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(pid_file.read_text()), number)
