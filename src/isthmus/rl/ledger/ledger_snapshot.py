"""`dump_ledger` and `restore_ledger`: the whole state of a ledger as JSON values, so that a log need not be whole."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from isthmus.core.errors import InputError
from isthmus.rl.ledger.ledger_records import (
    EngineRecord,
    FoldedAudit,
    FoldedRecords,
    LedgerConfig,
    LedgerState,
    LinkBytes,
    PromptRecord,
    SampleAudit,
    SampleCounts,
    SampleRecord,
    SampleState,
    TokenRange,
)
from isthmus.rl.ledger.rollout_events import SampleKey

_NUMBERS = ("version", "newest", "trainer", "requested", "next_lease", "num_prompts", "first_step")


def dump_ledger(state: LedgerState) -> dict[str, Any]:
    """Return the state, as `restore_ledger` reads it; instructions are not part of it."""
    return {
        "prompts": [_dump_prompt(one) for one in state.prompts.values()],
        "engines": {
            name: {
                "owner": one.owner, "num_slots": one.num_slots, "version": one.version,
                "running": [list(key) for key in one.running],
            }
            for name, one in state.engines.items()
        },
        "folded": _dump_folded(state.folded),
        "batches": [list(one) for one in state.batches],
        "audits": [[*key, one.owner, one.problem] for key, one in state.audits.items()],
        "barred": dict(state.barred),
        "links": {owner: asdict(one) for owner, one in state.links.items()},
        **{name: getattr(state, name) for name in _NUMBERS},
    }  # fmt: skip


def restore_ledger(config: LedgerConfig, content: dict[str, Any]) -> LedgerState:
    """Return the state that `dump_ledger` wrote; raises `InputError` for what is none."""
    try:
        state = LedgerState(config=config, batches=[tuple(int(n) for n in one) for one in content["batches"]])
        for name in _NUMBERS:
            setattr(state, name, content[name])
        state.folded = _restore_folded(content["folded"])
        for one in content["prompts"]:
            record = _restore_prompt(one)
            state.prompts[record.number] = record
            if record.fate is None and record.step is None:
                state.open_prompts[record.number] = record
        for prompt, number, attempt, owner, problem in content.get("audits", ()):
            state.audits[SampleKey(prompt, number, attempt)] = SampleAudit(owner=owner, problem=problem)
        state.barred = dict(content.get("barred", {}))
        state.links = {owner: LinkBytes(**one) for owner, one in content.get("links", {}).items()}
        for name, one in content["engines"].items():
            engine = EngineRecord(owner=one["owner"], num_slots=one["num_slots"], version=one["version"])
            for key in one["running"]:
                sample = state.prompts[key[0]].samples[key[1]]
                engine.running[sample.key] = sample
            state.engines[name] = engine
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"the snapshot of the ledger is damaged: {error!r}", hint="restore its folder") from error
    return state


def _dump_prompt(prompt: PromptRecord) -> dict[str, Any]:
    return {
        "number": prompt.number,
        "samples": [_dump_sample(one) for one in prompt.samples],
        "former": [_dump_sample(one) for one in prompt.former],
        "num_failures": prompt.num_failures, "fate": prompt.fate, "step": prompt.step,
    }  # fmt: skip


def _dump_sample(sample: SampleRecord) -> dict[str, Any]:
    """Return the fields of a sample that differ from those of a new one."""
    blank = SampleRecord(key=sample.key)
    found = {
        one.name: getattr(sample, one.name)
        for one in fields(sample)
        if one.name not in ("key", "ranges") and getattr(sample, one.name) != getattr(blank, one.name)
    }
    return {"key": list(sample.key), "ranges": [asdict(one) for one in sample.ranges], **found}


def _dump_folded(folded: FoldedRecords) -> dict[str, Any]:
    counts = asdict(folded.counts)
    counts["staleness"] = sorted(folded.counts.staleness.items())
    steps = [[step, one.samples, one.recomputed, one.differing] for step, one in folded.steps.items()]
    return {"prompts": folded.prompts, "counts": counts, "steps": steps}


def _restore_folded(content: dict[str, Any]) -> FoldedRecords:
    counts = dict(content["counts"])
    counts["staleness"] = {int(age): int(num) for age, num in counts["staleness"]}
    steps = {
        int(step): FoldedAudit(
            samples=samples, recomputed=recomputed,
            differing=[(SampleKey(*key), owner, problem) for key, owner, problem in differing],
        )
        for step, samples, recomputed, differing in content["steps"]
    }  # fmt: skip
    return FoldedRecords(prompts=int(content["prompts"]), counts=SampleCounts(**counts), steps=steps)


def _restore_prompt(content: dict[str, Any]) -> PromptRecord:
    fate = content["fate"]
    return PromptRecord(
        number=int(content["number"]),
        samples=[_restore_sample(one) for one in content["samples"]],
        former=[_restore_sample(one) for one in content["former"]],
        num_failures=content["num_failures"],
        fate=None if fate is None else SampleState(fate),
        step=content["step"],
    )


def _restore_sample(content: dict[str, Any]) -> SampleRecord:
    values = dict(content)
    return SampleRecord(
        key=SampleKey(*values.pop("key")),
        ranges=[TokenRange(**one) for one in values.pop("ranges")],
        state=SampleState(values.pop("state", SampleState.WAITING)),
        **values,
    )
