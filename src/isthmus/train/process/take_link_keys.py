"""`take_link_keys`: the keys of a rank's links, from the file that the agent has written for it."""

from __future__ import annotations

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import check_may_listen
from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec


def take_link_keys(folder: WorkerFolder, spec: WorkerSpec) -> LinkKeys | None:
    """Return the keys and remove their file; None without a file, where every rank is on this machine.

    Raises `InputError` if the rank would listen beyond this machine without keys, or if a site of the plan has none.
    Torch's own backends stay inside a cluster and use no keys.
    """
    found = folder.take_keys()
    if found is None:
        if spec.backend == BACKEND:
            check_may_listen(spec.host, None)
        return None
    sites = [spec.plan.stage_of(rank).cluster for rank in range(len(spec.plan.ranks))]
    return LinkKeys.from_hex(spec.cluster, sites, found.keys)
