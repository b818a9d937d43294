"""The endpoints of the catalogue of models and data sets. Bodies are models of `isthmus.core`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service import auth
from isthmus.core.base_model import Name
from isthmus.core.catalogue import ContentDigest, CopyKey, EntryKind, FileManifest
from isthmus.core.errors import ConflictError, NotFoundError, QuotaError, TooLargeError
from isthmus.core.views.catalogue_views import EntryView, GrantChange, VersionAddition

KindPath = Annotated[EntryKind, Path(description="kind of the entry")]
VersionQuery = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{8,64}$", description="first digits of a version; without it the newest")
]
RemovedQuery = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{8,64}$", description="first digits of a version; without it all of them")
]

catalogue_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@catalogue_router.post(
    "/catalogue", status_code=201, responses=error_responses(ConflictError, QuotaError, TooLargeError)
)
def add_version(addition: VersionAddition, caller: CurrentCaller, service: Service) -> EntryView:
    """Add a version to an entry of the caller; the first one makes the entry."""
    return service.catalogue.add(caller, addition)


@catalogue_router.get("/catalogue/{kind}", responses=error_responses())
def list_entries(kind: KindPath, caller: CurrentCaller, service: Service) -> list[EntryView]:
    """List the entries that the caller owns or was granted (an admin: all), with versions and copies."""
    return list(service.catalogue.list(caller, kind))


@catalogue_router.get("/catalogue/{kind}/{owner}/{name}", responses=error_responses(NotFoundError))
def get_entry(kind: KindPath, owner: Name, name: Name, caller: CurrentCaller, service: Service) -> EntryView:
    """Return an entry; one that the caller may not use does not exist for it."""
    return service.catalogue.entry(caller, kind, owner, name)


@catalogue_router.get("/catalogue/{kind}/{owner}/{name}/manifest", responses=error_responses(NotFoundError))
def get_manifest(
    kind: KindPath, owner: Name, name: Name, caller: CurrentCaller, service: Service, version: VersionQuery = None
) -> FileManifest:
    """Return the files of a version with their sizes and digests."""
    return service.catalogue.manifest(caller, kind, owner, name, version)


@catalogue_router.post(
    "/catalogue/{kind}/{owner}/{name}/grants", responses=error_responses(NotFoundError, ConflictError)
)
def change_grant(
    kind: KindPath, owner: Name, name: Name, change: GrantChange, caller: CurrentCaller, service: Service
) -> EntryView:
    """Grant an entry of the caller to a user, or take the grant back."""
    return service.catalogue.grant(caller, kind, owner, name, change)


@catalogue_router.delete(
    "/catalogue/{kind}/{owner}/{name}", status_code=204, responses=error_responses(NotFoundError, ConflictError)
)
def remove_version(
    kind: KindPath, owner: Name, name: Name, caller: CurrentCaller, service: Service, version: RemovedQuery = None
) -> None:
    """Remove a version of an entry of the caller, or the entry; sites drop their copies."""
    service.catalogue.remove(caller, kind, owner, name, version)


@catalogue_router.get("/agents/{cluster}/versions/{owner}/{version}", responses=error_responses(NotFoundError))
def get_ordered_manifest(
    cluster: Name, owner: Name, version: ContentDigest, caller: CurrentCaller, service: Service
) -> FileManifest:
    """Return the files of a version that a part at the cluster needs, for the cluster's agent."""
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.catalogue.ordered_manifest(cluster, CopyKey(owner=owner, version=version))
