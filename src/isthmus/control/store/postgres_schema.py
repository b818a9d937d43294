"""The schema of `PostgresStore`: one migration per version, applied once."""

from __future__ import annotations

from typing import Any

import psycopg

from isthmus.control.store.log_chain import OtherStoreError, chain_rows, chain_start
from isthmus.control.store.tables.audit_queries import AUDIT_FIELDS, chain_lines
from isthmus.core.errors import ProtocolError

MIGRATIONS = (
    """
    CREATE TABLE events (number BIGINT PRIMARY KEY, body TEXT NOT NULL);
    CREATE TABLE metrics (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        job TEXT NOT NULL, attempt BIGINT NOT NULL, rank BIGINT NOT NULL, step BIGINT NOT NULL,
        body TEXT NOT NULL, UNIQUE (job, attempt, rank, step)
    );
    CREATE INDEX metrics_of_job ON metrics (job, number);
    CREATE TABLE logs (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        job TEXT NOT NULL, attempt BIGINT NOT NULL, rank BIGINT NOT NULL,
        start BIGINT NOT NULL, stop BIGINT NOT NULL, body BYTEA NOT NULL
    );
    CREATE INDEX logs_of_job ON logs (job, number);
    CREATE INDEX logs_of_rank ON logs (job, attempt, rank, stop);
    CREATE TABLE tokens (
        digest TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created_s DOUBLE PRECISION NOT NULL
    );
    """,
    """
    CREATE TABLE heard (cluster TEXT PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL);
    CREATE TABLE leader (
        one BOOLEAN PRIMARY KEY DEFAULT true CHECK (one), beat TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
    );
    """,
    """
    ALTER TABLE events ADD COLUMN hash BYTEA;
    CREATE TABLE identity (one BOOLEAN PRIMARY KEY DEFAULT true CHECK (one), store TEXT NOT NULL);
    """,
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """
    ALTER TABLE tokens ADD COLUMN expires_s DOUBLE PRECISION, ADD COLUMN revoked_s DOUBLE PRECISION,
        ADD COLUMN created_by TEXT NOT NULL DEFAULT '';
    CREATE TABLE audit (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL,
        action TEXT NOT NULL, actor TEXT NOT NULL, role TEXT NOT NULL, token TEXT NOT NULL, address TEXT NOT NULL,
        subject TEXT NOT NULL, detail TEXT NOT NULL
    );
    CREATE FUNCTION audit_refusal() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'the audit log is append-only and keeps its records for 365 days';
    END $$;
    CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit FOR EACH ROW EXECUTE FUNCTION audit_refusal();
    CREATE TRIGGER audit_kept BEFORE DELETE ON audit FOR EACH ROW
        WHEN (old.at_s > extract(epoch FROM now()) - 86400 * 365) EXECUTE FUNCTION audit_refusal();
    """,
    """
    CREATE TABLE bases (
        number BIGINT PRIMARY KEY, hash BYTEA NOT NULL, made_s DOUBLE PRECISION NOT NULL, active INTEGER NOT NULL,
        body BYTEA NOT NULL
    );
    """,
    "ALTER TABLE tokens ADD COLUMN high INTEGER NOT NULL DEFAULT 0",
    """
    ALTER TABLE tokens ADD COLUMN site TEXT NOT NULL DEFAULT '', ADD COLUMN replaces TEXT NOT NULL DEFAULT '';
    """,
    "ALTER TABLE tokens ADD COLUMN session_of TEXT NOT NULL DEFAULT ''",
    """
    ALTER TABLE audit ADD COLUMN hash TEXT NOT NULL DEFAULT '';
    ALTER TABLE audit ALTER COLUMN number DROP IDENTITY;
    """,
    """
    CREATE TABLE notices (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, batch BIGINT NOT NULL, body TEXT NOT NULL
    );
    """,
)
"""Migrations from each schema version to the next; the first one creates version 1."""
AUDIT_CHAINED_VERSION = 10
"""The version that chains the audit log; later ones never do it again, or a forged row could be chained."""

SCHEMA_LOCK = 0x15_7468_6D75_7300
"""Advisory lock for schema migrations."""


def migrate(db: psycopg.Connection[Any], expected_id: str | None, new_id: str) -> str:
    """Migrate the schema to the newest version, inside the caller's transaction; return the store's identity.

    Raises `OtherStoreError` for another identity than `expected_id` (before any change), `ProtocolError` if the schema
    is newer than this version of isthmus supports, and psycopg's errors.
    """
    db.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
    if expected_id is not None and (identity := _identity(db)) != expected_id:
        raise OtherStoreError(expected_id, identity)
    db.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(version INTEGER PRIMARY KEY, applied TIMESTAMPTZ NOT NULL DEFAULT now())"
    )
    found = db.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    present = int(found[0]) if found else 0
    if present > len(MIGRATIONS):
        raise ProtocolError(
            f"the store has schema version {present}; this server supports versions up to {len(MIGRATIONS)}",
            hint="start the version of isthmus that wrote it, or a newer one",
        )
    for version, script in enumerate(MIGRATIONS[present:], start=present + 1):
        db.execute(script.encode())
        db.execute("INSERT INTO migrations (version) VALUES (%s)", (version,))
    known = _identity(db)
    if present < AUDIT_CHAINED_VERSION:
        _chain_audit(db, known or new_id)
    if known is None:
        db.execute("INSERT INTO identity (store) VALUES (%s)", (new_id,))
        _chain(db, new_id)
    return known or new_id


def _chain_audit(db: psycopg.Connection[Any], store_id: str) -> None:
    """Add the hashes to an audit log of an earlier version, whose rows a trigger protects."""
    db.execute("ALTER TABLE audit DISABLE TRIGGER audit_unchanged")
    columns = ", ".join(AUDIT_FIELDS[:-1])
    rows = db.execute(f"SELECT {columns} FROM audit ORDER BY number".encode()).fetchall()  # noqa: S608 - names of a module
    with db.cursor() as cursor:
        cursor.executemany("UPDATE audit SET hash = %s WHERE number = %s", chain_lines(store_id, rows))
    db.execute("ALTER TABLE audit ENABLE TRIGGER audit_unchanged")


def _identity(db: psycopg.Connection[Any]) -> str | None:
    """Return the identity of the store, None for an empty database and one of an earlier version."""
    present = db.execute("SELECT to_regclass('identity')").fetchone()
    if not present or present[0] is None:
        return None
    found = db.execute("SELECT store FROM identity").fetchone()
    return str(found[0]) if found else None


def _chain(db: psycopg.Connection[Any], store_id: str) -> None:
    """Add the hashes to a log of an earlier version; no server of that version can append afterwards."""
    db.execute("LOCK TABLE events IN EXCLUSIVE MODE")

    def read(after: int) -> list[Any]:
        page = "SELECT number, body FROM events WHERE number > %s ORDER BY number LIMIT 1000"
        return db.execute(page, (after,)).fetchall()

    def write(rows: list[tuple[bytes, int]]) -> None:
        db.execute(
            "UPDATE events SET hash = found.hash FROM unnest(%b::bytea[], %b::bigint[]) AS found (hash, number) "
            "WHERE events.number = found.number",
            ([digest for digest, _ in rows], [number for _, number in rows]),
        )

    chain_rows(chain_start(store_id), read, write)
    db.execute("ALTER TABLE events ALTER COLUMN hash SET NOT NULL")
