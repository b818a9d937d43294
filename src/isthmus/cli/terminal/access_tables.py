"""Terminal tables of tokens and of the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cli.history_text import local_time
from isthmus.cli.terminal.folding_table import FoldingTable
from isthmus.core.views.access_views import AuditRecord, TokenInfo


def token_table(tokens: Sequence[TokenInfo]) -> FoldingTable:
    """Return the tokens, oldest first."""
    rows = [
        (one.id, one.role, one.name, _state(one), local_time(one.created_s), _end(one), one.created_by or "-")
        for one in tokens
    ]
    return FoldingTable("Tokens", ("id", "role", "name", "state", "created", "ends", "created by"), rows, "")


def audit_table(records: Sequence[AuditRecord]) -> FoldingTable:
    """Return audit records in order."""
    rows = [
        (local_time(one.at_s), one.action, _actor(one), one.address or "-", one.subject or "-", one.detail)
        for one in records
    ]
    return FoldingTable("Audit log", ("time", "action", "by", "from", "on", "detail"), rows, "")


def _state(token: TokenInfo) -> str:
    return f"{token.state}, grants high" if token.high else token.state


def _end(token: TokenInfo) -> str:
    end_s = token.expires_s if token.revoked_s is None else token.revoked_s
    return "when revoked" if end_s is None else local_time(end_s)


def _actor(record: AuditRecord) -> str:
    return " ".join(part for part in (record.role, record.actor, record.token) if part) or "no valid token"
