"""`history_page`: one page of a job's history."""

from __future__ import annotations

from dataclasses import asdict

from isthmus.control.state.job_records import JobRecord
from isthmus.core.views.api_views import HistoryEvent, HistoryPage


def history_page(job: JobRecord, after: int, limit: int) -> HistoryPage:
    """Return at most `limit` events of a job with numbers above `after`, in order of arrival."""
    found = [one for one in job.history.entries if one.number > after][:limit]
    return HistoryPage(
        events=tuple(HistoryEvent(**asdict(one)) for one in found),
        next=found[-1].number if found else after,
        dropped=job.history.num_dropped,
    )
