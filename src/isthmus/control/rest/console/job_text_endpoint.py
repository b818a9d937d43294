"""The endpoint that reads the text of a job: a page has no YAML parser, and no way to a model's `config.json`."""

from __future__ import annotations

from fastapi import APIRouter

from isthmus.client.read_job import complete_from_catalogue
from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import JobText, error_responses
from isthmus.control.service import auth
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.errors import ModelError, NotFoundError
from isthmus.core.files.user_files import read_job_text
from isthmus.core.job import Job
from isthmus.core.model import COMMAND_MODEL, Model, read_model_text, require_trainable
from isthmus.core.runs.check_job import check_job
from isthmus.core.views.api_views import Submission

job_text_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@job_text_router.post("/jobs:read", responses=error_responses(NotFoundError))
def read_job_from_text(given: JobText, caller: CurrentCaller, service: Service) -> Submission:
    """Return the submission that a `job.yaml` describes, to plan or to submit; nothing is stored, no file is read.

    An error names line and field. Paths are those of the sites. A model that is a folder needs its `config`; a model of
    the catalogue, and a job with a command, need none.
    """
    auth.require_role(caller, "user")
    job, model = _complete(read_job_text(given.text), given.config, caller, service)
    require_trainable(model)
    return Submission(job=job, model=model)


def _complete(job: Job, config: str, caller: Caller, service: ControlService) -> tuple[Job, Model]:
    """Return a job with its model; raise `ModelError` if the model has no dimensions here."""
    if job.command is not None:
        return job, COMMAND_MODEL
    if is_catalogue_name(job.model):
        read = complete_from_catalogue(job, lambda kind: service.catalogue.list(caller, kind))
        return read.job, read.model
    if not config.strip():
        raise ModelError(
            f"the dimensions of {job.model} are in its config.json, at the sites",
            hint="paste or upload the config.json of the model beside the job",
        )
    model = read_model_text(config, job.model)
    check_job(job, model)
    return job, model
