"""An attacker that can write the database, but not the state folder or an anchor: what the audit log shows of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from isthmus.control.server.backup_file import check_store_of, write_backup
from isthmus.control.server.log_end_file import AuditEndFile, LogEndFile
from isthmus.control.server.restore_store import restore_backup
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.server.stored_log import LogReport
from isthmus.control.state.events import JobCancelled
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.tables.audit_queries import AUDIT_FIELDS, AuditDamagedError
from isthmus.core.errors import ConflictError, IsthmusError
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from isthmus.core.views.audit_chain import PRUNED, audit_start, line_end, next_line

pytestmark = pytest.mark.attack
NO_TRIGGERS = ("DROP TRIGGER audit_unchanged", "DROP TRIGGER audit_kept")


def opened(folder: Path) -> SqliteStore:
    """Open the store of a folder as a server does: it follows both ends that the folder knows."""
    folder.mkdir(exist_ok=True)
    store = open_store(ServerConfig(state=folder))
    assert isinstance(store, SqliteStore)
    try:
        LogEndFile(folder).follow(store)
        AuditEndFile(folder).follow(store)
    except BaseException:
        store.close()
        raise
    return store


def act(number: int) -> AuditRecord:
    return AuditRecord(at_s=1e9 + number, action="job-cancelled", actor="ann", role="user", subject=f"job-{number}")


def log_of(folder: Path, num_acts: int = 20) -> Path:
    """Write acts with their events as a server does; return the database."""
    store = opened(folder)
    for number in range(1, num_acts + 1):
        store.append([JobCancelled(now_s=float(number), job_id=f"job-{number}")], audit=[act(number)])
    store.close()
    return folder / "isthmus.db"


def change(database: Path, *statements: str) -> None:
    """Change a database as an administrator of it can: without its triggers."""
    with closing(sqlite3.connect(database)) as db, db:
        for statement in (*NO_TRIGGERS, *statements):
            db.execute(statement)


def checked(folder: Path) -> LogReport:
    return check_store_of(ServerConfig(state=folder))


def refuses(folder: Path) -> None:
    """The server does not start on the store."""
    with pytest.raises(AuditDamagedError):
        opened(folder)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE audit SET actor = 'bob' WHERE number = 7", "line 7 or the one before it was changed"),
        ("UPDATE audit SET at_s = at_s + 1 WHERE number = 7", "line 7 or the one before it was changed"),
        ("DELETE FROM audit WHERE number = 7", "line 8 does not follow line 6: lines are missing between them"),
        (
            "UPDATE audit SET number = 27 - number WHERE number IN (13, 14)",
            "line 13 or the one before it was changed",
        ),
        ("DELETE FROM audit WHERE number < 4", "line 4 begins neither this store's log nor follows removed lines"),
        ("UPDATE audit SET hash = '' WHERE number = 7", "line 7 or the one before it was changed"),
        ("UPDATE audit SET hash = 'not hex' WHERE number = 20", "line 20 or the one before it was changed"),
    ],
)
def test_a_changed_missing_or_swapped_line_is_named(tmp_path: Path, statement: str, problem: str) -> None:
    """Also a line that an attacker leaves without its hash: no start chains it again."""
    change(log_of(tmp_path), statement.replace("number = 27 - number", "subject = subject || 'x'"))
    found = checked(tmp_path).problems
    assert found
    assert found[0].startswith(f"audit log: {problem}")


def test_lines_cut_off_at_the_end_stop_the_server(tmp_path: Path) -> None:
    """The rest is a sound chain: the state folder knows how far it went."""
    change(log_of(tmp_path), "DELETE FROM audit WHERE number > 15")
    problem = "audit log: line 20, which was noted before, is missing or another one: lines were cut off"
    assert checked(tmp_path).problems == (problem,)
    refuses(tmp_path)


def test_a_log_that_is_chained_again_is_another_one(tmp_path: Path) -> None:
    """An attacker who computes all hashes gets another end than the one that is known."""
    database, store_id = log_of(tmp_path), LogEndFile(tmp_path).store_id or ""
    end, rows = audit_start(store_id), []
    for number in range(1, 21):
        line = next_line(end, act(number if number != 7 else 99))
        end = line_end(line)
        rows.append([getattr(line, name) for name in AUDIT_FIELDS])
    change(database, "DELETE FROM audit")
    with closing(sqlite3.connect(database)) as db, db:
        db.executemany(f"INSERT INTO audit VALUES ({', '.join('?' * len(AUDIT_FIELDS))})", rows)
    assert "line 20, which was noted before, is missing or another one" in checked(tmp_path).problems[0]
    refuses(tmp_path)


def test_a_running_server_takes_no_act_once_lines_are_gone(tmp_path: Path) -> None:
    """Neither the line nor the event of the act is stored, so nothing is done without a trace."""
    log_of(tmp_path, 5)
    store = opened(tmp_path)
    change(tmp_path / "isthmus.db", "DELETE FROM audit WHERE number > 3")
    with pytest.raises(AuditDamagedError, match="line 5, which was written, is missing"):
        store.append([JobCancelled(now_s=9.0, job_id="unseen")], audit=[act(9)])
    assert len(list(store.events())) == 5
    store.close()


def test_lines_removed_with_a_forged_note_of_their_age_are_missed(tmp_path: Path) -> None:
    """A forged `audit-pruned` line is a further line: the known end is not followed by what it was followed by."""
    database = log_of(tmp_path)
    store = SqliteStore(database)
    cut = store.audit(AuditFilter(), oldest=True)[9]
    store.close()
    change(database, "DELETE FROM audit WHERE number <= 10", "DELETE FROM audit WHERE number = 20")
    store = SqliteStore(database)
    store.append_audit([AuditRecord(at_s=1.0, action=PRUNED, actor="server", subject="10", detail=cut.hash)])
    store.close()
    assert "line 20, which was noted before, is missing or another one" in checked(tmp_path).problems[0]
    refuses(tmp_path)


def test_a_row_of_other_types_is_refused(tmp_path: Path) -> None:
    """SQLite columns take any type; such a row is named as damage, not as a crash."""
    change(log_of(tmp_path), "UPDATE audit SET detail = x'00ff' WHERE number = 3")
    with pytest.raises(IsthmusError, match="a row of the audit log is no line"):
        checked(tmp_path)


def test_a_backup_of_a_damaged_audit_log_is_none(tmp_path: Path) -> None:
    """As for the event log: a copy that does not verify is not kept."""
    change(log_of(tmp_path / "state"), "DELETE FROM audit WHERE number = 7")
    with pytest.raises(ConflictError, match="audit log: line 8 does not follow line 6"):
        write_backup(ServerConfig(state=tmp_path / "state"), tmp_path / "backup.db")
    assert not (tmp_path / "backup.db").exists()


def test_a_restore_keeps_the_chain_and_is_a_line_of_it(tmp_path: Path) -> None:
    """The end that the folder knew was later: the restore resets it, and says so in the log itself."""
    log_of(tmp_path / "state", 5)
    config = ServerConfig(state=tmp_path / "state")
    write_backup(config, tmp_path / "backup.db")
    store = opened(tmp_path / "state")
    store.append_audit([act(6)])
    store.close()
    restore_backup(config, tmp_path / "backup.db", 1e9, ("east",), replaces=True)
    assert checked(tmp_path / "state").problems == ()
    store = opened(tmp_path / "state")
    lines = store.audit(AuditFilter(), limit=100)
    store.close()
    assert [one.subject for one in lines[:5]] == [f"job-{number}" for number in range(1, 6)]
    assert (lines[-1].action, lines[-1].actor) == ("store-restored", "server")
    assert "up to event 5; gone: east" in lines[-1].detail


def test_an_earlier_audit_log_is_chained_once_at_its_migration(tmp_path: Path) -> None:
    """The lines of an earlier version keep numbers and times, get hashes, and are protected as before."""
    database = log_of(tmp_path, 4)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("ALTER TABLE audit DROP COLUMN hash")
        db.execute("DROP TABLE notices")
        db.execute("DELETE FROM migrations WHERE version >= 9")
    (tmp_path / "audit-end").unlink()
    store = opened(tmp_path)
    assert [one.subject for one in store.audit(AuditFilter())] == [f"job-{number}" for number in range(1, 5)]
    store.append_audit([act(5)])
    store.close()
    assert checked(tmp_path).problems == ()
    with closing(sqlite3.connect(database)) as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute("UPDATE audit SET hash = 'x'")
