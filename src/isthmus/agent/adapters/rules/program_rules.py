"""Rules of the programs that workers run: names, arguments, output, neighbours; whatever a user may come up with."""

from __future__ import annotations

import threading
from dataclasses import replace

from isthmus.agent.adapters.rules.rule_context import LOOP_FOREVER, RuleContext, require_rule

_LINES = 20_000


def strange_folder_names_work(site: RuleContext) -> None:
    """A folder with spaces, quotes, `$` and letters beyond ASCII is a folder like any other."""
    folder = site.subfolder("a b'c\"d $HOME `e` %j é")
    adapter = site.adapter("exit 7")
    site.start(adapter, folder)
    require_rule(site.wait_exited(adapter, folder).exit_status == 7, "the name of a folder is no program")
    require_rule(site.num_starts_of(folder) == 1, "the program gets its folder as it is written")


def arguments_arrive_unchanged(site: RuleContext) -> None:
    """No argument of a command is split, expanded or dropped."""
    odd = ("a b", "", "'", '"', "$HOME", "`date`", "*", "\\n", "x\ny", "%u", "--help", ";")
    adapter = site.adapter()
    site.start(adapter, command=("sh", "-c", 'for one; do printf "<%s>" "$one"; done', "sh", *odd))
    site.wait_exited(adapter)
    require_rule((site.folder / "log").read_text() == "".join(f"<{one}>" for one in odd), "arguments arrive unchanged")


def variables_of_a_start_arrive(site: RuleContext) -> None:
    """The program gets the variables of its start unchanged; its cards stay those that it was given."""
    chosen = {"NCCL_DEBUG": "INFO", "KIT_VALUE": "a b=c'\"$HOME", "ISTHMUS_CARDS": "others"}
    adapter = site.adapter('printf "%s|%s|%s" "$NCCL_DEBUG" "$KIT_VALUE" "$ISTHMUS_CARDS"')
    rank = replace(site.rank(adapter), variables=chosen)
    adapter.start(rank)
    site.wait_exited(adapter)
    wanted = f"INFO|{chosen['KIT_VALUE']}|{','.join(rank.cards)}"
    require_rule((site.folder / "log").read_text() == wanted, "the variables of a start arrive unchanged")


def missing_program_is_an_exit_status(site: RuleContext) -> None:
    """A program that does not exist ends with a status, and the log says which one it was."""
    adapter = site.adapter()
    site.start(adapter, command=("/nowhere/program",))
    require_rule(site.wait_exited(adapter).exit_status in (2, 126, 127), "a missing program is an exit status")
    require_rule("/nowhere/program" in (site.folder / "log").read_text(), "the log names a missing program")


def long_output_is_kept(site: RuleContext) -> None:
    """No line of the output is lost, the last ones included."""
    adapter = site.adapter(f'i=0; while [ $i -lt {_LINES} ]; do echo "line $i"; i=$((i + 1)); done')
    site.start(adapter)
    site.wait_exited(adapter)
    lines = (site.folder / "log").read_text().splitlines()
    require_rule(lines == [f"line {number}" for number in range(_LINES)], "the log has every line")


def standard_input_is_empty(site: RuleContext) -> None:
    """A program that reads its standard input finds its end."""
    adapter = site.adapter("cat; exit 9")
    site.start(adapter)
    require_rule(site.wait_exited(adapter).exit_status == 9, "standard input is empty")


def high_exit_status_is_kept(site: RuleContext) -> None:
    """All eight bits of an exit status arrive."""
    adapter = site.adapter("exit 250")
    site.start(adapter)
    require_rule(site.wait_exited(adapter).exit_status == 250, "an exit status has eight bits")


def workers_do_not_disturb_each_other(site: RuleContext) -> None:
    """Two workers run at a time; the end of one leaves the other."""
    first, second = site.subfolder("first"), site.subfolder("second")
    adapter = site.adapter(LOOP_FOREVER)
    for folder in (first, second):
        site.start(adapter, folder)
    for folder in (first, second):
        site.wait_started(folder)
    adapter.stop(first, force=True)
    site.wait_exited(adapter, first)
    require_rule(site.poll(adapter, second).state == "running", "the end of a worker leaves the others")
    adapter.stop(second, force=True)
    site.wait_exited(adapter, second)


def starts_at_the_same_time_are_one(site: RuleContext) -> None:
    """Of adapters that start a folder at the same time one wins."""
    adapters = [site.adapter("sleep 0.2") for _ in range(4)]
    rank = site.rank(adapters[0])
    threads = [threading.Thread(target=adapter.start, args=(rank,)) for adapter in adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    site.wait_exited(adapters[0])
    require_rule(site.num_starts == 1, "starts at the same time are one start")


def a_look_changes_nothing(site: RuleContext) -> None:
    """Looks at the scheduler by any adapter leave a running worker alone."""
    adapter = site.adapter(LOOP_FOREVER)
    site.start(adapter)
    site.wait_started()
    for _ in range(3):
        require_rule(site.poll(site.adapter()).state == "running", "a look leaves a worker alone")
    adapter.stop(site.folder, force=True)
    site.wait_exited(adapter)
    require_rule(site.num_starts == 1, "a look starts nothing")


def stop_races_with_start(site: RuleContext) -> None:
    """A stop at the same time as the start: the worker runs and ends, or never runs; it is never left behind."""
    adapter = site.adapter(LOOP_FOREVER)
    rank = site.rank(adapter)
    thread = threading.Thread(target=adapter.start, args=(rank,))
    thread.start()
    adapter.stop(site.folder, force=True)
    thread.join()
    site.adapter().stop(site.folder, force=True)
    site.wait_exited(site.adapter())
    require_rule(site.num_starts <= 1, "a stopped start is at most one")
