"""`ask_for_plan`: shows a job's candidate plans on a terminal and asks which one to take."""

from __future__ import annotations

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import plans_table
from isthmus.core.plan import PlanSet


def ask_for_plan(env: CliEnvironment, plans: PlanSet) -> str | None:
    """Return the id of the chosen plan; None if the user enters `q` or closes the input.

    An empty line takes the first plan; a number or an id takes that plan; any other answer repeats the question.
    """
    ids = [plan.id for plan in plans.plans]
    env.print(plans_table(plans))
    while True:
        answer = env.read_answer(f"\nWhich plan? [1-{len(ids)} or its id; Enter takes {ids[0]}; q decides later] ")
        if answer is None or answer.lower() in ("q", "quit"):
            return None
        if not answer:
            return ids[0]
        if answer in ids:
            return answer
        if answer.isascii() and answer.isdecimal() and 1 <= int(answer[:9]) <= len(ids):
            return ids[int(answer) - 1]
        env.print_note(f"'{answer[:80]}' is none of the plans: enter 1 to {len(ids)}, or " + ", ".join(ids))
