"""Rules of workers: start, status, output, environment, limits, stop."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from isthmus.agent.adapters.rules.rule_context import (
    LOOP_FOREVER,
    RuleContext,
    is_running,
    require_rule,
)
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits

_FAR_TIMES_S = (0.0, 4_102_444_800.0)
"""Seconds since the epoch: 1970 and 2100."""


def absent_until_started(site: RuleContext) -> None:
    """A folder that was not started is `absent`."""
    require_rule(site.adapter().poll(site.folder).state == "absent", "a worker is absent before its start")


def exit_status_is_kept(site: RuleContext) -> None:
    """Every adapter of the site returns the program's exit status."""
    adapter = site.adapter("exit 7")
    site.start(adapter)
    require_rule(site.wait_exited(adapter).exit_status == 7, "the exit status is the program's")
    require_rule(site.adapter().poll(site.folder).exit_status == 7, "a new adapter returns the same exit status")


def output_is_kept(site: RuleContext) -> None:
    """Standard output and error go to the folder's `log`."""
    adapter = site.adapter("echo out; echo err >&2")
    site.start(adapter)
    site.wait_exited(adapter)
    require_rule((site.folder / "log").read_text() == "out\nerr\n", "the log has output and error in order")


def environment_has_devices_without_tokens(site: RuleContext) -> None:
    """The program's environment has its devices in `ISTHMUS_CARDS` and no tokens."""
    adapter = site.adapter('echo "$ISTHMUS_CARDS"; env | grep -c "ISTHMUS_.*TOKEN"')
    rank = site.rank(adapter)
    before = os.environ.get("ISTHMUS_TOKEN")
    os.environ["ISTHMUS_TOKEN"] = "secret"  # noqa: S105 - the worker must not see it
    try:
        adapter.start(rank)
        site.wait_exited(adapter)
    finally:
        os.environ.pop("ISTHMUS_TOKEN")
        if before is not None:
            os.environ["ISTHMUS_TOKEN"] = before
    expected = f"{','.join(rank.cards)}\n0\n"
    require_rule((site.folder / "log").read_text() == expected, "the environment has the devices and no tokens")


def limits_are_applied(site: RuleContext) -> None:
    """The program has the limits of its folder: here the umask and, on Linux, no new privileges."""
    WorkerFolder(site.folder).write_limits(WorkerLimits(umask="0027"))
    adapter = site.adapter('umask; grep -s NoNewPrivs: /proc/self/status || echo "NoNewPrivs: 1"')
    site.start(adapter)
    site.wait_exited(adapter)
    words = (site.folder / "log").read_text().split()
    require_rule(words == ["0027", "NoNewPrivs:", "1"], "a program starts with the limits of its folder")


def starts_at_most_once(site: RuleContext) -> None:
    """The program runs once, however often and by however many adapters it is started."""
    adapters = [site.adapter("sleep 0.2") for _ in range(3)]
    rank = site.rank(adapters[0])
    for adapter in adapters * 2:
        adapter.start(rank)
    for adapter in adapters:
        site.wait_exited(adapter)
        adapter.start(rank)
    site.wait_exited(site.adapter())
    require_rule(site.num_starts == 1, f"a folder is started once, not {site.num_starts} times")


def command_replaces_the_program(site: RuleContext) -> None:
    """A command given to `start` runs instead of the site's worker program."""
    adapter = site.adapter()
    site.start(adapter, command=("sh", "-c", "exit 5"))
    require_rule(site.wait_exited(adapter).exit_status == 5, "a given command runs")
    require_rule(site.num_starts == 0, "a given command replaces the program")


def signal_sets_exit_status(site: RuleContext) -> None:
    """A program killed by signal n has status 128 + n."""
    adapter = site.adapter("kill -9 $$")
    site.start(adapter)
    require_rule(site.wait_exited(adapter).exit_status == 128 + 9, "a killed worker has status 137")


def stop_sends_sigterm(site: RuleContext) -> None:
    """`stop` without force sends SIGTERM, which the program can handle."""
    adapter = site.adapter('trap "exit 3" TERM; echo > "$1/ready"; ' + LOOP_FOREVER)
    site.start(adapter)
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require_rule(site.wait_exited(adapter).exit_status == 3, "a worker may handle SIGTERM and choose its exit status")


def force_sends_sigkill(site: RuleContext) -> None:
    """`stop` with force kills a program that ignores SIGTERM."""
    adapter = site.adapter('trap "" TERM; echo > "$1/ready"; ' + LOOP_FOREVER)
    site.start(adapter)
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require_rule(adapter.poll(site.folder).state == "running", "a worker that ignores SIGTERM still runs")
    adapter.stop(site.folder, force=True)
    require_rule(site.wait_exited(adapter).exit_status == 128 + 9, "force kills a worker, with status 137")


def stop_prevents_start(site: RuleContext) -> None:
    """A folder stopped before its start never starts."""
    adapter = site.adapter()
    adapter.stop(site.folder, force=False)
    require_rule(adapter.poll(site.folder).state == "exited", "a worker stopped before its start is exited")
    rank = site.rank(adapter)
    for other in (adapter, site.adapter()):
        other.start(rank)
        site.wait_exited(other)
    require_rule(site.num_starts == 0, "a worker stopped before its start never starts")


def new_adapter_finds_worker(site: RuleContext) -> None:
    """A new adapter finds a running worker and can stop it."""
    first = site.adapter(LOOP_FOREVER)
    site.start(first)
    site.wait_started()
    second = site.adapter()
    require_rule(second.poll(site.folder).state == "running", "a new adapter sees a running worker")
    second.stop(site.folder, force=True)
    site.wait_exited(second)
    require_rule(
        site.wait_exited(first).exit_status == second.poll(site.folder).exit_status,
        "both adapters return the same exit status",
    )


def exit_leaves_no_processes(site: RuleContext) -> None:
    """A worker is exited only after every process that its program started has ended."""
    adapter = site.adapter(f'({LOOP_FOREVER}) & echo $! > "$1/child"; exit 0')
    site.start(adapter)
    site.wait_exited(adapter)
    child = int((site.folder / "child").read_text())
    require_rule(not is_running(child), "an exited worker has no processes")


def stop_before_start_is_final_with_force(site: RuleContext) -> None:
    """SIGKILL before the start prevents it as SIGTERM does."""
    adapter = site.adapter()
    adapter.stop(site.folder, force=True)
    adapter.start(site.rank(adapter))
    require_rule(site.wait_exited(adapter).state == "exited", "a worker killed before its start is exited")
    require_rule(site.num_starts == 0, "a worker killed before its start never starts")


def finished_worker_is_not_started_again(site: RuleContext) -> None:
    """A start after the end changes nothing, for this adapter and for a new one."""
    adapter = site.adapter("exit 4")
    rank = site.start(adapter)
    site.wait_exited(adapter)
    for other in (adapter, site.adapter("exit 5")):
        other.start(rank)
        require_rule(site.wait_exited(other).exit_status == 4, "the first exit status stays")
    require_rule(site.num_starts == 1, "a finished worker is not started again")


def stop_after_the_end_changes_nothing(site: RuleContext) -> None:
    """A late stop neither fails nor changes the exit status."""
    adapter = site.adapter("exit 6")
    site.start(adapter)
    site.wait_exited(adapter)
    for force in (False, True):
        adapter.stop(site.folder, force=force)
    require_rule(site.poll(site.adapter()).exit_status == 6, "a late stop leaves the exit status")


def stop_may_be_repeated(site: RuleContext) -> None:
    """SIGTERM twice, by two adapters, is one end."""
    adapter = site.adapter('trap "exit 3" TERM; echo > "$1/ready"; ' + LOOP_FOREVER)
    site.start(adapter)
    site.wait_for("ready")
    for other in (adapter, site.adapter()):
        other.stop(site.folder, force=False)
    require_rule(site.wait_exited(adapter).exit_status in (3, 128 + 15), "a repeated stop ends a worker")


def force_ends_children_too(site: RuleContext) -> None:
    """SIGKILL reaches every process that the program has started."""
    adapter = site.adapter(f'({LOOP_FOREVER}) & echo $! > "$1/child"; echo > "$1/ready"; {LOOP_FOREVER}')
    site.start(adapter)
    site.wait_for("ready")
    adapter.stop(site.folder, force=True)
    site.wait_exited(adapter)
    child = int((site.folder / "child").read_text())
    require_rule(not is_running(child), "a killed worker leaves no process")


def clocks_of_nodes_do_not_matter(site: RuleContext) -> None:
    """A node's clock may be wrong: files with times of long ago or far ahead neither end nor double a worker."""
    adapter = site.adapter('while [ ! -e "$1/go" ]; do sleep 0.02; done; exit 7')
    rank = site.start(adapter)
    site.wait_started()
    for time_s in _FAR_TIMES_S:
        _date_files(site.folder, time_s)
        for other in (adapter, site.adapter()):
            require_rule(site.poll(other).state == "running", "a worker with files of another time runs on")
            other.start(rank)
    (site.folder / "go").touch()
    require_rule(site.wait_exited(adapter).exit_status == 7, "the exit status is the program's, whatever its clock")
    for time_s in _FAR_TIMES_S:
        _date_files(site.folder, time_s)
        require_rule(site.poll(site.adapter()).exit_status == 7, "an exit status of another time stays")
    require_rule(site.num_starts == 1, "files of another time start nothing again")


def _date_files(folder: Path, time_s: float) -> None:
    """Give every file of a folder a time, as a node with such a clock would."""
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            os.utime(file, (time_s, time_s))
