"""Rules of checkpoints of sites that share no disk: complete at all or at none, and restored from what is left."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from isthmus.core.errors import IsthmusError, ProtocolError, UnavailableError
from isthmus.train.checkpoint.checkpoint_folder import newest_valid, read_manifests, verify_rank_file
from isthmus.train.checkpoint.layout.shard_files import rank_file_name
from isthmus.train.checkpoint.sites.fetch_shards import fetch_shards
from isthmus.train.checkpoint.sites.kept_pieces import KeptPieces, remove_kept_pieces
from isthmus.train.checkpoint.sites.site_recovery import find_checkpoint
from isthmus.train.checkpoint.sites.site_stores import SiteStores, choose_copy_holders, group_by_sight
from isthmus.train.process.collect_export import choose_target, collect_export
from tests.train.site_ranks import ROW_BYTES, ROWS, Meet, Rank, Sites, part_of, restore, save
from tests.train.worker_jobs import at_site, make_job, make_plan, run_job, started

pytestmark = pytest.mark.integration

SITES = ("north", "south", "west")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=7), st.integers(0, 3))
def test_ranks_that_see_one_folder_are_a_store(folders: list[str], copies: int) -> None:
    """Two ranks are in one store exactly if they share a folder; copies are in other stores, one in each, evenly."""
    stores = group_by_sight([[one == other for other in folders] for one in folders], folders)
    for rank, one in enumerate(folders):
        assert stores.of_rank[rank] == folders.index(one)
    holders = choose_copy_holders(stores, copies)
    for rank, mine in enumerate(holders):
        used = [folders[one] for one in (rank, *mine)]
        assert len(set(used)) == len(used) == 1 + min(copies, len(set(folders)) - 1)


def test_a_copy_is_at_another_site_if_there_is_one() -> None:
    """Of two stores, one at the same site, the one at another site keeps the copy."""
    stores = SiteStores((0, 1, 2), ("north", "north", "south"))
    assert choose_copy_holders(stores, 1) == ((2,), (2,), (0,))


def test_a_checkpoint_is_complete_at_every_site(meet: Meet, tmp_path: Path) -> None:
    """Each site has the same manifest, its own parts and one copy of another's, and nothing unfinished."""
    sites = meet("north", "north", "south", "west")
    assert sites.ranks[0].stores.of_rank == (0, 0, 2, 3)
    save(sites, 3)
    manifests = {site: next(read_manifests(tmp_path / site)) for site in SITES}
    assert len({one.model_dump_json() for one in manifests.values()}) == 1
    manifest = manifests["north"]
    assert [one.name for one in manifest.files] == [*map(rank_file_name, range(4)), "layout.json"]
    assert sorted(rank for one in manifest.sites for rank in one.ranks) == [0, 0, 1, 1, 2, 2, 3, 3]
    for site in manifest.sites:
        names = {rank_file_name(rank) for rank in site.ranks} | {"manifest.json", "layout.json"}
        assert {one.name for one in (tmp_path / site.site / "step-00000003").iterdir()} == names
        assert not list((tmp_path / site.site).glob("*.tmp"))
    for one in sites.ranks:
        assert verify_rank_file(one.folder, 3, one.rank) > 0, "a preemption verifies each part at its site"


def test_each_site_keeps_its_newest(meet: Meet, tmp_path: Path) -> None:
    """`keep` checkpoints remain at each site."""
    sites = meet(*SITES)
    for step in (1, 2, 3):
        save(sites, step)
    for site in SITES:
        assert [one.step for one in read_manifests(tmp_path / site)] == [3, 2]


def test_the_same_sites_restore_without_moving_bytes(meet: Meet) -> None:
    """A restart of the same plan at the same sites reads its own parts."""
    save(meet(*SITES), 5)
    assert [(step, one.moved) for step, one in restore(meet(*SITES))] == [(5, 0)] * 3


def test_a_site_that_left_is_replaced_by_its_copy(meet: Meet, tmp_path: Path) -> None:
    """Two of three sites have everything; other sites fetch exactly the bytes that they need."""
    save(meet(*SITES), 5)
    shutil.rmtree(tmp_path / "west")
    found = restore(meet("south", "east", "north"))
    assert [step for step, _ in found] == [5, 5, 5]
    whole = ROWS * 4 * 4
    assert sum(one.needed for _, one in found) == whole
    assert found[1][1].moved == found[1][1].needed, "the new site has nothing of its own"
    assert sum(one.moved for _, one in found) <= whole


def test_another_number_of_ranks_restores(meet: Meet) -> None:
    """Parts of four ranks are read by two others under another cut."""
    save(meet("north", "north", "south", "west"), 5)
    assert [step for step, _ in restore(meet("east", "north", "south", "west", "west"))] == [5] * 5


def test_the_only_copy_at_a_site_that_left_is_named(meet: Meet, tmp_path: Path) -> None:
    """Without copies the loss of a site is an error at once, with the site, the ranks and the bytes."""
    save(meet(*SITES), 5, copies=0)
    (tmp_path / "west").rename(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match=r"after step 5, .* of ranks 2 are not here: site west keeps them"):
        restore(meet("north", "south", "east"))


def test_an_older_checkpoint_is_taken_if_the_newest_is_out_of_reach(meet: Meet, tmp_path: Path) -> None:
    """The newest whose bytes are all here counts."""
    save(meet(*SITES), 5)
    save(meet(*SITES), 7, copies=0)
    shutil.rmtree(tmp_path / "west")
    assert [step for step, _ in restore(meet("north", "south"))] == [5, 5]


@pytest.mark.parametrize("file", [rank_file_name(2), "layout.json", "manifest.json"])
def test_damage_at_one_site_is_healed_by_the_copy(meet: Meet, tmp_path: Path, file: str) -> None:
    """A damaged file does not count where it is; the whole one of another site does."""
    save(meet(*SITES), 5)
    place = tmp_path / "west" / "step-00000005" / file
    place.write_bytes(place.read_bytes()[:-1] + b"!")
    assert [step for step, _ in restore(meet(*SITES))] == [5] * 3


def test_a_site_that_cannot_write_fails_the_checkpoint_everywhere(meet: Meet, tmp_path: Path) -> None:
    """The reason reaches all ranks, the checkpoint before stays, and nothing of the failed one is left."""
    sites = meet(*SITES)
    save(sites, 1)
    (tmp_path / "south" / "step-00000002.a1.tmp" / rank_file_name(0)).mkdir(parents=True)  # the place of a copy
    (tmp_path / "south" / "step-00000002.a1.tmp" / rank_file_name(2)).mkdir(parents=True)

    def attempt(one: Rank) -> str:
        with pytest.raises(UnavailableError) as caught:
            one.save(2, [part_of(one.rank, 3, 2)])
        return caught.value.message

    assert all("the checkpoint after step 2 failed: rank" in one for one in sites.each(attempt))
    for site in SITES:
        assert [one.step for one in read_manifests(tmp_path / site)] == [1]
        assert not list((tmp_path / site).glob("*.tmp"))


class KilledError(Exception):
    """The machine of a rank has stopped."""


class Dying:
    """A transport that stops with its rank at its n-th message, or at its n-th of tag `only`."""

    def __init__(self, inner: object, before: int, only: int | None = None) -> None:
        self.inner, self.left, self.only = inner, before, only

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        self.left -= self.only in (None, tag)
        if self.left < 0:
            self.inner.kill()  # type: ignore[attr-defined]
            self.inner.close()  # type: ignore[attr-defined]
            raise KilledError
        return self.inner.send(peer, tag, label, payload)  # type: ignore[attr-defined, no-any-return]

    def receive(self, *arguments: object) -> object:
        return self.inner.receive(*arguments)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_crash_at_any_message_leaves_a_checkpoint(tmp_path: Path, victim: int) -> None:
    """A site dies before any of its messages: the next start finds the step before, or the new one, and goes on.

    1. Step 1 is complete. 2. While step 2 is saved, one site stops before its n-th message. 3. All start again.
    """
    for before in range(100):
        root = tmp_path / str(before)
        first = Sites(root, SITES)
        save(first, 1, keep=1)
        rank = first.ranks[victim]
        dying = Dying(rank.transport, before)
        rank.pass_files_over(dying)  # type: ignore[arg-type]

        def attempt(one: Rank) -> bool:
            try:
                one.save(2, [part_of(one.rank, 3, 2)], write_id="b2", keep=1)
            except (KilledError, IsthmusError):
                return False
            return True

        done = first.each(attempt)
        first.close()
        again = Sites(root, SITES)
        steps = {step for step, _ in restore(again)}
        assert len(steps) == 1
        assert steps <= ({2} if any(done) else {1, 2}), (before, done, steps)
        save(again, 3, write_id="c3", keep=1)
        assert {step for step, _ in restore(again)} == {3}
        again.close()
        if dying.left > 0:
            assert before > 3
            return
    pytest.fail("the save never ended")


def test_a_manifest_at_one_site_completes_the_others(meet: Meet, tmp_path: Path) -> None:
    """1. One site has published. 2. All stop before the others have. 3. The next start publishes there."""
    save(meet(*SITES), 5, write_id="b2")
    for site in ("north", "south"):
        place = tmp_path / site / "step-00000005"
        (place / "manifest.json").unlink()
        (place / "layout.json").unlink()
        place.rename(tmp_path / site / "step-00000005.b2.tmp")
    assert [step for step, _ in restore(meet(*SITES))] == [5] * 3
    for site in SITES:
        assert [one.step for one in read_manifests(tmp_path / site)] == [5]


def test_a_shared_folder_needs_no_messages(meet: Meet, tmp_path: Path) -> None:
    """Ranks of several sites that mount one folder are one store, whatever their sites are called."""
    shared = tmp_path / "north"
    shared.mkdir()
    (tmp_path / "south").symlink_to(shared)
    sites = meet("north", "south")
    assert sites.ranks[0].stores.is_shared
    assert newest_valid(shared) is None


def cut_fetch(meet: Meet, num_pieces: int) -> int:
    """Let a new site fetch while the sending site stops after `num_pieces`; return the bytes that the new one keeps."""
    sites = meet("east", "north")
    sender = sites.ranks[1]

    def load(one: Rank) -> None:
        found = find_checkpoint(one.folder, one.rank, one.stores, one.communicator)
        assert found is not None
        if one is sender:
            one.pass_files_over(Dying(one.transport, 2 * num_pieces, only=(1 << 41) + 17))  # type: ignore
        place, shards = one.folder / "step-00000005", [part_of(0, 1, 0)] if one.rank == 0 else []
        with (
            pytest.raises((KilledError, IsthmusError)),
            KeptPieces(one.folder, found.manifest, found.layout, one.rank) as kept,
        ):
            fetch_shards(
                place, found.layout, found.holders, shards,
                rank=one.rank, stores=one.stores, channel=one.channel, kept=kept, piece_bytes=ROW_BYTES,
            )  # fmt: skip

    sites.each(load)
    return sum(file.stat().st_size for file in (sites.ranks[0].folder / "fetched").rglob("*.pieces"))


def test_a_cut_fetch_goes_on_where_it_was(meet: Meet) -> None:
    """The sending site is lost after two of six pieces: the next attempt, of another plan, fetches no byte twice."""
    save(meet("north", "north"), 5)
    assert cut_fetch(meet, num_pieces=2) > 0
    sites = meet("east", "north")
    (_, new), (_, old) = restore(sites)
    assert (new.needed, new.kept, new.moved) == (48, 32, 16)
    assert old.moved == 0
    remove_kept_pieces(sites.ranks[0].folder)
    assert not (sites.ranks[0].folder / "fetched").exists()


@pytest.mark.attack
@pytest.mark.parametrize("damage", ["flip", "cut", "endless", "other", "noise"])
def test_a_damaged_or_forged_piece_is_fetched_again(meet: Meet, damage: str) -> None:
    """Kept pieces are damaged, cut, or announce gigabytes or boxes outside their shard: none of that is used."""
    save(meet("north", "north"), 5)
    cut_fetch(meet, num_pieces=2)
    folder = meet("east", "north").ranks[0].folder
    (file,) = folder.rglob("*.pieces")
    data = file.read_bytes()
    forged = {
        "flip": bytes(one ^ 0x01 if number % 40 == 39 else one for number, one in enumerate(data)),
        "cut": data[:30],
        "endless": b"IFP1" + (1 << 31).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little") + data[16:],
        "other": data.replace(b'"starts":[0', b'"starts":[9'),
        "noise": bytes(range(256)) * 4,
    }[damage]
    file.write_bytes(forged)
    (_, new), _ = restore(meet("east", "north"))
    assert new.kept + new.moved == new.needed == 48
    assert new.moved > 0


@pytest.mark.attack
def test_a_rank_that_asks_for_other_boxes_gets_nothing(meet: Meet, tmp_path: Path) -> None:
    """A request for bytes outside a shard, for a shard that does not exist, or of any size is refused."""
    for pieces in (
        [{"shard": 9, "starts": [0, 0], "lengths": [1, 1]}],
        [{"shard": 0, "starts": [5, 0], "lengths": [1, 4]}],
        [{"shard": 0, "starts": [0, 0], "lengths": [0, 4]}],
        [{"shard": 0, "starts": [0], "lengths": [1]}],
        [{"shard": -1, "starts": [0, 0], "lengths": [1, 1]}],
    ):
        sites = meet("north", "south")
        save(sites, 5)

        def attack(one: Rank) -> None:
            found = find_checkpoint(one.folder, one.rank, one.stores, one.communicator)
            assert found is not None
            if one.rank == 1:
                one.channel.send_text(0, 16, json.dumps({"pieces": pieces}).encode())  # noqa: B023
                one.channel.receive_text(0, 16, 1 << 20)
                return
            kept = KeptPieces(one.folder, found.manifest, found.layout, 0)
            with pytest.raises(UnavailableError, match="the request of rank 1 is refused"):
                fetch_shards(
                    one.folder / "step-00000005", found.layout, found.holders, [],
                    rank=0, stores=one.stores, channel=one.channel, kept=kept, piece_bytes=ROW_BYTES,
                )  # fmt: skip

        sites.each(attack)


@pytest.mark.attack
@pytest.mark.parametrize("name", [rank_file_name(0), "../../run.json", "layout.json"])
def test_a_rank_writes_no_files_of_others_at_a_holder(meet: Meet, tmp_path: Path, name: str) -> None:
    """A rank offers a copy under the name of another rank's file, or of a path: the holder refuses it."""
    sites = meet("north", "south")

    def attack(one: Rank) -> None:
        if one.rank == 1:
            forged = {"name": name, "num_bytes": 1, "sha256": "0" * 64}
            one.channel.send_text(0, 0, json.dumps({"part": {"files": [forged], "shards": []}}).encode())
            one.channel.send_text(0, 1, b"{}")
            return
        with pytest.raises(UnavailableError, match="refused"):
            one.save(5, [part_of(0, 2, 5)])

    sites.each(attack)
    assert list(read_manifests(tmp_path / "north")) == []


@pytest.mark.attack
def test_an_announced_length_is_bounded(meet: Meet) -> None:
    """A rank announces a text of 2^62 bytes, or of fewer than none: no memory is taken."""
    sites = meet("north", "south")
    for length in (1 << 62, -1):
        sites.transports[1].send(0, 1 << 41, "length", memoryview(length.to_bytes(8, "little", signed=True)))
        with pytest.raises(ProtocolError, match="announces"):
            sites.ranks[0].channel.receive_text(1, 0, 1 << 20)


@pytest.mark.slow
def test_a_run_over_sites_with_their_own_storage_survives_the_loss_of_a_site(tmp_path: Path) -> None:
    """A run whose sites share nothing saves, loses a site, goes on at two with another plan, and exports its model.

    1. Three sites train to a checkpoint and are killed. 2. One has left: the others and their copies have every byte.
    3. The losses are those of a run that was never interrupted, and the model is complete at the first site.
    """
    job = make_job(tmp_path, steps=15, checkpoints={"every_steps": 3})
    expected = run_job(tmp_path / "reference", job, make_plan(job, [1, 3, 4])).losses()
    jobs = [at_site(job, tmp_path / site) for site in SITES]
    with started(tmp_path, jobs, make_plan(job, [1, 3, 4])) as workers:
        workers.wait_for_step(2)
        workers.wait_for_checkpoint()
    shutil.rmtree(tmp_path / "west")
    again = run_job(tmp_path, jobs[:2], make_plan(job, [2, 4]), attempt=2, has_trained=True)
    assert "received" in again.log(0) + again.log(1)
    assert again.losses() == pytest.approx(expected[-len(again.losses()) :], abs=1e-6)
    assert 0 < len(again.losses()) <= 12
    output = Path(jobs[0].output)
    assert (output / "model.safetensors.index.json").is_file()
    assert sorted(one.name for one in Path(jobs[1].output).iterdir()) == [".isthmus-run"]
    reference = {name: one for file in Path(job.output).glob("*.safetensors") for name, one in load_file(file).items()}
    found = {name: one for file in output.glob("*.safetensors") for name, one in load_file(file).items()}
    assert found.keys() == reference.keys()
    assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in reference.items())


@pytest.mark.parametrize(
    ("site", "clusters", "target"),
    [
        (None, "aab", 0),
        ("a", "aab", 0),
        ("b", "aab", 2),
        ("b", "abcb", 1),
        ("c", "ababc", 4),
        ("d", "aab", 0),
    ],
)
def test_the_model_goes_to_a_writer_at_the_chosen_site(site: str | None, clusters: str, target: int) -> None:
    """Of its ranks one that exports, if there is one; without a choice, or apart from the job, the first writer."""
    stores = SiteStores(tuple(map(clusters.index, clusters)), tuple(clusters))
    assert choose_target(site, [0, 1], stores) == target


def test_a_shared_output_folder_moves_nothing() -> None:
    """If the chosen site sees the folder of the first writer, the model is there already."""
    assert choose_target("b", [0, 1], SiteStores((0, 0, 2), ("a", "b", "c"))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("site", ["b", "c"])
def test_the_model_is_assembled_where_the_user_wants_it(tmp_path: Path, site: str) -> None:
    """Three sites that share nothing: shards and tokenizer stream to a middle or the last site; no other has a part."""
    job = make_job(tmp_path, steps=2, output_site=site)
    jobs = [at_site(job, tmp_path / one) for one in "abc"]
    run_job(tmp_path, jobs, make_plan(job, [1, 3, 4]))
    for one in jobs:
        names = {file.name for file in Path(one.output).iterdir()}
        if Path(one.output).parent.name == site:
            assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= names
            assert ".export" not in names
        else:
            assert names == {".isthmus-run"}
    alone = run_job(tmp_path / "reference", job, make_plan(job, [1, 3, 4]))
    assert alone.losses()
    reference = {name: one for file in Path(job.output).glob("*.safetensors") for name, one in load_file(file).items()}
    output = tmp_path / site / "output"
    found = {name: one for file in output.glob("*.safetensors") for name, one in load_file(file).items()}
    assert found.keys() == reference.keys()
    assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in reference.items())
    assert (output / "tokenizer.json").read_bytes() == (Path(job.output) / "tokenizer.json").read_bytes()


@pytest.mark.attack
@pytest.mark.parametrize("name", ["../run.json", "config.json", "rank-00000-00000.safetensors", "tokenizer.json"])
def test_an_exporting_rank_names_its_own_files_only(meet: Meet, tmp_path: Path, name: str) -> None:
    """The second writer offers a path, a file of the first writer, or a tokenizer: nothing of it is written."""
    sites = meet("north", "south")

    def attack(one: Rank) -> None:
        if one.rank == 1:
            forged = {"name": name, "num_bytes": 1, "sha256": "0" * 64}
            one.channel.send_text(0, 32, json.dumps({"files": [forged]}).encode())
            return
        with pytest.raises(UnavailableError, match="is refused"):
            collect_export(tmp_path / "out", 0, [0, 1], 0, one.stores, one.channel)

    sites.each(attack)
    assert not [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
