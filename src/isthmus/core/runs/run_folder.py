"""The folders of a run: a claim, `FOLDER/.isthmus-run/run.json`, says which job a folder belongs to.

A claim is made by renaming a complete folder into place, which succeeds for one claimant only: of two jobs
that race for a folder, one is refused. All ranks of a job claim its folders; the first makes the claim.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.job import JOB_PLACEHOLDER
from isthmus.core.process.state_folder_lock import fsync_path
from isthmus.core.runs.run_identity import RunIdentity, differences, list_differences

CLAIM_FOLDER = ".isthmus-run"
CLAIM_FILE = "run.json"
MAX_CLAIM_BYTES = 2 << 20
"""Larger claims are malformed."""

FolderUse = Literal["checkpoints.folder", "output"]
"""The field of a job that names the folder."""

_CHECKPOINT = re.compile(r"step-\d{8,12}")


def complete_folders(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints, unordered; a link, which may lead to another's, is none."""
    found = (one for one in folder.glob("step-*") if _CHECKPOINT.fullmatch(one.name))
    return [one for one in found if one.is_dir() and not one.is_symlink()]


def newest_checkpoint_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint by its name; 0 without one."""
    return max((int(one.name.partition("-")[2]) for one in complete_folders(folder)), default=0)


def read_claim(folder: Path) -> RunIdentity | None:
    """Return the claim of a folder, None without one; raise `InputError` if it is malformed or unreadable."""
    file = folder / CLAIM_FOLDER / CLAIM_FILE
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise _malformed(file, "not a regular file")
        with file.open("rb") as stream:
            data = stream.read(MAX_CLAIM_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _malformed(file, error.strerror or str(error)) from error
    if len(data) > MAX_CLAIM_BYTES:
        raise _malformed(file, f"longer than {MAX_CLAIM_BYTES} bytes")
    try:
        return RunIdentity.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise _malformed(file, f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}") from error


def claimed_job(folder: Path) -> str:
    """Return the job that has claimed a folder, "" without a claim; raises like `read_claim`."""
    claim = read_claim(folder)
    return claim.job if claim else ""


def claim_folder(
    folder: Path, use: FolderUse, job: str, identify: Callable[[], RunIdentity], *, user: str = "", adopt: bool = False
) -> None:
    """Claim `folder` for `job`, or find that it has; create it if missing.

    `user` submitted the job. `adopt` accepts content without a claim: of a run that began under a release without
    claims. Raises `InputError` if the folder belongs to another job or holds unclaimed content, and `UnavailableError`
    if it cannot be written.
    """
    owner = read_claim(folder)
    if owner is None:
        if not adopt:
            refuse_unclaimed(folder, use)
        try:
            _make_claim(folder, identify())
        except OSError as error:
            raise UnavailableError(
                f"cannot write to {use} {folder}: {error.strerror or error}",
                hint="free disk space or use another folder",
            ) from error
        owner = read_claim(folder)
    if owner is None:
        raise UnavailableError(f"{use} {folder}: the claim has disappeared", hint="check its disk and mount")
    if owner.job != job or (user and owner.user not in ("", user)):
        raise foreign_folder_error(folder, use, owner, identify())
    if use == "checkpoints.folder":
        refuse_forged(folder)


def refuse_forged(folder: Path) -> None:
    """Raise `InputError` if another account than that of the folder's checkpoints has written its claim."""
    with suppress(FileNotFoundError):
        account = (folder / CLAIM_FOLDER / CLAIM_FILE).stat().st_uid
        for place in complete_folders(folder):
            if place.stat().st_uid != account:
                raise InputError(
                    f"{folder}: the account {account} wrote its claim, and the account {place.stat().st_uid} the "
                    f"checkpoint {place.name}: it does not prove which job the folder belongs to",
                    hint="use another folder",
                )


def refuse_unclaimed(folder: Path, use: FolderUse) -> None:
    """Raise `InputError` if the folder, which has no claim, holds checkpoints or (as output) anything at all."""
    if use == "checkpoints.folder" and complete_folders(folder):
        raise InputError(
            f"checkpoints.folder {folder} holds checkpoints that no job has claimed",
            hint=f"`resume: {folder}` with another checkpoints.folder continues from them; else use another folder",
        )
    if use == "output" and (content := first_content(folder)):
        raise InputError(
            f"output {folder} holds files that this job has not written, such as '{content}'",
            hint=f"use an empty folder, such as output: {folder.with_name(folder.name + '-' + JOB_PLACEHOLDER)}",
        )


def first_content(folder: Path) -> str:
    """Return the name of a file or folder in `folder`, other than a claim; empty without one."""
    try:
        names = sorted(one.name for one in folder.iterdir() if not one.name.startswith(CLAIM_FOLDER))
    except FileNotFoundError:
        return ""
    except NotADirectoryError:
        return folder.name
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}", hint="check its permissions") from error
    return names[0] if names else ""


def foreign_folder_error(folder: Path, use: FolderUse, owner: RunIdentity, here: RunIdentity) -> InputError:
    """Return the refusal of a folder of the run `owner`, with the fields in which it differs from the job `here`.

    The user of another user's job learns nothing about it.
    """
    if owner.user and here.user and owner.user != here.user:
        return InputError(f"{use} {folder} belongs to a job of another user", hint="use a folder of your own")
    found = differences(owner, here)
    differing = f"which differs: {list_differences(found)}" if found else "which has the same training fields"
    if use == "output":
        hint = f"use another folder, such as output: {folder.with_name(folder.name + '-' + JOB_PLACEHOLDER)}"
        return InputError(f"output {folder} belongs to job {owner.job}, {differing}", hint=hint)
    return InputError(
        f"checkpoints.folder {folder} belongs to job {owner.job}, {differing}",
        hint=f"leave out checkpoints.folder; `resume: {owner.job}` continues that run",
    )


def _make_claim(folder: Path, identity: RunIdentity) -> None:
    """Write the claim and rename it into place; an existing claim stays."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{CLAIM_FOLDER}.{secrets.token_hex(8)}.tmp"
    draft.mkdir()
    try:
        with (draft / CLAIM_FILE).open("x", encoding="utf-8") as stream:
            stream.write(identity.model_dump_json(indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        try:
            draft.rename(folder / CLAIM_FOLDER)
        except OSError:
            if not (folder / CLAIM_FOLDER).is_dir():
                raise
        fsync_path(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _malformed(file: Path, why: str) -> InputError:
    return InputError(
        f"{file} does not say which job the folder belongs to: {why}",
        hint="use another folder; remove the file only if no job uses the folder",
    )
