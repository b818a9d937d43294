"""`read_job`, `complete_job`: a job as it is submitted, with its model and with the tokenizer pinned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.client.find_entry import ListEntries, find_model
from isthmus.client.hub_model import fetch_hub_model
from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.errors import ModelError
from isthmus.core.files.model_tokenizer import check_chat_template, check_vocabulary, describe_tokenizer, pin_tokenizer
from isthmus.core.files.user_files import load_job
from isthmus.core.job import BYTES_TOKENIZER, MODEL_TOKENIZER, Job
from isthmus.core.model import COMMAND_MODEL, HUB_SCHEME, HubName, Model, load_model
from isthmus.core.runs.check_job import check_job

MAX_SHOWN_CHARS = 200
"""Characters of a command that are shown."""


@dataclass(frozen=True, kw_only=True)
class ReadJob:
    """A job that is ready to be planned or submitted."""

    job: Job
    model: Model
    notes: tuple[str, ...]
    """What was chosen for the user: lines to show."""


def read_job(file: Path, list_entries: ListEntries | None = None) -> ReadJob:
    """Read `file` and complete it, see `complete_job`; raises `FileError` too."""
    return complete_job(load_job(file), file.resolve().parent, list_entries)


def complete_job(given: Job, folder: Path, list_entries: ListEntries | None = None) -> ReadJob:
    """Read the model of a job whose file is in `folder`; pin the commit of a model of the Hub, and the tokenizer.

    `list_entries` asks a server for its catalogue, which a job's model may be in; its version is pinned.

    Raises `ModelError`, `InputError` for fields that contradict each other or the model, or `DataError` if the
    tokenizer has more ids than the model's vocabulary or conversations have no chat template.
    """
    if given.command is not None:
        words = " ".join(given.command.arguments)[:MAX_SHOWN_CHARS]
        return ReadJob(job=given, model=COMMAND_MODEL, notes=(f"command: {given.command.num_ranks} ranks of {words}",))
    if is_catalogue_name(given.model):
        return complete_from_catalogue(given, list_entries)
    asked, hub_notes = pin_model(given, folder)
    model = load_model(asked.model)
    check_job(asked, model)
    job = pin_tokenizer(asked)
    check_vocabulary(job, model)
    check_chat_template(job)
    notes = hub_notes if not job.trains else (*hub_notes, describe_tokenizer(asked, job))
    return ReadJob(job=job, model=model, notes=notes)


def complete_from_catalogue(given: Job, list_entries: ListEntries | None) -> ReadJob:
    """Return a job whose model is in the catalogue, with version and tokenizer pinned, as `complete_job` does."""
    found = find_model(list_entries, given.model)
    tokenizer = given.data.tokenizer
    if tokenizer == MODEL_TOKENIZER:
        tokenizer = found.name if found.has_tokenizer else BYTES_TOKENIZER
    data = given.data.model_copy(update={"tokenizer": tokenizer})
    job = given.model_copy(update={"model": found.name, "data": data})
    check_job(job, found.model)
    check_vocabulary(job, found.model)
    check_chat_template(job)
    return ReadJob(job=job, model=found.model, notes=(f"model: {found.name}", f"tokenizer: {tokenizer}"))


def pin_model(job: Job, folder: Path) -> tuple[Job, tuple[str, ...]]:
    """Return `job` with the name of a Hub model replaced by its folder and commit, and what to say of it."""
    name = HubName.parse(job.model) if job.model.startswith(HUB_SCHEME) else None
    if name is None:
        return job, ()
    try:
        found = fetch_hub_model(name, needs_weights=job.task != "pretrain" and job.compute == "real")
    except ModelError as error:
        raise ModelError(f"no folder {folder / name.repository}; {error.message}", hint=error.hint) from error
    pinned = job.model_copy(update={"model": str(found.folder), "model_source": found.source})
    return pinned, (f"model: {found.source} of the Hub, in {found.folder}",)
