"""`take_rank_keys`: the keys of a rank, from the file that the agent has written for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import check_may_listen
from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.core.errors import InputError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.train.update.gradient_options import check_switch_key


@dataclass(frozen=True)
class RankKeys:
    """The keys of a rank's links (None on one machine), of the job's copies in an object store, of its switch packets.

    The last two are None without such.
    """

    links: LinkKeys | None = None
    copies: bytes | None = field(default=None, repr=False)
    switch: bytes | None = field(default=None, repr=False)


def take_rank_keys(folder: WorkerFolder, spec: WorkerSpec) -> RankKeys:
    """Return the keys and remove their file; without a file there are none, where every rank is on this machine.

    Raises `InputError` if the rank would listen beyond this machine without keys, if a site of the plan has none, or if
    the job has copies in an object store, or a switch beyond this machine, without a key. Torch's own backends stay
    inside a cluster and use no keys.
    """
    found = folder.take_keys()
    if spec.job.checkpoints.copy_store is not None and (found is None or found.copies is None):
        raise InputError(
            "no key for the copies in checkpoints.copy_store", hint="use the same release of agent and server"
        )
    check_switch_key(spec.switches, has_key=found is not None and found.switch is not None)
    if found is None:
        if spec.backend == BACKEND:
            check_may_listen(spec.host, None)
        return RankKeys()
    plan = spec.plan  # ranks that decode pass weights on to each other
    count = plan.num_ranks if plan.is_rollout(spec.rank) else len(plan.ranks)
    sites = [plan.stage_of(rank).cluster for rank in range(count)]
    copies, switch = (None if one is None else bytes.fromhex(one) for one in (found.copies, found.switch))
    return RankKeys(LinkKeys.from_hex(spec.cluster, sites, found.keys), copies, switch)
