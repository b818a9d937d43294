"""`pack_loss`, `unpack_loss`: the loss that broke a run, as the bytes in which a rank reports it to others."""

from __future__ import annotations

import json

from isthmus.core.errors import PeerError, RestartError

MAX_REPORT_BYTES = 4096

_MAX_TEXT = 300
"""Characters of message and of hint; in JSON each takes 6 bytes at most."""

_MAX_INCARNATION = 2**63


def pack_loss(error: PeerError) -> bytes:
    """Return `error` as bytes, at most `MAX_REPORT_BYTES`."""
    incarnation = error.incarnation if isinstance(error, RestartError) else None
    hint = None if error.hint is None else error.hint[:_MAX_TEXT]
    fields = {"message": error.message[:_MAX_TEXT], "hint": hint, "incarnation": incarnation}
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def unpack_loss(report: bytes) -> PeerError:
    """Return the error that `pack_loss` wrote; raises `ValueError` for anything else."""
    try:
        fields = json.loads(report)
    except RecursionError as error:
        raise ValueError("a loss report that nests too deep") from error
    if not isinstance(fields, dict) or fields.keys() != {"message", "hint", "incarnation"}:
        raise ValueError("a loss report without message, hint and incarnation")
    message, hint, incarnation = fields["message"], fields["hint"], fields["incarnation"]
    if not isinstance(message, str) or not isinstance(hint, str | None):
        raise ValueError("a loss report whose message or hint is not text")
    if incarnation is None:
        return PeerError(message, hint=hint)
    if type(incarnation) is not int or not 0 <= incarnation < _MAX_INCARNATION:
        raise ValueError(f"a loss report with the incarnation {incarnation!r}")
    return RestartError(message, incarnation=incarnation, hint=hint)
