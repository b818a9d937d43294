"""The row that says how many lines the configurations of a public set take as plan files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from benchmarks._public_run import PublicRun
from benchmarks.table import Row
from isthmus.core.plan import Plan
from isthmus.core.plan_parts.equal_stages import with_equal_stages
from isthmus.core.stack import Stack

MOST_LINES = 30


def plan_text(plan: Plan) -> str:
    """Return a plan of equal replicas as a file: a line for each field, and one for each stage of a replica."""
    fields: dict[str, Any] = plan.model_dump(mode="json", exclude_defaults=True, exclude={"stages", "stack"})
    if isinstance(plan.stack, Stack):
        fields["stack"] = plan.stack.name.partition("-")[0]  # its own file stands here; this one is like it
    elif plan.stack:
        fields["stack"] = plan.stack
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()] + ["equal_replicas: true", "stages:"]
    stages = [one.model_dump(mode="json", exclude_defaults=True) for one in plan.pipeline(0)]
    rows = [{key: value for key, value in one.items() if key != "replica"} for one in stages]
    even = {**rows[0], "layers": [0, rows[-1]["layers"][1]]}
    if len(rows) > 1 and with_equal_stages({"stages": [even], "equal_stages": len(rows)}, len(rows))["stages"] == rows:
        lines, rows = [f"equal_stages: {len(rows)}", *lines], [even]
    lines += [f"  - {json.dumps(one)}" for one in rows]
    return "\n".join(lines) + "\n"


def plan_row(name: str, runs: Sequence[PublicRun]) -> Row:
    """Return the most lines that a configuration of the set takes; each is read back and compared."""
    most = 0
    for run in runs:
        text = plan_text(run.plan)
        read = Plan.model_validate(yaml.safe_load(text))
        if read.model_dump(exclude={"stack"}) != run.plan.model_dump(exclude={"stack"}):
            raise ValueError(f"{run.name} reads back as another plan")
        most = max(most, text.count("\n"))
    what = f"{name}: {len(runs)} of {len(runs)} configurations read are written as plan files and read back: most lines"
    return Row(what=what, ours=most, unit="lines", target=f"at most {MOST_LINES}", met=most <= MOST_LINES)
