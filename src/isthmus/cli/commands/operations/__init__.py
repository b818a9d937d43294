"""Commands of those who operate a pool: the audit log, notifications, monitoring."""
