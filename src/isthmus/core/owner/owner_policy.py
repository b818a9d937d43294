"""`OwnerPolicy`: the limits that a site's owner sets for pool jobs, written as `policy.yaml`.

The file stays at the site. The site's agent enforces it and rejects every order that violates it.
"""

from __future__ import annotations

import ipaddress
import posixpath
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isthmus.core.base_model import Fraction, FrozenModel, Name, NonNegativeFloat, NonNegativeInt
from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.job import Job, job_accesses
from isthmus.core.owner.move_rules import MoveRules
from isthmus.core.owner.opening_hours import OpeningHours
from isthmus.core.pool import Cluster, UnknownNameError
from isthmus.core.rights.storage_rules import StorageRules
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.core.units import GB, Bytes


def _check_network(text: str) -> str:
    """Return a network in its usual form; raise `ValueError` for other text."""
    return str(ipaddress.ip_network(text))


NetworkName = Annotated[str, Field(max_length=64), AfterValidator(_check_network)]
"""A network of addresses, such as `10.0.0.0/8` or `fd00::/8`."""


class FetchPolicy(FrozenModel):
    """What a site fetches of the models and data sets of the catalogue that jobs name.

    `cache_bytes` bounds the copies that it keeps; unused ones make room for others. `schemes` are those of the URLs
    that it reads; `file` needs no mention where the storage roots of the entry's owner admit the folder. Addresses that
    are not public (loopback, link-local, private) are refused, except those in `networks`.
    """

    cache_bytes: Bytes = 500 * GB
    schemes: tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]{0,31}$")], ...] = ("https", "http")
    networks: tuple[NetworkName, ...] = ()


class OwnerPolicy(FrozenModel):
    """Limits that a site's owner sets for pool jobs.

    Pool jobs may hold at most `pool_chips` of a node group, or `pool_share` of one not listed there. They may
    run only within `hours`, only for `users`, and only with paths or URLs below `folders`; an empty list
    means no limit. `storage` gives each user and project roots of their own, `fetch` says
    what the site fetches for jobs, and `workers` what their processes may do. When the hours end, running jobs have
    `protect_s` to checkpoint before they are stopped. Devices that a pool job reserves without running are released
    after `hold_s`.

    Pool jobs may preempt local jobs of a lower level, from `preemptible_from` downwards; without it none. A
    preempted local job gets SIGTERM, SIGKILL after `grace_s`, and returns to its place in the queue. With
    `local_evicts_pool` a local job that finds no free devices evicts pool jobs of a lower level; running ones
    first have `protect_s` to checkpoint. A pool job that is queued ahead of local jobs may keep free devices
    from them for at most `hold_back_s`. `moves` says whether running pool jobs may be moved to other devices of the
    site to make room for a waiting one.
    """

    version: Literal[1] = 1
    pool_share: Fraction = 1.0
    pool_chips: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    hours: tuple[OpeningHours, ...] = ()
    users: tuple[Name, ...] = ()
    folders: tuple[str, ...] = ()
    storage: StorageRules = StorageRules()
    fetch: FetchPolicy = FetchPolicy()
    workers: WorkerRights = WorkerRights()
    hold_s: NonNegativeFloat = 900.0
    preemptible_from: Name | None = None
    grace_s: NonNegativeFloat = 30.0
    local_evicts_pool: bool = True
    protect_s: NonNegativeFloat = 60.0
    hold_back_s: NonNegativeFloat = 0.0
    moves: MoveRules = MoveRules()

    def max_pool_chips(self, node_group: str, chips: int) -> int:
        """Return how many of the `chips` of `node_group` pool jobs may hold at once."""
        return min(chips, self.pool_chips.get(node_group, int(self.pool_share * chips)))

    def is_open(self, moment: datetime) -> bool:
        """Return whether pool jobs may run at `moment`, in site time."""
        return not self.hours or any(hours.contains(moment) for hours in self.hours)

    def rejection_reason(self, user: str, job: Job) -> str:
        """Return why the policy never admits `job` of `user`, or "" if it does."""
        if self.users and user not in self.users:
            return f"the owner admits jobs of {', '.join(self.users)}, not of '{user}'"
        if self.workers.run_as and self.workers.account_of(user) is None:
            return f"the owner has no account for jobs of user '{user}': workers.run_as names none"
        if job.engine == "command" and not self.workers.commands:
            return "the owner admits no programs of users (engine: command): `commands: true` in workers does"
        if job.rl is not None and job.rl.function_files and not self.workers.commands:
            return "the owner admits no programs of users (rl.function): `commands: true` in workers does"
        strange = next((path for path in _job_paths(job) if not _is_below(path, self.folders)), None)
        if self.folders and strange is not None:
            return f"'{strange}' is outside the folders that the owner allows: {', '.join(self.folders)}"
        return self._storage_problem(user, job)

    def _storage_problem(self, user: str, job: Job) -> str:
        """Return which path of the job the storage roots of `user` do not admit, by its name alone, or ""."""
        allowed = self.storage.of_user(user)
        for field, path, access in job_accesses(job) if allowed else ():
            if (field == "resume" and access == "read") or (is_catalogue_name(path) and access == "read"):
                continue  # the job that it belongs to may grant it, and a user the entry
            if allowed and (problem := allowed.problem(allowed.resolve(path), access)):
                return str(allowed.error(field, path, problem))
        return ""

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise `UnknownNameError` if the policy names a node group or level that `cluster` lacks."""
        groups = [group.name for group in cluster.node_groups]
        for group in self.pool_chips:
            if group not in groups:
                raise UnknownNameError("node group", group, groups)
        levels = cluster.priorities.levels
        if self.preemptible_from is not None and self.preemptible_from not in levels:
            raise UnknownNameError("priority level", self.preemptible_from, levels)


def _job_paths(job: Job) -> Iterator[str]:
    """Yield every path that a job reads or writes; entries of the catalogue lie in the site's own cache."""
    if job.engine == "command":
        yield job.output
        return
    named = [*job.data.paths, job.model]
    if job.data.tokenizer_path is not None:
        named.append(job.data.tokenizer_path)
    yield from (path for path in named if not is_catalogue_name(path))
    yield from (job.checkpoints.folder, job.output)
    if job.checkpoints.copy_store is not None:
        yield job.checkpoints.copy_store


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether `path` is one of `folders` or inside one, after `..` is resolved."""
    place = _path_parts(path)
    return any(place[: len(_path_parts(folder))] == _path_parts(folder) for folder in folders)


def _path_parts(path: str) -> list[str]:
    scheme, _, rest = path.rpartition("://")
    return [scheme, *posixpath.normpath(rest).split("/")]
