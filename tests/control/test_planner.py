"""The planner's process: its answers, and that nothing it does or suffers hangs the server or outlives it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isthmus.control.placement import PlanRequest
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.control.service.planner_process import (
    COMMAND,
    PlannerProcess,
    PlanningEndedError,
    answer_request,
)
from isthmus.control.service.planner_queue import assemble_pool
from isthmus.core.errors import PlanError
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from tests.control.processes import until
from tests.control.serving import MODEL, POOL, job

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
FREE = {"east": {"h20": 2}, "west": {"h20": 2}}


def shell(program: str) -> PlannerProcess:
    """A planner whose process is a few lines of shell."""
    return PlannerProcess(command=("sh", "-c", program))


def request(model: Model) -> PlanRequest:
    """The small job on both sites, all chips free."""
    return PlanRequest(job=job(), model=model, pool=POOL, free_chips=FREE)


def ask(planner: PlannerProcess) -> tuple[Plan, ...]:
    return planner(request(MODEL)).plans


@pytest.fixture
def planner():
    """The real one, closed afterwards."""
    made = PlannerProcess()
    yield made
    made.close()


def test_a_request_that_does_not_read_is_answered_in_one_line(capsys) -> None:
    """Whatever breaks in the planner becomes an answer; its traceback goes to the log."""
    assert answer_request("no JSON").error.startswith("the planner failed: ValidationError")
    assert "Traceback" in capsys.readouterr().err


def test_plans_of_the_server_name_the_operators_currency(tmp_path: Path) -> None:
    """The pool that is planned on keeps the unit of the operator's file, and the predictions carry it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    pool = assemble_pool(POOL.clusters, POOL.model_copy(update={"currency": "CNY"}))
    assert assemble_pool(POOL.clusters, None).currency == ""
    asked = PlanRequest(job=job(), model=load_model(tmp_path), pool=pool, free_chips=FREE)
    predictions = [plan.predicted for plan in propose_plans(asked).plans]
    assert predictions
    assert all(one is not None and one.currency == "CNY" and one.mfu_fraction > 0 for one in predictions)


@pytest.mark.slow
def test_it_answers_as_the_function_does(planner: PlannerProcess, tmp_path: Path) -> None:
    """Plans, refusals and errors are those of `propose_plans`, request after request."""
    with pytest.raises(PlanError, match="num_attention_heads is None"):
        ask(planner)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(tmp_path)
    found = planner(request(model))
    assert found.plans
    assert found == propose_plans(request(model))


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_ended() -> None:
    """The error states the limit, and the next request has a new process."""
    slow = PlannerProcess(timeout_s=0.2, command=("sh", "-c", "exec sleep 60"))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"took longer than 0\.2 s"):
            ask(slow)
    slow.close()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_search_and_no_other(tmp_path: Path) -> None:
    """The first request fails with the reason that its process died; a new process answers the second."""
    once = f'[ -e {tmp_path}/died ] && {{ read line; echo \'{{"plans": {{"plans": []}}}}\'; exec sleep 60; }}; '
    planner = shell(once + f"touch {tmp_path}/died; exit 1")
    with pytest.raises(PlanError, match="its process died"):
        ask(planner)
    assert ask(planner) == ()
    planner.close()


@pytest.mark.slow
def test_closing_ends_a_search_at_once() -> None:
    """A server that ends does not wait for the planner, and the search has no outcome to be logged."""
    planner, outcome = shell("exec sleep 60"), list[BaseException]()

    def search() -> None:
        try:
            ask(planner)
        except PlanningEndedError as error:
            outcome.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    until(lambda: planner.has_process, "the search has begun")
    planner.close()
    thread.join(10)
    assert len(outcome) == 1
    with pytest.raises(PlanningEndedError):
        ask(planner)


@pytest.mark.slow
def test_the_process_ends_with_its_server() -> None:
    """When its input ends, so does it: also where the server was killed with no time to end anything."""
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.communicate(timeout=30)
    assert child.returncode == 0
    assert COMMAND[0] == sys.executable


@pytest.mark.slow
def test_no_job_makes_the_planner_eat_the_machine() -> None:
    """Its memory is bounded, and to run out of it is an answer like any other bug."""
    code = "from isthmus.control.placement import propose_plans as made; "
    code += "from isthmus.control.service import planner_process as p; "
    code += "made.propose_plans = lambda *_, **__: bytearray(2**40); p.main()"
    planner = PlannerProcess(command=(sys.executable, "-c", code))
    with pytest.raises(PlanError, match="the planner failed: MemoryError"):
        ask(planner)
    planner.close()
