"""`SlurmCommands`: run Slurm's commands with a deadline; a failure is `UnavailableError`, its outcome open."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.core.errors import InputError, UnavailableError

_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class SlurmCommands:
    """Slurm's commands for one cluster, chosen by `config` (empty: the machine's own)."""

    config: str = ""
    timeout_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every command: no setting of a surrounding job, times that can be parsed."""
        kept = {name: value for name, value in self.environment.items() if not name.startswith(_STRANGE)}
        config = self.config or self.environment.get("SLURM_CONF")
        chosen = {"SLURM_CONF": config} if config else {}
        return {**kept, **chosen, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}

    def run(self, *command: str) -> str:
        """Return the output; raise `UnavailableError` if the command fails or is late."""
        return self.run_fully(*command)[0]

    def run_fully(self, *command: str) -> tuple[str, str]:
        """Return output and error output; raise as `run` does."""
        try:
            done = subprocess.run(  # noqa: S603 - Slurm's own commands
                command, env=self.variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=self.timeout_s,
                check=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise InputError(
                f"'{command[0]}' is not installed here", hint="install the Slurm client commands"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{command[0]} did not end within {self.timeout_s:g} s") from error
        out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        if done.returncode != 0:
            text = " ".join(err.split())[:_MAX_ERROR_CHARS]
            raise UnavailableError(f"{command[0]} failed with status {done.returncode}: {text}")
        return out, err


_STRANGE = ("SLURM_", "SALLOC_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
"""Prefixes of variables that change what the commands do; a `SLURM_CONF` of the environment counts all the same."""
