"""Definitions shared by all packages: domain models, user files, messages between processes, errors."""
