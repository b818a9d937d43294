"""`check_adapter`: conformance tests of `SchedulerAdapter`, for new scheduler adapters.

Short POSIX shell scripts replace the training program; the folder is their last argument. Each rule is a function of
`rules`, whose docstring states it. Rules of holds run where the scheduler holds cards, rules of faults where the caller
can break the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from isthmus.agent.adapters.rules import (
    fault_rules,
    hold_rules,
    inventory_rules,
    program_rules,
    queue_rules,
    worker_rules,
)
from isthmus.agent.adapters.rules.rule_context import (
    ContractError,
    MakeAdapter,
    RuleContext,
    SchedulerFaults,
    is_running,
)

__all__ = ["ContractError", "adapter_rules", "check_adapter", "is_running"]

Rule = Callable[[RuleContext], None]


def adapter_rules(*, holds: bool, faults: bool) -> tuple[Rule, ...]:
    """Return the rules of adapters, with those of holds and those of a scheduler that can be broken."""
    modules = [inventory_rules, worker_rules, program_rules, queue_rules]
    modules += [hold_rules] * holds + [fault_rules] * faults
    return tuple(rule for module in modules for rule in _rules(module))


def check_adapter(
    make: MakeAdapter,
    folder: Path,
    *,
    timeout_s: float = 20.0,
    faults: SchedulerFaults | None = None,
    rules: Iterable[Rule] | None = None,
) -> None:
    """Check every rule, each in its own folder below `folder`; raise `ContractError` on a violation.

    `make` must return adapters of one site with at least one card, and two nodes if its scheduler holds cards.
    `timeout_s` limits each wait for a process. All processes have ended on return. `faults` breaks and repairs the
    scheduler; `rules` restricts the check to some of `adapter_rules`.
    """
    if rules is None:
        holds = make(("true",)).capabilities.holds == "scheduler"
        rules = adapter_rules(holds=holds, faults=faults is not None)
    for rule in rules:
        place = folder / rule.__name__
        place.mkdir(parents=True)
        site = RuleContext(make, place, timeout_s, faults)
        try:
            rule(site)
        except ContractError as error:
            raise ContractError(f"{rule.__name__}: {error}") from error
        finally:
            site.close()


def _rules(module: ModuleType) -> Iterator[Rule]:
    """Yield the rules of a module: its own public functions with one argument, the context."""
    for name, one in vars(module).items():
        own = getattr(one, "__module__", "") == module.__name__
        if own and not name.startswith("_") and callable(one) and list(one.__annotations__) == ["site", "return"]:
            yield one
