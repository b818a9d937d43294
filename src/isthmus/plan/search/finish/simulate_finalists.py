"""`finals`: simulate the layouts with the best estimates, and refine the fastest ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.job import Job
from isthmus.core.pool import Pool
from isthmus.plan.search.compose.layout import Layout
from isthmus.plan.search.costs.task import Task
from isthmus.plan.search.finish.refine import cells, refine
from isthmus.plan.search.finish.score import score
from isthmus.plan.search.finish.write_plan import Scored, write_plan


@dataclass(frozen=True)
class Effort:
    """How much to simulate."""

    # Layouts kept by estimate, beside the best of each set of clusters.
    width: int
    # Budget of (stage, micro-batch) pairs to simulate.
    cells: int
    # Skip layouts whose estimate exceeds this multiple of the best simulated time.
    close: float
    # Plans to refine.
    refined: int
    # Further pairs for refinement, beside what is left of `cells`.
    moved: int


LARGE, SMALL = Effort(8, 2000, 1.1, 2, 2000), Effort(64, 8000, 1.25, 16, 5000)


def finals(
    layouts: Sequence[Layout],
    job: Job,
    pool: Pool,
    task: Task,
    effort: Effort,
    keep: int,
    *,
    executable: bool,
) -> list[Scored]:
    """Write, simulate and refine the best layouts; return them by simulated time.

    The result includes the best of up to `keep` sets of clusters. The effort covers these layouts only, so
    the result is independent of other searches.
    """

    def scored(layout: Layout) -> Scored:
        plan = write_plan(layout, job, task, executable=executable)
        return Scored(layout, plan, score(plan, pool, task))

    # Step 1: simulate layouts in the order of their estimates, within the budget.
    found: list[Scored] = []
    spent, known = 0, set[tuple[str, ...]]()
    for layout in sorted(layouts, key=lambda one: (one.estimate_s, one.num_chips)):
        best_s = min((one.time_s for one in found), default=math.inf)
        new = layout.clusters not in known and len(known) < keep
        poor = spent > effort.cells or layout.estimate_s > effort.close * best_s
        if len(found) >= 3 and poor and not new:
            continue
        found.append(scored(layout))
        spent += cells(layout)
        known.add(layout.clusters)
    # Step 2: refine the fastest ones.
    found.sort(key=by_time)
    left = max(0, effort.cells - spent) + effort.moved
    for place, one in enumerate(found[: effort.refined]):
        found[place] = refine(one, scored, left // effort.refined // cells(one.layout))
    unique = {one.plan.id: one for one in found}
    return list(unique.values())


def by_time(one: Scored) -> tuple[float, int, str]:
    """Return the sort key of plans: simulated time, then chips."""
    return one.time_s, one.layout.num_chips, one.plan.id
