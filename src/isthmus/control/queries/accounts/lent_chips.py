"""Guaranteed chips: whether a job is within its project's guarantee, and which jobs hold chips that others lend.

A guarantee is of chips of any cluster, of a cluster, or of a node group. What a project holds counts to the guarantee
of the node group first, beyond it to that of the cluster, then to that of any cluster: so each chip counts once.
A project lends what it does not hold of its guarantee. Towards a job within the guarantee of a project, a job outside
of that project holds lent chips if each project that it alone belongs to holds more than its guarantee of the chips
that are wanted; a job without a guarantee always does (as in Kueue's cohorts, where a queue above its nominal quota of
a flavor borrows). Jobs are taken whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isthmus.control.accounts.account_tree import PROJECT_PREFIX
from isthmus.control.state.allocations import Amounts, chip_needs_of
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.owner.chip_scope import ALL_CHIPS, ChipScope
from isthmus.core.pool_resource import PoolResource


def is_above(
    guarantees: Mapping[ChipScope, int], num_chips: int, chips_at: Mapping[PoolResource, int], wanted: PoolResource
) -> bool:
    """Return whether who holds `num_chips`, these by node group, holds more of `wanted` than is guaranteed.

    `chips_at` may lack node groups that no guarantee is about.
    """
    covered: dict[str, int] = {}
    here = ChipScope(wanted.cluster, wanted.name)
    if here in guarantees and chips_at.get(wanted, 0) <= guarantees[here]:
        return False
    for (cluster, group), most in guarantees.items():
        if group:
            held = min(most, chips_at.get(PoolResource.chips(cluster, group), 0))
            covered[cluster] = covered.get(cluster, 0) + held
    for scope, most in guarantees.items():
        if scope.cluster and not scope.node_group:
            more = scope.chips_in(chips_at) - covered.get(scope.cluster, 0)
            if scope.cluster == wanted.cluster and more <= most:
                return False
            covered[scope.cluster] = covered.get(scope.cluster, 0) + min(most, more)
    return num_chips - sum(covered.values()) > guarantees.get(ALL_CHIPS, 0)


def guaranteeing_project(state: PoolState, job: JobRecord) -> str:
    """Return the lowest project of a job that, with it, holds at most what it is guaranteed; "" if there is none."""
    tree = state.accounts.tree
    if not job.project or not tree.guarantees or not job.num_chips:
        return ""
    needs = chip_needs_of(job.plan_parts)
    for name in tree.chain(job.project):
        guarantees, use = tree.guarantees.get(name), state.accounts.use_of(PROJECT_PREFIX + name)
        if guarantees is None:
            continue
        chips_at = use.chips_at | {key: chips + use.chips_at.get(key, 0) for key, chips in needs.items()}
        if not any(is_above(guarantees, use.num_chips + job.num_chips, chips_at, key) for key in needs):
            return name
    return ""


@dataclass(slots=True, kw_only=True)
class LentChips:
    """What projects hold above their guarantees, as jobs are taken one by one for a job of `own` projects.

    `project` is the one whose guarantee the job uses.
    """

    state: PoolState
    project: str
    own: frozenset[str]
    # By project: the chips of the jobs that were taken.
    taken: dict[str, Amounts] = field(default_factory=dict)

    @classmethod
    def of(cls, state: PoolState, job: JobRecord, project: str) -> LentChips:
        """Return what projects hold now, for a job that takes chips back within the guarantee of `project`."""
        return cls(state=state, project=project, own=frozenset(state.accounts.tree.chain(job.project)))

    def take(self, job_id: str, wanted: Iterable[PoolResource]) -> bool:
        """Return whether a job holds lent chips of those `wanted` that it has, and then count it as taken."""
        job, tree = self.state.jobs[job_id], self.state.accounts.tree
        chain = tree.chain(job.project)
        held = chip_needs_of(job.plan_parts)
        keys = [key for key in wanted if key in held]
        lenders = [name for name in chain if name in tree.guarantees and name not in self.own]
        if self.project in chain or not all(any(self._is_lent(name, key) for key in keys) for name in lenders):
            return False
        for name in lenders:
            taken = self.taken.setdefault(name, {})
            for key, chips in held.items():
                taken[key] = taken.get(key, 0) + chips
        return True

    def _is_lent(self, project: str, key: PoolResource) -> bool:
        """Return whether a project, without the jobs that were taken, holds more of `key` than it is guaranteed."""
        book, taken = self.state.accounts, self.taken.get(project, {})
        use = book.use_of(PROJECT_PREFIX + project)
        chips_at = {at: chips - taken.get(at, 0) for at, chips in use.chips_at.items()} if taken else use.chips_at
        return is_above(book.tree.guarantees[project], use.num_chips - sum(taken.values()), chips_at, key)


def borrowers_below(state: PoolState, job: JobRecord, account: str, scope: ChipScope) -> list[JobRecord]:
    """Return the jobs of a project at its limit on the chips of `scope` that hold lent ones, guaranteed to `job`.

    Enough of them that the job fits below the limit once they are released, the latest first; empty if there are not.
    """
    name, project = account.removeprefix(PROJECT_PREFIX), guaranteeing_project(state, job)
    tree, limit = state.accounts.tree, state.accounts.tree.limits(account).on_chips.get(scope)
    if not account.startswith(PROJECT_PREFIX) or not project or limit is None or name == project:
        return []
    held = {
        one.id: chip_needs_of(one.plan_parts)
        for one in state.live_jobs.values()
        if one.charged_chips and name in tree.chain(one.project)
    }
    inside = [state.jobs[one] for one, chips in held.items() if scope.chips_in(chips)]
    leaving = sum(scope.chips_in(held[one.id]) for one in inside if one.pause_for == job.id or one.state == "stopping")
    needed = scope.chips_in(chip_needs_of(job.plan_parts))
    excess = state.accounts.use_of(account).chips_in(scope) - leaving + needed - limit
    lent, found = LentChips.of(state, job, project), list[JobRecord]()
    for one in sorted(inside, key=lambda other: -other.number):
        if excess <= 0:
            break
        settled = one.state in ("preparing", "starting", "running") and one.preemptor is None and not one.victims
        wanted = [key for key, chips in held[one.id].items() if scope.chips_in({key: chips})]
        if settled and one.preemptible and not one.pause_reason and lent.take(one.id, wanted):
            found.append(one)
            excess -= scope.chips_in(held[one.id])
    return found if excess <= 0 else []
