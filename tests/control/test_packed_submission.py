"""Rules of packed submissions: what is stored means the same when it is read, also what an older version stored."""

import json

import pytest

from isthmus.control.state.packed_submission import PackedSubmission
from tests.control.samples import submission


@pytest.mark.parametrize("tokenizer", ["model", "bytes", "/m/tokenizer.json"])
def test_a_packed_job_keeps_its_tokenizer(tokenizer):
    """The default is stored too, since its meaning changed once."""
    given = submission()
    job = given.job.model_copy(update={"data": given.job.data.model_copy(update={"tokenizer": tokenizer})})
    assert PackedSubmission.pack(given.model_copy(update={"job": job})).unpack_job() == job


def test_a_job_that_was_packed_without_a_tokenizer_reads_bytes():
    """Before the model's own tokenizer became the default, bytes were, and defaults were not stored."""
    packed = PackedSubmission.pack(submission())
    old = PackedSubmission(packed.job_json.lstrip(), packed.model_json, packed.key)
    assert old.unpack_job().data.tokenizer == "bytes"
    assert old.unpack().job.data.tokenizer == "bytes"


def test_a_job_that_was_packed_with_its_tokenizer_keeps_it():
    """Between, the tokenizer was stored also where it was the default."""
    packed = PackedSubmission.pack(submission())
    fields = json.loads(packed.job_json)
    fields["data"]["tokenizer"] = "model"
    old = PackedSubmission(json.dumps(fields).encode(), packed.model_json, packed.key)
    assert old.unpack_job().data.tokenizer == "model"
