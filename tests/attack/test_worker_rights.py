"""Attacks of a worker's process on its site: its account, the agent's token, files of others, other processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.adapters.local_adapter import LocalAdapter, worker_environment
from isthmus.agent.adapters.scheduler_adapter import RankStart
from isthmus.agent.adapters.worker_limits import (
    account_for,
    act_as_user,
    check_rights,
    describe_isolation,
    limits_for,
    write_limits,
)
from isthmus.agent.service.agent_state_folder import AgentStateFolder
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.run_lease import NO_LIMIT_S, RunLease, write_run_lease
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits, WorkerSpec, open_regular
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.process.boot_clock import boot_id
from isthmus.core.process.confined_start import MIN_LANDLOCK_ABI, landlock_abi
from isthmus.core.rights.storage_rules import AllowedRoot, AllowedStorage
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.site import SitePart
from tests.agent.test_local import until
from tests.site.samples import EAST, JOB
from tests.train.worker_jobs import make_job, whole

pytestmark = pytest.mark.attack

needs_landlock = pytest.mark.skipif(landlock_abi() < MIN_LANDLOCK_ABI, reason="this kernel has no Landlock")
PYTHON = shutil.which("python3", path="/usr/bin:/bin")
needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or PYTHON is None, reason="needs root, and a python3 that all accounts may run"
    ),
]

PROBE = """
import json, os, resource, stat, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def attempt(what):
    try:
        return eval(what)
    except OSError as error:
        return type(error).__name__
found = {
    "uids": status["Uid"].split(), "gids": status["Gid"].split(), "groups": status["Groups"].split(),
    "no_new_privs": status["NoNewPrivs"].strip(), "umask": status["Umask"].strip(),
    "core": resource.getrlimit(resource.RLIMIT_CORE), "environment": dict(os.environ),
    "session": os.getsid(0), "wrapper": os.getppid(),
    "files": sorted(os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{n}")),
    "attempts": {name: attempt(what) for name, what in json.loads(sys.argv[1]).items()},
}
with open(os.path.join(sys.argv[2], "found.json.new"), "w") as stream:
    json.dump(found, stream)
os.rename(stream.name, os.path.join(sys.argv[2], "found.json"))
"""
"""Writes what a worker is and what it can do to its folder; it runs what the test names, as foreign code would."""


def part_folder(state: Path) -> Path:
    """The folder of a worker as the agent makes it."""
    folder = AgentStateFolder(state).worker_folder(SitePart(job="b-1", attempt=1), 0)
    folder.mkdir(parents=True)
    return folder


def probe(folder: Path, attempts: dict[str, str], python: str = sys.executable, status: int = 0) -> dict[str, Any]:
    """Run the probe as the worker of `folder` through the local adapter."""
    adapter = LocalAdapter(EAST, folder.parent / "queue")
    command = (python, "-S", "-c", PROBE, json.dumps(attempts), str(folder))
    adapter.start(RankStart(folder=folder, cards=("h20/0/0",), command=command))
    until(lambda: adapter.poll(folder).state == "exited", 30)
    seen = adapter.poll(folder)
    log = (folder / "log").read_text()
    assert seen.exit_status == status, log
    found: dict[str, Any] = json.loads((folder / "found.json").read_bytes()) if status == 0 else {"log": log}
    return found


@pytest.mark.slow
def test_a_worker_has_no_more_than_it_needs(tmp_path: Path) -> None:
    """No new privileges, no core dumps, umask 077, a session of its own, no open file, and a usual environment."""
    secret = tmp_path / "secret"
    secret.write_text("token")
    folder = part_folder(tmp_path / "state")
    write_limits(WorkerFolder(folder), WorkerLimits())
    held = os.open(secret, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        found = probe(folder, {})
    finally:
        os.close(held)
    assert (found["no_new_privs"], found["core"], found["umask"]) == ("1", [0, 0], "0077")
    assert found["session"] != os.getsid(0)
    assert str(secret) not in found["files"]
    assert found["environment"]["TMPDIR"] == str(folder / "tmp")
    assert stat_mode(folder / "found.json") == 0o600


def test_the_environment_is_a_list_of_what_is_allowed() -> None:
    """Whatever an agent's environment holds, a worker gets the usual variables and those that the owner names."""
    agents = {
        "PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "ISTHMUS_CARDS": "x", "TOKENIZERS_PARALLELISM": "false",
        "ISTHMUS_TOKEN": "t", "ISTHMUS_TOKEN_FILE": "t", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "t",
        "PGPASSWORD": "t", "PYTHON_KEYRING_PASSWORD": "t", "SSH_AUTH_SOCK": "t", "KUBECONFIG": "t", "ANYTHING": "t",
        "HTTPS_PROXY": "t",
    }  # fmt: skip
    usual = {"PATH", "LC_ALL", "NCCL_DEBUG", "ISTHMUS_CARDS", "TOKENIZERS_PARALLELISM"}
    threads = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert worker_environment(agents, [], {}, WorkerLimits()).keys() == usual | threads
    named = WorkerLimits(environment=("AWS_SECRET_ACCESS_KEY",))
    assert worker_environment(agents, [], {}, named).keys() == usual | threads | {"AWS_SECRET_ACCESS_KEY"}


@needs_landlock
@pytest.mark.slow
def test_the_kernel_holds_a_worker_to_its_roots(tmp_path: Path) -> None:
    """A worker that runs foreign code reads and writes in its roots and its folder; links lead nowhere else.

    It sees neither the agent's token nor its state, nor the environment of a process outside, and ends none.
    """
    mine, hers, shared, state = (tmp_path / name for name in ("bob", "alice", "models", "state"))
    for place in (mine, hers, shared):
        place.mkdir()
        (place / "file").write_text(place.name)
    (mine / "link").symlink_to(hers)
    folder = part_folder(state)
    token = state / "token"
    token.write_text("token")
    roots = (AllowedRoot(path=str(mine), access="write"), AllowedRoot(path=str(shared), access="read"))
    limits = limits_for(folder, WorkerRights(), "bob", AllowedStorage(user="bob", roots=roots), protected=[state])
    write_limits(WorkerFolder(folder), limits)
    outside = subprocess.Popen(["sleep", "60"], env={"ISTHMUS_TOKEN": "token"})
    try:
        found = probe(folder, {
            "own": f"open('{mine}/file').read()",
            "own new": f"os.rename(open('{mine}/new', 'w').name, '{mine}/renamed')",
            "shared": f"open('{shared}/file').read()",
            "shared write": f"open('{shared}/new', 'w')",
            "hers": f"open('{hers}/file').read()",
            "hers by link": f"open('{mine}/link/file').read()",
            "hers by a new link": f"(os.symlink('{hers}', '{mine}/later'), open('{mine}/later/file').read())",
            "hers listed": f"os.listdir('{hers}')",
            "hers removed": f"os.unlink('{hers}/file')",
            "hers linked": f"os.link('{hers}/file', '{mine}/hard')",
            "truncated": f"os.truncate('{hers}/file', 0)",
            "token": f"open('{token}').read()",
            "state": f"os.listdir('{state}')",
            "environment": f"open('/proc/{outside.pid}/environ').read()",
            "signal": f"os.kill({outside.pid}, 9)",
            "shared memory": "os.unlink(open(f'/dev/shm/isthmus-probe-{os.getpid()}', 'w').name)",
            "home": "open(os.path.expanduser('~/x'), 'w')",
        })["attempts"]  # fmt: skip
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()
    assert found.pop("hers linked") == "OSError", "a hard link across roots is one between devices to the kernel"
    may = {"own": "bob", "own new": None, "shared": "models", "shared memory": None}
    assert {name: seen for name, seen in found.items() if name in may} == may
    assert {name: seen for name, seen in found.items() if seen != "PermissionError" and name not in may} == {}
    assert (hers / "file").read_text() == "alice"


@needs_landlock
@pytest.mark.slow
def test_a_job_trains_within_its_limits(tmp_path: Path) -> None:
    """The limits leave a real worker all that it needs: it trains, saves a checkpoint and writes the model."""
    mine = tmp_path / "bob"
    job, state = make_job(mine, steps=2), tmp_path / "state"
    folder, site = part_folder(state), AgentStateFolder(state)
    site.make_lease_folder()
    storage = AllowedStorage(user="bob", roots=(AllowedRoot(path=str(mine), access="write"),))
    spec = WorkerSpec(run="b-1", attempt=1, rank=0, user="bob", storage=storage, job=job, plan=whole(job))
    spec = spec.model_copy(update={"run_lease": str(site.run_lease)})
    worker = WorkerFolder(folder)
    worker.write_spec(spec)
    limits = limits_for(
        folder, WorkerRights(), "bob", storage, protected=[state], also_read=[site.run_lease.parent]
    )  # fmt: skip
    write_limits(worker, limits)
    adapter = LocalAdapter(EAST, state / "queue")
    write_run_lease(site.run_lease, RunLease(boot=boot_id(), lease_s=60, until_s=NO_LIMIT_S))
    adapter.start(RankStart(folder=folder, cards=("h20/0/0",)))

    def has_ended() -> bool:
        """Renew the lease as an agent does, and hand the worker its rank map once it has checked in."""
        write_run_lease(site.run_lease, RunLease(boot=boot_id(), lease_s=60, until_s=NO_LIMIT_S))
        address = worker.read_checkin()
        if address is not None and worker.read_rank_map() is None:
            worker.write_rank_map(RankMap(workers=(address,)))
        return adapter.poll(folder).state == "exited"

    until(has_ended, 240)
    assert adapter.poll(folder).exit_status == 0, (folder / "log").read_text()
    assert (Path(job.output) / "config.json").is_file()
    assert (Path(job.checkpoints.folder) / "step-00000002").is_dir()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account may enter; pytest's own are private."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.slow
class TestOtherAccount:
    """Workers of an agent that runs as root."""

    pytestmark = needs_root

    def test_a_worker_runs_as_the_account_of_its_user(self, open_folder: Path) -> None:
        """For good, with its groups only. It reads no token, and replaces no file of the agent in its folder."""
        state = open_folder / "state"
        folder = part_folder(state)
        state.chmod(0o700)
        site = AgentStateFolder(state)
        site.make_lease_folder()
        write_run_lease(site.run_lease, RunLease(boot=boot_id(), lease_s=60, until_s=NO_LIMIT_S))
        token, theirs = state / "token", open_folder / "hers"
        token.write_text("token")
        theirs.write_text("alice")
        for file in (token, theirs):
            file.chmod(0o600)
        worker, rights = WorkerFolder(folder), WorkerRights.model_validate({"run_as": {"*": "nobody"}})
        limits = limits_for(folder, rights, "bob", None, protected=[])
        write_limits(worker, limits)
        assert limits.account is not None
        found = probe(folder, {
            "token": f"open('{token}').read()",
            "hers": f"open('{theirs}').read()",
            "lease": f"len(open('{site.run_lease}').read()) > 0",
            "state": f"os.listdir('{state}')",
            "root again": "os.setuid(0)",
            "agent": f"open('/proc/{os.getpid()}/environ').read()",
            "signal": f"os.kill({os.getpid()}, 0)",
            "limits": f"open('{folder}/limits.json', 'w')",
            "other limits": f"os.rename('{folder}/limits.json', '{folder}/mine')",
            "other pid": f"os.unlink('{folder}/pid')",
            "exit": f"os.symlink('{theirs}', '{folder}/exit.tmp')",
            "exit.part": f"os.unlink('{folder}/exit.part')",
            "rank map": f"os.symlink('{theirs}', '{folder}/.ranks.json.{os.getpid()}.tmp')",
        }, python=PYTHON or "")  # fmt: skip
        uid, gid = str(limits.account.uid), str(limits.account.gid)
        assert (found["uids"], found["gids"]) == ([uid] * 4, [gid] * 4)
        assert set(found["groups"]) <= {str(one) for one in limits.account.groups}
        allowed = {name: seen for name, seen in found["attempts"].items() if seen != "PermissionError"}
        assert allowed == {"exit": None, "rank map": None, "lease": True}
        worker.write_rank_map(RankMap(workers=(WorkerAddress(rank=0, cluster="a", host="h", port=1),)))
        assert theirs.read_text() == "alice"
        assert worker.read_exit() == 0

    def test_checks_before_a_start_use_files_as_that_account(self, open_folder: Path) -> None:
        """The agent's own rights reach no further for a user's job than those of its workers."""
        from threading import Thread

        secret = open_folder / "secret"
        secret.write_text("x")
        secret.chmod(0o600)
        open_folder.chmod(0o777)
        found: list[object] = []

        def check() -> None:
            act_as_user(WorkerRights.model_validate({"run_as": {"*": "nobody"}}), "bob")
            (open_folder / "made").mkdir()
            try:
                secret.read_text()
            except OSError as error:
                found.append(type(error))

        thread = Thread(target=check)
        thread.start()
        thread.join()
        assert found == [PermissionError]
        assert (open_folder / "made").stat().st_uid != 0
        assert secret.read_text() == "x", "the other threads of the agent keep their rights"


def test_a_user_without_an_account_and_root_are_refused() -> None:
    """Never root unless the policy says so; a policy that this agent cannot follow ends it at the start."""
    rights = WorkerRights.model_validate({"run_as": {"alice": "nobody"}})
    with pytest.raises(InputError, match="no account for jobs of user 'bob'"):
        account_for(rights, "bob")
    policy = OwnerPolicy(workers=rights)
    assert "no account for jobs of user 'bob'" in policy.rejection_reason("bob", JOB)
    assert policy.rejection_reason("alice", JOB) == ""
    with pytest.raises(ValueError, match="only with allow_root"):
        WorkerRights.model_validate({"run_as": {"*": "root"}})
    with pytest.raises(InputError, match="this machine has no account 'no-such-account'"):
        check_rights(WorkerRights.model_validate({"run_as": {"*": "no-such-account"}}))
    if os.geteuid() != 0:
        with pytest.raises(InputError, match="run the agent as root"):
            check_rights(rights)


def test_the_agents_log_says_what_is_in_force() -> None:
    """The account of workers, and whether the kernel holds them to the storage roots."""
    rights = WorkerRights.model_validate({"run_as": {"*": "nobody"}, "umask": "027"})
    assert describe_isolation(rights, has_roots=False).startswith("workers run as accounts of their users; ")
    assert "umask 027; files not limited" in describe_isolation(rights, has_roots=False)
    text = describe_isolation(WorkerRights(), has_roots=True)
    assert f"the agent's account (uid {os.geteuid()}" in text
    assert "Landlock" in text


@pytest.mark.slow
def test_limits_that_cannot_be_kept_start_nothing(tmp_path: Path) -> None:
    """The log has the reason, and the program has not run."""
    folder = part_folder(tmp_path / "state")
    write_limits(WorkerFolder(folder), WorkerLimits())
    (folder / "limits.json").write_text('{"umask": "077", "environment": [], "paths": {"reads": 3, "writes": []}}')
    rank = RankStart(folder=folder, cards=("h20/0/0",), command=("touch", str(tmp_path / "ran")))
    with pytest.raises(InputError, match=r"limits\.json: paths\.reads"):
        LocalAdapter(EAST, tmp_path / "queue").start(rank)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_a_worker_puts_in_place_of_its_files_is_not_read(tmp_path: Path, kind: str) -> None:
    """The agent follows no link to a file that only it may read, and waits for no pipe."""
    secret = tmp_path / "secret"
    secret.write_text("12")
    folder = WorkerFolder(tmp_path / "rank-0")
    folder.path.mkdir()
    for place in (folder.exit_path, folder.checkin_path, folder.log_path):
        if kind == "link":
            place.symlink_to(secret)
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.mkdir()
    assert folder.read_exit() is None
    assert folder.read_checkin() is None
    with pytest.raises(FileNotFoundError):
        open_regular(folder.log_path)


def stat_mode(file: Path) -> int:
    return file.stat().st_mode & 0o777
