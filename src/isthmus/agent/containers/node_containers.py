"""`NodeContainers`: containers of rendered parts on nodes that share no files with the agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, job_program, worker_environment
from isthmus.agent.adapters.scheduler_adapter import NodeImages
from isthmus.agent.adapters.worker_limits import INHERITED_PREFIXES, INHERITED_VARIABLES, TEMPORARY_FOLDER
from isthmus.agent.containers.part_renderer import rank_variables
from isthmus.agent.containers.worker_containers import container_name, container_user
from isthmus.agent.courier.start_file import node_container_command, portable_words
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerSpec, write_atomically
from isthmus.core.process.node_container import CONTAINER_FILE
from isthmus.core.rights.worker_rights import WorkerRights
from isthmus.render import Container, RenderedPart, oci_config

NOTE_FILE = "node_images"
"""File of the agent's state folder that names the folder of its nodes with unpacked images, once one was asked for."""


class NodeContainers:
    """The containers of a site whose nodes have `images` of their own; the courier brings what the agent writes.

    `state` is the agent's state folder.
    """

    def __init__(
        self, rights: WorkerRights, images: NodeImages, state: Path, worker_command: Sequence[str] = WORKER_COMMAND
    ) -> None:
        self._rights, self._images, self._worker_command = rights, images, tuple(worker_command)
        self._note = state / NOTE_FILE

    def prepare(
        self,
        folder: Path,
        spec: WorkerSpec,
        part: RenderedPart,
        devices: Sequence[str],
        account: WorkerAccount | None,
        *,
        protected: Sequence[Path],  # noqa: ARG002 - files of the agent, which is elsewhere
        also_read: Sequence[Path],
    ) -> tuple[str, ...]:
        """Write `container.json` of a worker; return the command that makes the container on its node."""
        folder, name = folder.absolute(), container_name(spec.run, spec.attempt, spec.rank)
        facts = part.image.facts
        usual = self._worker_command if facts.host_files else part.command
        program = (*job_program(spec.job, tuple(usual)), *part.arguments, str(folder))
        container = Container(
            root="",
            command=portable_words(program),
            environment={},
            working_folder=str(folder),
            user=container_user(account, self._rights),
            mounts={str(folder): (str(folder), True), **{str(one): (str(one), False) for one in also_read}},
            cgroup=name,
        )
        temporary = {"TMPDIR": str(folder / TEMPORARY_FOLDER)}
        asked = {
            "layout": self._images.layout, "store": self._images.store, "name": name,
            "image": part.image.reference, "digest": part.image.digest,
            "host_files": facts.host_files, "readable": list(self._rights.readable),
            "names": [*INHERITED_VARIABLES, *self._rights.environment], "prefixes": list(INHERITED_PREFIXES),
            "environment": worker_environment(part.image.environment, devices, {}) | temporary | rank_variables(part),
            "config": oci_config(part, container),
        }  # fmt: skip
        write_atomically(self._note, self._images.store)
        write_atomically(folder / CONTAINER_FILE, json.dumps(asked))
        return node_container_command(folder)
