"""`LedgerWatch`: recounts a ledger as it grows, so that a scrape costs what was booked since the last one."""

from __future__ import annotations

from isthmus.control.accounting.ledger import Ledger


class LedgerWatch:
    """Sums of all transactions seen: an intact ledger has sum 0, and no entry without its counterpart."""

    def __init__(self) -> None:
        self._num_seen = 0
        self.num_entries = 0
        self.sum_millionths = 0
        self.num_unpaired = 0

    def follow(self, ledger: Ledger) -> None:
        """Count the transactions that are new; all of them in a ledger that is shorter than the last one."""
        if len(ledger.transactions) < self._num_seen:
            self._num_seen = self.num_entries = self.sum_millionths = self.num_unpaired = 0
        for one in ledger.transactions[self._num_seen :]:
            total = sum(millionths for _, millionths in one.entries)
            self.num_entries += len(one.entries)
            self.sum_millionths += total
            self.num_unpaired += len(one.entries) if total or len(one.entries) < 2 else 0
        self._num_seen = len(ledger.transactions)
