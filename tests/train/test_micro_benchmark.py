"""Rules of micro-benchmarks: operations take turns, and every part of a model and every message is timed."""

import json
import subprocess
import sys

import pytest

from isthmus.core.errors import InputError
from isthmus.train.measure.measure_model_parts import measure_model_parts
from isthmus.train.measure.operation_timer import NUM_ROUNDS, time_interleaved
from tests.train.small_models import write_config


def test_operations_take_turns():
    """Each is called once to warm up, then turn by turn, for its seconds."""
    order: list[str] = []

    def call(name: str, taken_s: float) -> float:
        order.append(name)
        return taken_s

    slow, quick = time_interleaved([lambda: call("slow", 1.0), lambda: call("quick", 0.1)], 1.0)
    assert order[:5] == ["slow", "quick", "slow", "quick", "quick"]
    assert slow == (1.0,) * NUM_ROUNDS
    assert quick == (0.1,) * (2 * NUM_ROUNDS)


@pytest.mark.slow
def test_every_part_of_a_model_is_timed(tmp_path):
    """Layers take longer than the embedding, and an update longer with parameters than without."""
    found = measure_model_parts(write_config(tmp_path, "qwen3"), 1, 64, seconds=0.1)
    assert min(found.layer_s) > min(found.embedding_s)
    assert min(found.update_s) > min(found.step_s)


def test_a_model_without_inner_layers_is_refused(tmp_path):
    """Two layers are an end each: nothing is left to time."""
    with pytest.raises(InputError, match="2 layers"):
        measure_model_parts(write_config(tmp_path, "qwen3", num_hidden_layers=2), 1, 64, seconds=0.1)


@pytest.mark.slow
def test_messages_between_two_workers_are_timed():
    """As many half round trips as were asked for, none of them instant."""
    command = [
        sys.executable,
        "-m",
        "isthmus.train.measure.measure_message",
        "--bytes",
        "4096",
        "--count",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert len(found) == 3
    assert all(0 < one < 1 for one in found)
