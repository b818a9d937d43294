"""Tables of a store beside its event log, in SQL that SQLite and PostgreSQL share."""
