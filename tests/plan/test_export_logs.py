"""Rules of reading logs back: lines of three frameworks, warm-up left out, a table to calibrate with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.plan.calibrate.measured_runs import MeasuredRun, load_runs
from isthmus.plan.export.log_summary import add_measured_run, summarise_log
from isthmus.plan.export.training_logs import read_training_log
from tests.plan.plans import staged

PLAN = staged((4, 4), dp=2, tp=2, sp=True)  # 16 samples of 4096 tokens on 8 chips


def megatron(iteration: int, seconds: float, loss: float = 11.5, samples: int = 16) -> str:
    """Return a line as `training_log` of Megatron-LM makes it."""
    return (
        f" [2026-03-01 12:00:00.000000] iteration {iteration:8d}/{50:8d} |"
        f" consumed samples: {iteration * samples:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 |"
        f" learning rate: {3e-4:.6E} | global batch size: {samples:5d} | lm loss: {loss:.6E} |"
        " loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def torchtitan(step: int, tokens_per_s: float, loss: float = 11.5, memory: float = 50.1) -> str:
    """Return a line as `MetricsProcessor.log` of torchtitan makes it, behind a launcher's prefix."""
    return (
        "[rank4]:[titan] 2026-03-01 12:00:00,000 - root - INFO - "
        f"\x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm: {3.21:7.4f}  "
        f"\x1b[38;2;54;234;195mmemory: {memory:5.2f}GiB(55.00%)  \x1b[34mtps: {round(tokens_per_s):,}  "
        f"\x1b[36mtflops: {1412.345:,.2f}  \x1b[35mmfu: 41.20%\x1b[39m"
    )


def test_megatron_lines_give_time_loss_and_memory():
    """Milliseconds, `lm loss`, and the most that any rank says it allocated; other lines are passed over."""
    memory = "memory (MB) | allocated: 400.50 | max allocated: {}.25 | reserved: 650.00 | max reserved: 660.00"
    lines = ["warming up", megatron(1, 30, 12.0), f"[Rank 0] (after 1 iterations) {memory.format(1024)}"]
    lines += [
        f"[Rank 4] (after 1 iterations) {memory.format(2048)}",
        megatron(2, 5.5),
        megatron(3, 5.6, 11.0),
    ]
    log = read_training_log(lines, PLAN)
    assert (log.format, log.peak_memory_bytes) == ("megatron", 2048.25 * 2**20)
    found = summarise_log(log, 1)
    assert (found.iterations, found.skipped) == (2, 1)
    assert (found.iteration_s, found.min_s, found.max_s) == (pytest.approx(5.55), 5.5, 5.6)
    assert (found.first_loss, found.last_loss) == (12.0, 11.0)


def test_torchtitan_lines_give_time_from_tokens_per_device():
    """16 samples of 4096 tokens over 8 devices at 4096 tokens a second each take 2 s; colours go."""
    lines = [torchtitan(1, 100), torchtitan(10, 4096, memory=61.5), torchtitan(20, 4096)]
    lines.append("[titan] validate step: 20  loss:  9.1  memory: 80.00GiB(90.00%)  tps: 9,999")
    log = read_training_log(lines, PLAN)
    found = summarise_log(log, 5)
    assert (found.iteration_s, found.iterations, found.skipped) == (2.0, 10, 10)
    assert log.peak_memory_bytes == 61.5 * 2**30


def test_ranks_without_a_loss_do_not_replace_the_one_that_has_it():
    """Stages before the last print a loss of -1: the line of the last stage counts."""
    lines = [torchtitan(1, 4096), torchtitan(1, 2048, -1.0), torchtitan(2, 2048, -1.0), torchtitan(2, 4096)]
    assert [one.iteration_s for one in read_training_log(lines, PLAN).intervals] == [2.0, 2.0]
    assert summarise_log(read_training_log(lines, PLAN), 0).last_loss == 11.5


def test_our_runtime_takes_the_slowest_rank_of_a_step():
    """Lines of several workers' `metrics.jsonl` are read as one log."""
    steps = [
        StepMetrics(job="j", attempt=1, rank=rank, step=step, values={"step_s": step + rank / 10} | loss)
        for step in range(1, 4)
        for rank, loss in ((0, {}), (1, {"loss": 3.0}))
    ]
    log = read_training_log([one.model_dump_json() for one in steps], PLAN)
    assert log.format == "isthmus"
    assert [one.iteration_s for one in log.intervals] == [1.1, 2.1, 3.1]
    assert log.intervals[0].loss == 3.0


@given(
    interval=st.integers(1, 20),
    count=st.integers(2, 30),
    warm_up=st.integers(0, 40),
    seconds=st.floats(0.5, 50),
)
def test_no_iteration_of_the_warm_up_counts(interval, count, warm_up, seconds):
    """Slow first iterations never show: intervals that hold any of them are left out, and no others."""
    ends = [interval * (i + 1) for i in range(count)]
    slow = [900.0 if end - interval < warm_up else round(seconds, 1) for end in ends]
    log = read_training_log([megatron(end, s) for end, s in zip(ends, slow, strict=True)], PLAN)
    if all(s == 900.0 for s in slow):
        with pytest.raises(InputError, match="warm-up"):
            summarise_log(log, warm_up)
        return
    found = summarise_log(log, warm_up)
    assert found.max_s == pytest.approx(round(seconds, 1))
    assert found.iterations + found.skipped == ends[-1]
    assert found.iterations == interval * slow.count(round(seconds, 1))


def test_a_resumed_run_warms_up_again():
    """A log that begins at iteration 1001 leaves out its own first iterations."""
    lines = [megatron(1000 + i, 60.0 if i < 4 else 5.0) for i in range(1, 9)]
    assert summarise_log(read_training_log(lines, PLAN), 3).max_s == 5.0


def test_a_log_of_another_batch_or_none_is_refused():
    """A run is compared with its own plan only; a file without iterations says which form was looked for."""
    with pytest.raises(InputError, match="has 32 samples, plan 'p' has 16"):
        read_training_log([megatron(1, 5.0, samples=32)], PLAN)
    with pytest.raises(InputError, match="megatron or torchtitan or nemo or isthmus"):
        read_training_log(["hello"], PLAN)
    with pytest.raises(InputError, match="the format of torchtitan"):
        read_training_log([megatron(1, 5.0)], PLAN, "torchtitan")


def test_a_run_is_added_to_a_table_or_replaced(tmp_path):
    """The table names files as seen from its folder, and keeps the runs it had."""
    plan, pool, table = tmp_path / "p" / "plan.yaml", tmp_path / "pool.yaml", tmp_path / "runs.yaml"
    for name, seconds in (("one", 5.0), ("two", 6.0), ("one", 5.5)):
        add_measured_run(table, MeasuredRun(name=name, plan=str(plan), pool=str(pool), iteration_s=seconds))
    read = load_runs(table)
    assert {run.name: run.iteration_s for run in read.runs} == {"one": 5.5, "two": 6.0}
    assert "plan: p/plan.yaml" in table.read_text()


def nemo(step: int, seconds: float, samples: int = 16, loss: float = 11.5) -> str:
    """Return a line as NeMo 2 prints it."""
    return (
        f"Training epoch 0, iteration {step}/49 | lr: 1.961e-06 | global_batch_size: {samples} | global_step: {step} | "
        f"reduced_train_loss: {loss} | train_step_timing in s: {seconds} | consumed_samples: {samples * (step + 1)}"
    )


def test_nemo_lines_give_time_and_loss_in_both_its_forms():
    """NeMo 2 prints a line a step, NeMo 1 redraws a progress bar in one line."""
    log = read_training_log([nemo(0, 30.0, loss=12.0), nemo(1, 5.5), nemo(2, 5.6, loss=11.0)], PLAN)
    assert (log.format, log.peak_memory_bytes) == ("nemo", None)
    found = summarise_log(log, 1)
    assert (found.iteration_s, found.iterations, found.last_loss) == (pytest.approx(5.55), 2, 11.0)
    bars = [
        f"Epoch 0: :  {n}%|# | {n}/100 [10:48<00:00, reduced_train_loss=10.9, global_step={n}.00, "
        f"consumed_samples={16 * n}.0, train_step_timing in s={3 + n / 10:.3f}]"
        for n in range(1, 6)
    ]
    log = read_training_log(["\r".join(bars)], PLAN)
    assert [one.iteration_s for one in log.intervals] == pytest.approx([3.1, 3.2, 3.3, 3.4, 3.5])
    with pytest.raises(InputError, match="has 32 samples"):
        read_training_log([nemo(0, 5.0, samples=32)], PLAN)


FORMS = (megatron(7, 5.5), torchtitan(7, 4096), nemo(7, 5.5))
NUMBERS = ("5.5", "5500.0", "4,096", "7")
BROKEN_NUMBERS = ("nan", "-1", "1e999", "1.2.3", "1,2,,3", "9" * 5000, "0", "")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FORMS), st.sampled_from(("5.5", "5500.0", "4,096", "7")), st.sampled_from(BROKEN_NUMBERS)
        ),
        min_size=1,
        max_size=6,
    ),
    st.text(max_size=40),
)
def test_hostile_logs_end_in_an_answer_or_a_named_mistake(rows, noise):
    """Numbers that are none, beyond any run, or thousands of digits long never end in another error."""
    lines = [line.replace(number, broken) for line, number, broken in rows] + [noise]
    try:
        found = summarise_log(read_training_log(lines, PLAN), 0)
    except InputError:
        return
    assert 0 < found.min_s <= found.iteration_s <= found.max_s < float("inf")


def test_a_log_that_jumps_over_iterations_and_a_line_without_end_are_read_at_once():
    """A gap of ten to the eleventh iterations takes no memory; a line of a megabyte no time of its square."""
    found = summarise_log(read_training_log([megatron(1, 5.0), megatron(10**11, 6.0)], PLAN), 1)
    assert (found.iterations, found.iteration_s) == (10**11 - 1, 6.0)
    with pytest.raises(InputError, match="no line with an iteration time"):
        read_training_log(["memory (MB) | max allocated: " * 40_000], PLAN)
