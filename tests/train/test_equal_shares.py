"""Rules of sharded exchanges: leaders have equal shares of a layer, and each element has one place in them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.train.update.bucket_batches import make_batches
from isthmus.train.update.buckets import SEGMENT_ALIGNMENT, HeldRows, layer_of, make_buckets
from isthmus.train.update.sharding.equal_shares import EqualShares

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=6)


@pytest.mark.parametrize("num_owners", [2, 3, 4, 8])
def test_the_owners_of_a_layer_lead_equal_shares(num_owners: int) -> None:
    """To two rows for each bucket, so that a gather of equal blocks sends nearly nothing beside the weights."""
    shapes = {"q": (512, 512), "k": (128, 512), "norm": (512,), "up": (1408, 512), "down": (512, 1408)}
    held = [HeldRows.full(f"model.layers.0.{name}", shape) for name, shape in shapes.items()]
    buckets = make_buckets([held] * num_owners, "a" * num_owners, 1 << 18, layer_of)
    (batch,) = make_batches(buckets)
    led = Counter[int]()
    for one in buckets:
        led[one.leaders[0]] += one.num_elements
    assert max(led.values()) - min(led.values()) <= 2 * 1408 * len(buckets) / num_owners
    assert EqualShares(batch).num_elements * num_owners / batch.num_elements < 1.02


@given(SHAPES, st.integers(1, 5), st.integers(16, 400))
def test_each_element_has_one_place_in_a_bucket_and_in_a_share(
    shapes: list[tuple[int, int]], num_owners: int, bucket_elements: int
) -> None:
    """Buckets have each row once, and begin at aligned elements; shares put back together are the parameters."""
    held = [HeldRows.full(f"model.layers.{place % 2}.{place}", shape) for place, shape in enumerate(shapes)]
    values = {one.name: torch.randn(one.stop, one.row_elements) for one in held}
    buckets = make_buckets([held] * num_owners, "a" * num_owners, bucket_elements, layer_of)
    found = {name: torch.zeros_like(one) for name, one in values.items()}
    for batch in make_batches(buckets, 4 * bucket_elements, with_own=True):
        shares = EqualShares(batch)

        def blocks(bucket):
            return [values[one.name][one.start : one.stop].reshape(-1) for one in bucket.segments]

        parts = [shares.share(blocks, rank, torch.zeros(1)) for rank in batch.owners]
        assert {len(one) for one in parts} == {shares.num_elements}
        whole = torch.cat(parts)
        assert torch.equal(whole, shares.whole(blocks, torch.zeros(1)))
        for bucket, at in shares.starts():
            of_bucket = whole[at : at + bucket.num_elements]
            for segment in bucket.segments:
                taken, of_bucket = of_bucket[: segment.num_elements], of_bucket[segment.num_elements :]
                target = found[segment.name][segment.start : segment.stop]
                assert (segment.start * target.shape[1]) % SEGMENT_ALIGNMENT == 0
                target += taken.view(target.shape)
    assert all(torch.equal(found[name], one) for name, one in values.items())
