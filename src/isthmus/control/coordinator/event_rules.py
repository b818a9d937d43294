"""`EVENT_RULES`: for each kind of event, its check before it is logged and its effect on the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from isthmus.control.coordinator import admission, event_handlers, job_preflight, reachability, site_loss
from isthmus.control.coordinator.accounting import publish_tariff
from isthmus.control.coordinator.accounts import apply_budgets, set_accounts
from isthmus.control.coordinator.catalogue import catalogue_entries
from isthmus.control.coordinator.notices import notices_of
from isthmus.control.coordinator.sites import close_site, join_pool, leave_pool, probation
from isthmus.control.state import reconcile_log
from isthmus.control.state.events import (
    AccountsSet,
    AgentLost,
    AgentReported,
    BudgetsDue,
    DeadlinePassed,
    DrainTimedOut,
    EntryGranted,
    EpochBegan,
    InvitationRevoked,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    LogCompacted,
    LogRestored,
    PeerCheckTimedOut,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    PreflightTimedOut,
    ProbationEnded,
    Restarted,
    RunLeaseEnded,
    SiteAccepted,
    SiteChecked,
    SiteCordoned,
    SiteDraining,
    SiteEnrolling,
    SiteGone,
    SiteInvited,
    SiteJoined,
    SiteLeft,
    SubscriptionSet,
    TariffPublished,
    UnknownJobEnded,
    VersionAdded,
    VersionRemoved,
)
from isthmus.control.state.job_records import PoolState


class EventRule(NamedTuple):
    """What the coordinator does with a kind of event."""

    # Read only: returns whether the event changes the state; raises if it is not allowed.
    admit: Callable[[PoolState, Any], bool]
    # Applies an admitted event.
    handle: Callable[[PoolState, Any], None]


EVENT_RULES: Mapping[type[Any], EventRule] = MappingProxyType(
    {
        JobSubmitted: EventRule(admission.admit_submission, event_handlers.add_job),
        PlansMade: EventRule(admission.admit_plans, event_handlers.accept_plans),
        PlanningFailed: EventRule(admission.admit_plans, event_handlers.fail_planning),
        PlanChosen: EventRule(admission.admit_choice, event_handlers.assign_chosen_plan),
        PreemptionAgreed: EventRule(admission.admit_preemption, event_handlers.begin_agreed_preemption),
        JobCancelled: EventRule(admission.admit_cancellation, event_handlers.cancel_job),
        JobDeleted: EventRule(admission.admit_deletion, event_handlers.delete_job),
        AgentReported: EventRule(admission.admit_report, event_handlers.accept_report),
        SiteChecked: EventRule(admission.admit_site_check, job_preflight.add_site_check),
        PreflightTimedOut: EventRule(admission.admit_preflight_timeout, job_preflight.end_unanswered_preflight),
        PeerCheckTimedOut: EventRule(admission.admit_peer_check_timeout, reachability.end_unanswered_check),
        AgentLost: EventRule(admission.admit_agent_loss, event_handlers.disconnect_cluster),
        RunLeaseEnded: EventRule(site_loss.admit_lease_end, site_loss.end_parts_by_lease),
        SiteGone: EventRule(site_loss.admit_site_gone, site_loss.declare_site_gone),
        SiteEnrolling: EventRule(site_loss.admit_enrolling, site_loss.agree_to_enrolment),
        SiteInvited: EventRule(join_pool.admit_invitation, join_pool.add_invitation),
        InvitationRevoked: EventRule(join_pool.admit_revocation, join_pool.revoke_invitation),
        SiteJoined: EventRule(join_pool.admit_join, join_pool.add_site),
        SiteAccepted: EventRule(probation.admit_acceptance, probation.end_probation),
        ProbationEnded: EventRule(probation.admit_probation_end, probation.end_probation),
        SiteCordoned: EventRule(close_site.admit_cordon, close_site.set_cordon),
        SiteDraining: EventRule(close_site.admit_drain, close_site.begin_drain),
        DrainTimedOut: EventRule(close_site.admit_drain_timeout, close_site.end_drain_deadline),
        SiteLeft: EventRule(leave_pool.admit_site_left, leave_pool.remove_site),
        DeadlinePassed: EventRule(admission.admit_deadline, event_handlers.end_overdue_state),
        EpochBegan: EventRule(admission.admit_epoch, event_handlers.begin_epoch),
        LogRestored: EventRule(reconcile_log.admit_restored, reconcile_log.begin_reconciliation),
        LogCompacted: EventRule(admission.admit_compaction, event_handlers.keep_state),
        UnknownJobEnded: EventRule(reconcile_log.admit_unknown_end, reconcile_log.end_unknown_job),
        VersionAdded: EventRule(catalogue_entries.admit_version, catalogue_entries.add_version),
        EntryGranted: EventRule(catalogue_entries.admit_grant, catalogue_entries.change_grant),
        VersionRemoved: EventRule(catalogue_entries.admit_removal, catalogue_entries.remove_version),
        PoolSet: EventRule(admission.admit_pool, event_handlers.set_pool),
        TariffPublished: EventRule(publish_tariff.admit_tariff, publish_tariff.apply_tariff),
        SubscriptionSet: EventRule(notices_of.admit_subscription, notices_of.set_subscription),
        AccountsSet: EventRule(set_accounts.admit_accounts, apply_budgets.apply_accounts),
        BudgetsDue: EventRule(apply_budgets.admit_budgets, apply_budgets.apply_budgets),
        # Handled without being admitted or logged.
        Restarted: EventRule(admission.admit_restart, event_handlers.reset_agent_timeouts),
    }
)
