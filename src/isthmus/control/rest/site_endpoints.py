"""The endpoints of sites: which agent a site is bound to, and whether it takes new parts."""

from __future__ import annotations

from fastapi import APIRouter

from isthmus.control.rest.json_route import JsonRoute
from isthmus.control.rest.request_context import CurrentCaller, Service
from isthmus.control.rest.rest_bodies import error_responses
from isthmus.control.service import auth
from isthmus.core.base_model import Name
from isthmus.core.errors import ConflictError, NotFoundError, QuotaError
from isthmus.core.views.api_views import ClusterView, PoolView
from isthmus.core.views.site_views import (
    DrainRequest,
    InvitationRequest,
    InvitationView,
    InvitationWithCode,
    JoinedView,
    JoinRequest,
    KeyRequest,
    LeaveRequest,
    LeaveView,
)

site_router = APIRouter(prefix="/v1", route_class=JsonRoute)


@site_router.post("/sites/{cluster}/gone", responses=error_responses(NotFoundError, ConflictError))
def declare_site_gone(cluster: Name, caller: CurrentCaller, service: Service) -> ClusterView:
    """Count everything of the pool at a lost site as ended (admin only). Its agent is never admitted again.

    If processes still run there, two attempts of their jobs may run at once and damage their checkpoints.
    """
    auth.require_role(caller)
    line = service.audit.line("site-gone", caller, cluster)
    return _site(service.declare_site_gone(cluster, caller.name, line), cluster)


@site_router.post("/sites/{cluster}/enrol", responses=error_responses(NotFoundError, ConflictError))
def enrol_site(cluster: Name, caller: CurrentCaller, service: Service) -> ClusterView:
    """Let the next new agent of a cluster take the place of the enrolled one (admin, or the cluster's owner)."""
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    line = service.audit.line("site-enrolling", caller, cluster)
    return _site(service.enrol_site(cluster, caller.name, line), cluster)


@site_router.post("/sites/{cluster}/cordon", responses=error_responses(NotFoundError, ConflictError))
def cordon_site(cluster: Name, caller: CurrentCaller, service: Service) -> ClusterView:
    """Close a site to new parts (admin, or its owner); what runs there goes on."""
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.sites.cordon(caller, cluster, cordoned=True)


@site_router.post("/sites/{cluster}/uncordon", responses=error_responses(NotFoundError, ConflictError))
def uncordon_site(cluster: Name, caller: CurrentCaller, service: Service) -> ClusterView:
    """Open a cordoned or drained site again (admin, or its owner; a cordon of an admin: an admin)."""
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.sites.cordon(caller, cluster, cordoned=False)


@site_router.post("/sites/{cluster}/drain", responses=error_responses(NotFoundError, ConflictError))
def drain_site(cluster: Name, request: DrainRequest, caller: CurrentCaller, service: Service) -> ClusterView:
    """Close a site to new parts; its jobs save a checkpoint and go on elsewhere, or wait (admin, or its owner).

    A job that has saved none within `limit_s` goes on from an earlier checkpoint. Repeating it shortens the limit.
    """
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.sites.drain(caller, cluster, request)


@site_router.post("/sites/{cluster}/leave", responses=error_responses(NotFoundError, ConflictError))
def leave_pool(cluster: Name, request: LeaveRequest, caller: CurrentCaller, service: Service) -> LeaveView:
    """Drain a site, end its agent and remove it from the pool (admin, or its owner); repeat it until it is `gone`.

    Refused while the site has the only checkpoints of a job, unless `discards_checkpoints`.
    """
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.sites.leave(caller, cluster, request)


@site_router.post("/agents/{cluster}/left", responses=error_responses(ConflictError))
def report_agent_left(cluster: Name, caller: CurrentCaller, service: Service) -> LeaveView:
    """Remove a drained site that leaves: its agent has ended and sends this last. Repeating it changes nothing."""
    auth.require_role(caller, "owner")
    owner = service.agents.owner_of(cluster)
    if owner is not None:
        auth.require_site(caller, cluster, owner)
    service.sites.agent_left(caller, cluster)
    return LeaveView(site=cluster, gone=True)


@site_router.post("/sites/{cluster}/accept", responses=error_responses(NotFoundError, ConflictError))
def accept_site(cluster: Name, caller: CurrentCaller, service: Service) -> ClusterView:
    """End the probation of a site (admin only); otherwise it ends by itself."""
    auth.require_role(caller)
    return service.sites.accept(caller, cluster)


@site_router.post("/invitations", status_code=201, responses=error_responses(ConflictError))
def invite_owner(request: InvitationRequest, caller: CurrentCaller, service: Service) -> InvitationWithCode:
    """Make a code by which an owner joins one cluster within an hour (admin only). Only this response contains it."""
    auth.require_role(caller)
    return service.invite(caller, request)


@site_router.get("/invitations", responses=error_responses())
def list_invitations(caller: CurrentCaller, service: Service) -> list[InvitationView]:
    """List the invitations without their codes (admin only). `POST /v1/tokens/ID/revoke` takes one back."""
    auth.require_role(caller)
    return list(service.site_keys.invitations())


@site_router.post("/join", responses=error_responses(ConflictError, QuotaError))
def join_pool(request: JoinRequest, caller: CurrentCaller, service: Service) -> JoinedView:
    """Join a cluster; the token of the request is the code of an invitation. Repeat it if the answer is lost."""
    service.agents.check_joining(request.cluster)
    return service.site_keys.join(caller, request)


@site_router.post("/agents/{cluster}/key", responses=error_responses(NotFoundError, ConflictError))
def renew_key(cluster: Name, request: KeyRequest, caller: CurrentCaller, service: Service) -> JoinedView:
    """Accept the next key of a site's agent; the present one ends when the next one is used."""
    auth.require_site(caller, cluster, service.agents.owner_of(cluster))
    return service.site_keys.renew(caller, cluster, request)


def _site(view: PoolView, cluster: str) -> ClusterView:
    return next(one for one in view.clusters if one.cluster.name == cluster)
