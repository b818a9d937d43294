"""`SitePublisher`: completes a checkpoint whose parts lie at sites that share no folder.

    1. Each rank has written its part at its site. It sends copies to ranks at other sites, at a part of a link's time,
       and receives those that it keeps. A holder answers once a copy is durable and has the right checksum.
    2. Each rank reports to rank 0: its part and the stores with a copy, or what failed.
    3. With all reports, rank 0 makes layout and manifest, and puts them into the object store if the job has one; then
       the leader of each store publishes them there.
    4. Once all leaders have answered, the checkpoint is complete: each store removes its older ones.

A failure anywhere becomes the verdict of step 3 at all ranks, and nothing of the checkpoint is left. After step 2 all
bytes are durable, so a crash in step 3 leaves a checkpoint that the next start completes (`site_recovery.py`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import UnavailableError
from isthmus.core.process.state_folder_lock import fsync_path
from isthmus.core.runs.run_folder import claimed_job
from isthmus.train.checkpoint.checkpoint_folder import MAX_MANIFEST_BYTES, CheckpointFile, Manifest, SiteCopy
from isthmus.train.checkpoint.layout.checkpoint_layout import LAYOUT_FILE, MAX_LAYOUT_BYTES, parse_bounded
from isthmus.train.checkpoint.objects.object_copies import ObjectCopies
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_stores import SiteStores, choose_copy_holders
from isthmus.train.checkpoint.write_checkpoint import (
    RankPart,
    check_rank_part,
    merged_layout,
    publish_at_site,
    read_rank_part,
    remove_older,
    work_folder,
)

LINK_SHARE = 0.5
"""Fraction of the time in which a copy occupies its link: training goes first."""

REPORT_AFTER_S = 3.0
"""A wait for other ranks is reported after this time."""

_COPY, _COPY_ANSWER, _REPORT, _VERDICT, _LAYOUT, _PUBLISHED, _COMPLETE = range(7)
"""Topics of the messages."""

_Message = TypeVar("_Message", bound=FrozenModel)
_Value = TypeVar("_Value")
Reason = Annotated[str, Field(max_length=4000)]


class _Offer(FrozenModel):
    """A part that its rank sends to a holder; without a part, its rank has failed."""

    part: RankPart | None = None


class _Report(FrozenModel):
    """What a rank reports to rank 0: its part, who keeps a copy (stores, the object store), or a failure."""

    part: RankPart | None = None
    copies: tuple[NonNegativeInt, ...] = ()
    is_stored: bool = False
    failure: Reason = ""


class _Answer(FrozenModel):
    """An answer: a failure, or none."""

    failure: Reason = ""


class _Verdict(FrozenModel):
    """The verdict of rank 0 on all reports: the manifest, or a failure."""

    manifest: Manifest | None = None
    failure: Reason = ""


class SitePublisher:
    """Completes the checkpoints of `rank` with write id `write_id`, whose parts are in `folder` at each site.

    `copies` is the number of copies of each part at other sites, fewer where there are fewer sites; `keep` the number
    of checkpoints that each site keeps. `objects` gets a further copy of each part. `report_wait` is called with the
    reason of a long wait, and "" at its end.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        stores: SiteStores,
        channel: PeerChannel,
        *,
        write_id: str,
        copies: int,
        keep: int,
        objects: ObjectCopies | None = None,
        report_wait: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._folder, self._rank, self._stores, self._channel = folder, rank, stores, channel
        self._write_id, self._keep, self._report_wait = write_id, keep, report_wait
        self._objects = objects
        self._holders = choose_copy_holders(stores, copies)
        self._has_reported = False

    def complete(self, step: int, samples: int, failure: str = "") -> None:
        """Complete the checkpoint after `step` steps, once this rank's part is written or its write has failed.

        Returns once it is complete at all sites. Raises `UnavailableError` with the reason of any rank, and
        `PeerError` if a rank is lost.
        """
        work = work_folder(self._folder, step, self._write_id)
        try:
            verdict, layout = self._agree(self._exchange_copies(work, step, failure), step, samples)
            failure = verdict.failure
            if verdict.manifest is not None:
                failure = self._publish(verdict.manifest, layout)
        finally:
            if self._has_reported:
                self._report_wait("")
        if failure:
            if self._is_leader:
                shutil.rmtree(work, ignore_errors=True)
            if self._objects is not None and self._rank == 0:
                self._objects.remove((step, self._write_id))
            raise UnavailableError(f"the checkpoint after step {step} failed: {failure}")
        if self._is_leader:
            remove_older(self._folder, step, self._keep)
        if self._objects is not None and self._rank == 0:
            with suppress(UnavailableError):  # stays for the next time
                self._objects.remove_older((step, self._write_id), self._keep)

    @property
    def _is_leader(self) -> bool:
        return self._stores.of_rank[self._rank] == self._rank

    def _exchange_copies(self, work: Path, step: int, failure: str) -> _Report:
        """Send this rank's part to its holders and the object store, keep those of others; return the report."""
        part = None
        if not failure:
            try:
                part = read_rank_part(work, self._rank)
            except (OSError, UnavailableError) as error:
                failure = str(error)
        mine = self._holders[self._rank]
        kept = [rank for rank, holders in enumerate(self._holders) if self._rank in holders]
        with ThreadPoolExecutor(len(mine) + len(kept) + 1, thread_name_prefix="isthmus-part") as pool:
            exchanged = [pool.submit(self._send_copy, holder, work, part) for holder in mine]
            exchanged += [pool.submit(self._keep_copy, owner, work) for owner in kept]
            named = ", ".join(f"rank {one} (site {self._stores.clusters[one]})" for one in (*mine, *kept))
            if self._objects is not None and part is not None:
                exchanged.append(pool.submit(self._store_copy, self._objects, step, work, part))
                named = f"{named}, the object store" if named else "the object store"
            failures = [one for future in exchanged if (one := self._result(future, f"waits for copies with {named}"))]
        failure = failure or next(iter(failures), "")
        if failure:
            return _Report(failure=failure[:4000])
        copies = tuple(self._stores.of_rank[one] for one in mine)
        return _Report(part=part, copies=copies, is_stored=self._objects is not None)

    def _store_copy(self, objects: ObjectCopies, step: int, work: Path, part: RankPart) -> str:
        """Store this rank's part in the object store; return what failed."""
        try:
            for one in part.files:
                objects.put_file((step, self._write_id), work / one.name, one)
        except UnavailableError as error:
            return str(error)
        return ""

    def _send_copy(self, holder: int, work: Path, part: RankPart | None) -> str:
        """Send this rank's part to `holder`; return what failed there."""
        self._channel.send_text(holder, _COPY, _Offer(part=part).model_dump_json().encode())
        if part is None:
            return ""
        for one in part.files:
            self._channel.send_file(holder, _COPY, work / one.name, one.num_bytes, LINK_SHARE)
        answer = self._channel.receive_text(holder, _COPY_ANSWER, MAX_LAYOUT_BYTES)
        return parse_bounded(_Answer, answer, f"rank {holder}").failure

    def _keep_copy(self, owner: int, work: Path) -> str:
        """Receive and keep the part of `owner`; return what failed here."""
        offer = parse_bounded(_Offer, self._channel.receive_text(owner, _COPY, MAX_LAYOUT_BYTES), f"rank {owner}")
        if offer.part is None:
            return ""
        check_rank_part(offer.part, owner, f"the part of rank {owner}")
        failure = ""
        with suppress(OSError):  # the first file has the reason
            work.mkdir(parents=True, exist_ok=True)
        for one in offer.part.files:
            failure = self._channel.receive_file(owner, _COPY, work / one.name, one.num_bytes, one.sha256) or failure
        if not failure:
            fsync_path(work)
        answer = _Answer(failure=failure[:4000]).model_dump_json().encode()
        self._channel.send_text(owner, _COPY_ANSWER, answer)
        return failure

    def _agree(self, report: _Report, step: int, samples: int) -> tuple[_Verdict, bytes]:
        """Return the verdict of rank 0 on the reports of all ranks and, at a leader, the layout."""
        if self._rank:
            reason = f"waits for rank 0 (site {self._stores.clusters[0]}) to complete checkpoint {step}"
            self._channel.send_text(0, _REPORT, report.model_dump_json().encode())
            text = self._await(lambda: self._channel.receive_text(0, _VERDICT, MAX_MANIFEST_BYTES), reason)
            verdict = parse_bounded(_Verdict, text, "rank 0", MAX_MANIFEST_BYTES)
            if verdict.manifest is None or not self._is_leader:
                return verdict, b""
            return verdict, self._channel.receive_text(0, _LAYOUT, MAX_LAYOUT_BYTES)
        reports = [report, *self._gather(_REPORT, _Report, f"to write their parts of checkpoint {step}")]
        verdict, layout = self._judge(reports, step, samples)
        text = verdict.model_dump_json().encode()
        for rank in range(1, len(self._holders)):
            self._channel.send_text(rank, _VERDICT, text)
            if verdict.manifest is not None and rank in self._stores.leaders:
                self._channel.send_text(rank, _LAYOUT, layout)
        return verdict, layout

    def _judge(self, reports: Sequence[_Report], step: int, samples: int) -> tuple[_Verdict, bytes]:
        """Return manifest and layout of the parts of all ranks, or the first failure."""
        for rank, one in enumerate(reports):
            if one.failure or one.part is None:
                return _Verdict(failure=f"rank {rank}: {one.failure or 'no part'}"[:4000]), b""
        parts = [one.part for one in reports if one.part is not None]
        try:
            for rank, part in enumerate(parts):
                check_rank_part(part, rank, f"the part of rank {rank}")
            layout = merged_layout(parts, f"the checkpoint after step {step}")
        except UnavailableError as error:
            return _Verdict(failure=str(error)[:4000]), b""
        described = CheckpointFile(name=LAYOUT_FILE, num_bytes=len(layout), sha256=hashlib.sha256(layout).hexdigest())
        kept = [(self._stores.of_rank[rank], *one.copies) for rank, one in enumerate(reports)]
        manifest = Manifest(
            step=step,
            samples=samples,
            num_ranks=len(reports),
            files=(*(file for part in parts for file in part.files), described),
            run=claimed_job(self._folder),
            write_id=self._write_id,
            in_object_store=all(one.is_stored for one in reports),
            sites=tuple(
                SiteCopy(
                    site=self._stores.site(store),
                    ranks=tuple(rank for rank, places in enumerate(kept) if store in places),
                )
                for store in self._stores.leaders
            ),
        )
        if self._objects is not None and manifest.in_object_store:
            try:
                self._objects.put_manifest(manifest, layout)
            except UnavailableError as error:
                return _Verdict(failure=str(error)[:4000]), b""
        return _Verdict(manifest=manifest), layout

    def _publish(self, manifest: Manifest, layout: bytes) -> str:
        """Publish at this rank's store if it leads it, and wait until all stores have; return what failed."""
        failure = ""
        if self._is_leader:
            try:
                text = manifest.model_dump_json(indent=1).encode()
                publish_at_site(self._folder, manifest.step, self._write_id, text, layout)
            except OSError as error:
                site = self._stores.clusters[self._rank]
                failure = f"cannot publish it in {self._folder} at site {site}: {error.strerror or error}"[:4000]
        answer = _Answer(failure=failure)
        step = manifest.step
        if self._rank:
            if self._is_leader:
                self._channel.send_text(0, _PUBLISHED, answer.model_dump_json().encode())
            reason = f"waits for all sites to publish checkpoint {step}"
            text = self._await(lambda: self._channel.receive_text(0, _COMPLETE, MAX_LAYOUT_BYTES), reason)
            return parse_bounded(_Answer, text, "rank 0").failure
        answers = [answer, *self._gather(_PUBLISHED, _Answer, f"to publish checkpoint {step}", self._stores.leaders)]
        failure = next((one.failure for one in answers if one.failure), "")
        text = _Answer(failure=failure).model_dump_json().encode()
        for rank in range(1, len(self._holders)):
            self._channel.send_text(rank, _COMPLETE, text)
        return failure

    def _gather(
        self, topic: int, kind: type[_Message], what: str, ranks: Sequence[int] | None = None
    ) -> list[_Message]:
        """Return the messages of `ranks` (all without them) but rank 0, in their order."""
        others = [rank for rank in (range(len(self._holders)) if ranks is None else ranks) if rank]
        found = []
        for rank in others:
            reason = f"waits for rank {rank} (site {self._stores.clusters[rank]}) {what}"
            text = self._await(lambda: self._channel.receive_text(rank, topic, MAX_LAYOUT_BYTES), reason)  # noqa: B023
            found.append(parse_bounded(kind, text, f"rank {rank}"))
        return found

    def _await(self, receive: Callable[[], bytes], reason: str) -> bytes:
        """Return what `receive` returns; report the wait if it is long."""
        with ThreadPoolExecutor(1, thread_name_prefix="isthmus-await") as pool:
            return self._result(pool.submit(receive), reason)

    def _result(self, future: Future[_Value], reason: str) -> _Value:
        """Return the result of a future; report the wait if it is long."""
        if not wait([future], REPORT_AFTER_S).done:
            self._has_reported = True
            self._report_wait(reason)
        return future.result()
