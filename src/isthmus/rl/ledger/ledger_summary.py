"""`summarise_ledger`: fates and tokens by owner, and what was lost or doubled."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import asdict, dataclass

from isthmus.rl.ledger.ledger_records import LedgerState


@dataclass(frozen=True, kw_only=True)
class LedgerSummary:
    """Counts of a ledger.

    samples:
        Samples by fate; those without one count as `in_flight`.
    tokens:
        Tokens by owner of the engine, then by fate of the sample; `(environment)` has those of environments.
    lost, doubled:
        Prompts that are neither open nor have a fate, and prompts that are in two batches; both must be 0.
    staleness:
        Trained tokens by the number of versions between the one that sampled them and the one that was trained.
    bytes:
        Bytes over the connections to engines by their owner: `weights_bytes`, `sent_bytes` (weights included) and
        `received_bytes`, as the links carry them.
    audits:
        Samples that were recomputed, by owner: `samples`, and `differing` among them.
    barred:
        Owners that decode no more, and why.
    """

    samples: dict[str, int]
    tokens: dict[str, dict[str, int]]
    lost: int
    doubled: int
    staleness: dict[int, int]
    bytes: dict[str, dict[str, int]]
    audits: dict[str, dict[str, int]]
    barred: dict[str, str]


def summarise_ledger(ledger: LedgerState) -> LedgerSummary:
    """Return the counts of a ledger, worked out from its records, and from what folded ones have left."""
    counts = deepcopy(ledger.folded.counts)
    for sample in ledger.samples():
        counts.add(sample)
    for audit in ledger.audits.values():
        counts.add_audit(audit)
    in_batches = Counter(number for batch in ledger.batches for number in batch)
    kept = {number for number, one in ledger.prompts.items() if one.fate is not None}
    known = kept | ledger.open_prompts.keys() | in_batches.keys()
    return LedgerSummary(
        samples=dict(sorted(counts.samples.items())),
        tokens={owner: dict(sorted(one.items())) for owner, one in sorted(counts.tokens.items())},
        lost=ledger.num_prompts - ledger.folded.prompts - len(known),
        doubled=sum(count > 1 for count in in_batches.values()),
        staleness=dict(sorted(counts.staleness.items())),
        bytes={owner: asdict(one) for owner, one in sorted(ledger.links.items())},
        audits=dict(sorted(counts.audits.items())),
        barred=dict(sorted(ledger.barred.items())),
    )
