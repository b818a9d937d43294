"""Rules of exports: what is written, who gets which ranks, and what is refused with its reason."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given

from isthmus.core.errors import InputError, PlanError
from isthmus.core.files.user_files import load_job, load_plan
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.plan.export.export_plan import command_job_text, export_plan
from isthmus.plan.export.isthmus_runtime import to_isthmus_runtime
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.megatron_layout import layout_text
from isthmus.plan.export.plan_export import PlanExport
from isthmus.plan.export.rank_grid import rank_grid
from isthmus.plan.export.torchtitan import module_names, to_torchtitan
from tests.plan.hand import model_of, pool_of
from tests.plan.plans import grids, staged, with_stages

POOL = pool_of("H100", "H100", nodes=64)


def megatron(plan: Plan, **config: object) -> PlanExport:
    return to_megatron(plan, model_of(plan.num_layers, **config), POOL)


def option(made: PlanExport, name: str) -> str | None:
    """Return the value of an option, None where it is not given."""
    words = list(made.arguments)
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else None


def read_layout(text: str) -> list[int]:
    """Return the decoder layers of each piece, by a reader of its own."""
    for count in range(40, 1, -1):
        text = text.replace(f"t*{count}", "t" * count)
    assert text[0] == "E"
    assert text[-1] == "L"
    return [piece.count("t") for piece in text.split("|")]


def test_the_layout_names_embedding_layers_and_loss():
    """Pieces stand in the order a token passes them; long runs of layers are counted."""
    assert layout_text([[3, 2, 1]]) == "Et*3|tt|tL"
    assert layout_text([[1, 2], [2, 4]]) == "Et|tt|tt|t*4L"


@given(grids())
def test_a_layout_holds_every_layer_of_every_stage(plan):
    """Read back, the pieces of a stage add up to its layers, and none is empty."""
    grid = rank_grid(plan)
    pieces = read_layout(layout_text(grid.chunk_layers))
    stages = [sum(pieces[stage :: grid.pp]) for stage in range(grid.pp)]
    assert stages == [stage.num_layers for stage in plan.pipeline()]
    assert min(pieces) > 0


@given(grids())
def test_every_rank_lands_on_the_cluster_of_its_stage(plan):
    """Launches cover all ranks once, in order; a rank's node is of its stage's cluster, its device free."""
    made = to_megatron(plan, model_of(plan.num_layers), POOL)
    grid, rank, used = rank_grid(plan), 0, set()
    for number, launch in enumerate(made.launches):
        assert (launch.node_rank, launch.first_rank) == (number, rank)
        for device in launch.devices:
            stage, replica = divmod(rank // (grid.tp * grid.cp), grid.dp)
            assert plan.pipeline(replica)[stage].cluster == launch.cluster
            assert stage in launch.stages
            assert (launch.cluster, launch.node, device) not in used
            used.add((launch.cluster, launch.node, device))
            rank += 1
    assert rank == grid.num_ranks


def test_a_tensor_parallel_group_stays_on_one_node():
    """Where the rest of a node is too small for a group, the next node begins; the rest stays idle."""
    pool = pool_of("H100", "H100", chips_per_node=6)
    made = to_megatron(staged((4, 4), dp=2, tp=4, sp=True), model_of(8), pool)
    assert [(one.cluster, one.node, one.devices) for one in made.launches] == [
        ("a", 0, (0, 1, 2, 3)), ("a", 1, (0, 1, 2, 3)), ("b", 0, (0, 1, 2, 3)), ("b", 1, (0, 1, 2, 3)),
    ]  # fmt: skip


def test_a_pool_with_too_few_nodes_is_refused():
    """A plan is started only where it fits."""
    with pytest.raises(PlanError, match="too few"):
        to_megatron(staged((4, 4), dp=9, tp=8, sp=True), model_of(8), pool_of("H100", "H100", nodes=8))


def test_what_is_recomputed_is_said_as_nearly_as_it_can_be():
    """All layers: uniform; the first N of every stage: block; one part of each layer: selective."""

    def said(**fields):
        made = megatron(staged((5, 3), **fields))
        return [option(made, f"recompute-{name}") for name in ("granularity", "method", "num-layers")]

    assert said() == [None, None, None]
    assert said(recompute="full") == ["full", "uniform", "1"]
    assert said(recompute="full", recompute_layers=2) == ["full", "block", "2"]
    assert said(recompute="selective") == ["selective", None, None]


REFUSED = {
    "replicas differ": Plan.model_validate(
        {
            "id": "p",
            "dp": 2,
            "micro_batches": 8,
            "micro_batch_size": 1,
            "sequence_length": 4096,
            "stages": [
                {"replica": replica, "cluster": cluster, "node_group": "g", "layers": layers}
                for replica, cut in ((0, 4), (1, 5))
                for cluster, layers in (("a", (0, cut)), ("b", (cut, 8)))
            ],
        }
    ),
    "micro-batches: the numbers must be equal": staged((4, 4), dp=2, replica_micro_batches=(8, 4)),
    "no schedule 'overlapped'": staged((4, 4), schedule="overlapped"),
    "no schedule 'zero_bubble'": staged((4, 4), schedule="zero_bubble"),
    "a custom warm-up": staged((4, 4), warm_up=(2, 1)),
    "do not fill groups": staged((4, 4), schedule="interleaved", micro_batches=7),
    "cannot be split into 3 chunks": staged((6, 2), schedule="interleaved", chunks=3),
    "ZeRO 3": staged((4, 4), dp=2, zero=3),
    "precision fp8": staged((4, 4), precision="fp8"),
    "stages of precision fp16: it has one for all": with_stages(
        staged((4, 4), precision="bf16"),
        (one.model_copy(update={"precision": "fp16"}) for one in staged((4, 4)).stages),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("write", [to_megatron, to_torchtitan])
def test_a_plan_without_words_is_refused_with_its_reason(write, reason):
    """The reason names what and which value, and the hint what to do."""
    with pytest.raises(PlanError, match=reason) as caught:
        write(REFUSED[reason], model_of(8), POOL)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["tp", "cp", "ep", "sp"])
def test_degrees_that_differ_by_stage_are_refused(name):
    """Frameworks of one program have one degree for all stages; a refusal names the first that differs."""
    plan = staged((4, 4))
    second = plan.stages[1].model_copy(update={name: True if name == "sp" else 2})
    with pytest.raises(PlanError, match=f"{name} differs by stage: .* in stage 1 of replica 0"):
        megatron(with_stages(plan, (plan.stages[0], second)))


def recomputing(*counts: int, kind: str = "full") -> Plan:
    plan = staged((5, 3))
    said = ({"recompute": kind, "recompute_layers": count} for count in counts)
    return with_stages(plan, (s.model_copy(update=u) for s, u in zip(plan.stages, said, strict=True)))


def test_recomputation_that_differs_by_stage_is_refused():
    """One number for all stages says 4 and 3 of 3 (all it has), but not 4 and 1."""
    assert option(megatron(recomputing(4, 3)), "recompute-num-layers") == "4"
    with pytest.raises(PlanError, match="4 of 5, 1 of 3"):
        megatron(recomputing(4, 1))
    with pytest.raises(PlanError, match="all layers or none"):
        megatron(recomputing(4, 3, kind="selective"))


def test_every_reason_is_given_at_once():
    """One error lists all obstacles of a plan."""
    with pytest.raises(PlanError, match=r"'overlapped'.*ZeRO 3"):
        megatron(staged((4, 4), schedule="overlapped", zero=3))


def test_what_only_torchtitan_lacks_is_refused_there_alone():
    """Selective or partial recomputation, accumulation without a pipeline, context parallelism unsharded."""
    for plan, reason in (
        (staged((5, 3), recompute="selective"), "saves other tensors"),
        (staged((5, 3), recompute="full", recompute_layers=2), "all layers or none"),
        (staged((8,), dp=2, zero=1), "after each of several micro-batches"),
        (staged((5, 3), cp=2), "always shards the optimizer"),
    ):
        megatron(plan)
        with pytest.raises(PlanError, match=reason):
            to_torchtitan(plan, model_of(8), POOL)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "uses 'yarn' scaling"),
        ({"mlp_bias": True}, "disable-bias-linear applies to both"),
    ],
)
def test_models_without_words_are_refused(config, reason):
    """What Megatron-LM's options cannot say of a model is no silent change of the model."""
    with pytest.raises(PlanError, match=reason):
        megatron(staged((4, 4)), **config)


def test_experts_chosen_in_a_way_without_words_are_refused():
    """DeepSeek-V2 takes the groups with the best single expert, which no option says; V3 and V2-Lite pass."""
    configs = Path(__file__).parent / "configs"
    for name in ("deepseek-v3", "deepseek-v2-lite"):
        model = load_model(configs / f"{name}.json")
        to_megatron(staged((model.num_layers,)), model, POOL)
    with pytest.raises(PlanError, match="expert groups"):
        to_megatron(staged((60,)), load_model(configs / "deepseek-v2.json"), POOL)


def test_a_job_gives_its_hyper_parameters_and_must_agree():
    """Batches of plan and job are the same, or the export is refused."""
    training = {"steps": 7, "sequence_length": 4096, "global_batch_size": 8, "learning_rate": 1e-4, "seed": 5}
    fields = {
        "name": "j", "model": "m", "data": {"paths": ["d"]}, "training": training,
        "checkpoints": {"folder": "c"}, "output": "o",
    }  # fmt: skip
    made = to_megatron(staged((4, 4)), model_of(8), POOL, job=Job.model_validate(fields), data="corpus")
    assert [option(made, name) for name in ("train-iters", "lr", "seed", "data-path")] == [
        "7", "0.0001", "5", "corpus",
    ]  # fmt: skip
    other = Job.model_validate(fields | {"training": training | {"global_batch_size": 16}})
    with pytest.raises(InputError, match="samples per step is 8 in plan 'p' and 16 in job 'j'"):
        to_megatron(staged((4, 4)), model_of(8), POOL, job=other)


@pytest.mark.parametrize(
    ("framework", "precision", "is_taken"),
    [
        ("megatron", "fp16", True),
        ("torchtitan", "fp16", False),
        ("megatron", "fp8", False),
        ("torchtitan", "bf16", True),
    ],
)
def test_a_plan_for_the_runtime_is_exported_in_the_jobs_precision(framework, precision, is_taken):
    """Such plans state none: one that the framework lacks is refused, where it would have trained in another."""
    training = {"steps": 7, "sequence_length": 4096, "global_batch_size": 8, "precision": precision}
    fields = {
        "name": "j", "model": "m", "data": {"paths": ["d"]}, "training": training,
        "checkpoints": {"folder": "c"}, "output": "o",
    }  # fmt: skip
    plan, job = staged((4, 4)), Job.model_validate(fields)
    assert plan.precision is None
    if is_taken:
        assert export_plan(framework, plan, model_of(8), POOL, job=job).text
        return
    with pytest.raises(PlanError, match=f"precision {precision} is not exported") as caught:
        export_plan(framework, plan, model_of(8), POOL, job=job)
    takes = "--to megatron" in caught.value.hint
    assert takes == (precision == "fp16"), "Megatron-LM takes fp16, no framework fp8"


def test_the_script_gives_torchrun_what_the_parser_gets(tmp_path):
    """Run with a torchrun that prints its arguments, the script passes on each word as it is."""
    made = megatron(staged((5, 3), dp=2, tp=2, sp=True))
    script, torchrun = tmp_path / "run.sh", tmp_path / "torchrun"
    script.write_text(made.text)
    torchrun.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_RANK": "1", "MASTER_ADDR": "first"}
    command = ["bash", str(script), "--exit-interval", "3"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "0,1,2,3"
    assert said[said.index("./pretrain_gpt.py") + 1 :] == [*made.arguments, "--exit-interval", "3"]
    assert f"--nnodes {len(made.launches)}" in shlex.join(said)
    unknown = subprocess.run(command, env=environment | {"NODE_RANK": "9"}, capture_output=True, check=False)
    assert unknown.returncode == 2


def test_started_as_one_rank_the_script_runs_that_rank(tmp_path):
    """Where RANK is set, as in a job with `engine: command`, no torchrun starts further ranks."""
    made = megatron(staged((5, 3)))
    script, program = tmp_path / "run.sh", tmp_path / "python"
    script.write_text(made.text)
    program.write_text('#!/bin/sh\necho "$RANK $CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RANK": "1", "MEGATRON_LM": "/m", "CUDA_VISIBLE_DEVICES": "5"}
    said = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["1 5", "/m/pretrain_gpt.py", *made.arguments]


def test_a_command_job_runs_an_export_with_the_ranks_of_its_launches(tmp_path):
    """It is a valid job; its clusters and their numbers of ranks follow the order of the framework's ranks."""
    made, file = megatron(staged((4, 4), dp=2, tp=2, clusters="ba")), tmp_path / "job.yaml"
    file.write_text(command_job_text(made, tmp_path / "run.sh"))
    job = load_job(file)
    assert job.command is not None
    assert list(job.command.ranks.items()) == [("b", 4), ("a", 4)]
    assert job.command.arguments == ("bash", str(tmp_path / "run.sh"))
    assert set(job.command.node_groups) == {"a", "b"}


def test_a_command_job_is_refused_where_ranks_of_a_cluster_are_apart(tmp_path):
    """A cluster that is left and entered again has two segments; a plan of the runtime needs no program."""
    made = megatron(staged((3, 3, 2), clusters="aba"))
    with pytest.raises(PlanError, match="not consecutive on one node group of a"):
        command_job_text(made, tmp_path / "run.sh")
    own = to_isthmus_runtime(staged((4, 4)), model_of(8))
    with pytest.raises(PlanError, match="without a program"):
        command_job_text(own, tmp_path / "run.sh")


def test_torchtitan_gets_the_modules_of_every_piece():
    """Embedding first, norm and head last, every layer once and in order."""
    grid = rank_grid(staged((3, 2), schedule="interleaved", chunks=2))
    assert module_names(grid) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "norm", "lm_head"],
    ]
    compile(to_torchtitan(staged((5, 3)), model_of(8), POOL).text, "config", "exec")


def test_the_runtimes_plan_is_a_plan_file(tmp_path):
    """What one replica does not have is left out; the rest reads back as it was."""
    plan = staged((5, 3), zero=1, schedule="overlapped")
    file = tmp_path / "plan.yaml"
    file.write_text(to_isthmus_runtime(plan, model_of(8)).text)
    read = load_plan(file)
    assert (read.stages, read.schedule, read.zero) == (plan.stages, "overlapped", 0)
    file.write_text(to_isthmus_runtime(staged((5, 3), dp=2, zero=1), model_of(8)).text)
    assert (load_plan(file).dp, load_plan(file).zero) == (2, 1)
    file.write_text(to_isthmus_runtime(staged((5, 3), dp=2, zero=2), model_of(8)).text)
    assert load_plan(file).zero == 2
    with pytest.raises(PlanError, match="ZeRO"):
        to_isthmus_runtime(staged((4, 4), dp=2, zero=2, schedule="dualpipe"), model_of(8))


def test_local_steps_and_sizes_by_replica_are_refused_elsewhere():
    """Neither framework averages every few steps or takes unlike micro-batches; ours does both."""
    plan = staged((8,), dp=2, micro_batches=4)
    apart = with_stages(plan, (plan.stages[0], plan.stages[1].model_copy(update={"cluster": "b"})))
    local = apart.model_copy(update={"local_steps": 20})
    sized = plan.model_copy(update={"replica_micro_batch_sizes": (1, 2), "micro_batch_size": 2})
    for made, reason in ((local, "average their parameters every 20 steps"), (sized, "of 1, 2 samples")):
        for write in (to_megatron, to_torchtitan):
            with pytest.raises(PlanError, match=reason) as caught:
                write(made, model_of(8), POOL)
            assert caught.value.hint
    assert "local_steps: 20" in to_isthmus_runtime(local, model_of(8)).text
    assert "replica_micro_batch_sizes: [1, 2]" in to_isthmus_runtime(sized, model_of(8)).text
