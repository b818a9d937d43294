"""`raise_file_limit`: lets this process open as many files as its hard limit allows."""

from __future__ import annotations

import contextlib
import resource

MOST_FILES = 65_536
"""Limit that is enough; some systems have a hard limit of 10^9."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files towards the hard one; return the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
