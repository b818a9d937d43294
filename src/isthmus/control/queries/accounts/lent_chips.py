"""Guaranteed chips: whether a job is within its project's guarantee, and which jobs hold chips that others lend.

A project lends what it does not hold of its guarantee. Towards a job within the guarantee of a project, a job outside
of that project holds lent chips if each project that it alone belongs to holds more than its guarantee; a job without a
guarantee always does (as in Kueue's cohorts, where a queue above its nominal quota borrows). Jobs are taken whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.control.accounts.account_tree import PROJECT_PREFIX
from isthmus.control.state.job_records import JobRecord, PoolState


def guaranteeing_project(state: PoolState, job: JobRecord) -> str:
    """Return the lowest project of a job that, with it, holds at most what it is guaranteed; "" if there is none."""
    tree = state.accounts.tree
    if not job.project or not tree.has_guarantees or not job.num_chips:
        return ""
    for name in tree.chain(job.project):
        held = state.accounts.use_of(PROJECT_PREFIX + name).num_chips
        if held + job.num_chips <= tree.projects[name].guaranteed_chips:
            return name
    return ""


@dataclass(slots=True, kw_only=True)
class LentChips:
    """What projects would hold above their guarantees, as jobs are taken one by one for a job of `own` projects.

    `project` is the one whose guarantee the job uses.
    """

    state: PoolState
    project: str
    own: frozenset[str]
    # By project: chips above its guarantee.
    above: dict[str, int]

    @classmethod
    def of(cls, state: PoolState, job: JobRecord, project: str) -> LentChips:
        """Return what projects hold now, for a job that takes chips back within the guarantee of `project`."""
        tree, book = state.accounts.tree, state.accounts
        above = {
            name: book.use_of(PROJECT_PREFIX + name).num_chips - project.guaranteed_chips
            for name, project in tree.projects.items()
            if project.guaranteed_chips
        }
        return cls(state=state, project=project, own=frozenset(tree.chain(job.project)), above=above)

    def take(self, job_id: str) -> bool:
        """Return whether a job holds lent chips, and then count it as taken."""
        job = self.state.jobs[job_id]
        chain = self.state.accounts.tree.chain(job.project)
        guaranteed = [name for name in chain if name in self.above and name not in self.own]
        if self.project in chain or any(self.above[name] <= 0 for name in guaranteed):
            return False
        for name in guaranteed:
            self.above[name] -= job.charged_chips
        return True
