"""Access to the service: known tokens, back-off after failed logins, limits of a caller, and the audit log."""
