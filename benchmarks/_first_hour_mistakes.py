"""Mistakes that a new user makes, each with the value at fault and the next step that the refusal must name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REMOVE = object()
"""As the value of a change: the field is left out."""

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
POOL: dict[str, Any] = {
    "clusters": [
        {"name": "a", "owner": "owner-a", "region": "east",
         "node_groups": [{"name": "cpu", "chip": "CPU-core", "nodes": 1, "chips_per_node": 2}]},
        {"name": "b", "owner": "owner-b", "region": "west",
         "node_groups": [{"name": "cpu", "chip": "CPU-core", "nodes": 1, "chips_per_node": 2}]},
    ],
    "links": [{"between": ["a", "b"], "bandwidth_gbps": 1, "round_trip_ms": 2}],
}  # fmt: skip
JOB: dict[str, Any] = {
    "name": "first", "model": "model", "data": {"paths": ["data/*.txt"], "tokenizer": "bytes"},
    "training": {"steps": 4, "sequence_length": 32, "global_batch_size": 4, "precision": "fp32"},
    "checkpoints": {"folder": "checkpoints"}, "output": "result", "policy": "manual",
}  # fmt: skip

SUBMIT = ("submit", "job.yaml")
AT_SITES = ("submit", "job.yaml", "--watch", "--auto")
"""For files that only sites need to see: the job ends with the reason before any chip is held."""
PLAN = ("plan", "job.yaml", "--pool", "pool.yaml")


@dataclass(frozen=True)
class Mistake:
    """A mistake: the changed fields and files, the command, and the words that its refusal must contain.

    `job`, `pool` and `model` map a dotted path of the good file to the wrong value. `files` maps a file name to
    its content, written last. `value` and `next_step` are regular expressions. PORT stands for the server's port.
    """

    name: str
    value: str
    next_step: str
    words: tuple[str, ...] = SUBMIT
    job: Mapping[str, Any] = field(default_factory=dict)
    pool: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)


def _job(name: str, path: str, value: Any, says: str, next_step: str, **more: Any) -> Mistake:
    return Mistake(name=name, job={path: value}, value=says, next_step=next_step, **more)


def _training(name: str, path: str, value: Any, says: str, next_step: str, **more: Any) -> Mistake:
    return _job(name, f"training.{path}", value, says, next_step, **more)


def _pool(name: str, path: str, value: Any, says: str, next_step: str) -> Mistake:
    return Mistake(name=name, pool={path: value}, value=says, next_step=next_step, words=PLAN)


def _words(name: str, words: str, says: str, next_step: str, **more: Any) -> Mistake:
    return Mistake(name=name, words=tuple(words.split()), value=says, next_step=next_step, **more)


GROUP = "clusters.0.node_groups.0"
PROMPTS = '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}\n'
BOMB = 'a: &a ["x","x","x","x","x","x","x","x","x"]\n' + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
PLAN_FILE = """id: mine
model: model
micro_batches: 4
micro_batch_size: 1
sequence_length: 32
precision: fp32
stages:
  - {cluster: a, node_group: cpu, layers: [0, 2]}
  - {cluster: CLUSTER, node_group: cpu, layers: [FIRST, 4]}
"""


def plan_file(cluster: str = "b", first: int = 2) -> str:
    """Return a plan of two stages; `first` is the first layer of the second."""
    return PLAN_FILE.replace("CLUSTER", cluster).replace("FIRST", str(first))


VALUES = (
    _training("no steps", "steps", 0, "steps.*0", "at least 1|greater"),
    _training("negative steps", "steps", -5, "-5", "at least 1|greater"),
    _training("steps in words", "steps", "many", "many", "integer|number"),
    _training("no tokens in a sequence", "sequence_length", 0, "0", "at least 1|greater"),
    _training("a sequence beyond the model's positions", "sequence_length", 4096, "4096|4,096", "256"),
    _training("warm-up beyond the steps", "warmup_steps", 50, "50", "4"),
    _training("minimum above the rate", "min_learning_rate", 0.01, r"0\.01", r"0\.0003|3e-0?4"),
    _training("no rate", "learning_rate", 0, "0", "greater than 0|above 0"),
    _training("a rate in words", "learning_rate", "1e-3x", "1e-3x", "number"),
    _training("micro-batches that fill no batch", "micro_batch_size", 3, "3", "multiple|divi|2|4"),
    _training("a micro-batch above the batch", "micro_batch_size", 64, "64", "4|at most"),
    _training("fp8 training", "precision", "fp8", "fp8", "bf16"),
    _training("a mistyped precision", "precision", "bf61", "bf61", "bf16"),
    _training("beta above 1", "beta1", 1.5, r"1\.5", "at most 1|less than or equal to 1|below 1|less than 1"),
    _training("a negative seed", "seed", -1, "-1", "at least 0|greater than or equal to 0"),
    _training("a mistyped field", "stesp", 4, "stesp", "steps"),
    _training("a field with dashes", "learning-rate", 1e-3, "learning-rate", "learning_rate"),
    _training("a negative clip", "clip_norm", -1, "-1", "at least 0|greater than or equal to 0"),
    Mistake(
        "evaluation without held-out data",
        "evaluate_every|validation_fraction",
        "validation_fraction",
        job={"training.evaluate_every": 2, "data.validation_fraction": 0},
    ),
    _job("no model", "model", REMOVE, "model", "required|missing|folder"),
    _job("no name", "name", REMOVE, "name", "required|missing"),
    _job("all data held out", "data.validation_fraction", 1.0, "1", "less than 1|below 1"),
    _job("negative held-out data", "data.validation_fraction", -0.1, r"-0\.1", "at least 0|greater than or equal to 0"),
    _job("an unknown data format", "data.format", "xml", "xml", "jsonl"),
    _job("a mistyped priority", "priority", "urgent", "urgent", "high"),
    _job("a mistyped policy", "policy", "fastest", "fastest", "manual"),
    _job("negative restarts", "max_restarts", -1, "-1", "at least 0|greater than or equal to 0"),
    _job("a deadline of 0", "deadline_s", 0, "0", "greater than 0|above 0"),
    _job("a deadline in words", "deadline_s", "tomorrow", "tomorrow", "number"),
    _job("a later version", "version", 2, "2", "1"),
    _job("no checkpoint kept", "checkpoints.keep", 0, "0", "at least 1|greater than or equal to 1"),
    _job("a mistyped transport", "transport", "rdma", "rdma", "thread"),
    _job("an unknown task", "task", "dpo", "dpo", "finetune"),
    _job("a name of control characters", "name", "a\x1b[31m", "name", "letters|characters|printable"),
)
"""Wrong values in a job file."""

FILES = (
    _job("a model folder that is absent", "model", "no-such-model", "no-such-model", "folder|config.json"),
    _job("a model folder without config.json", "model", "data", "data", "config.json"),
    Mistake(
        "a model of another family",
        "GPT2",
        "llama|Llama",
        model={"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    ),
    Mistake("a configuration that is no JSON", "config.json", "JSON|json", files={"model/config.json": "{hidden"}),
    Mistake(
        "a configuration without a size", "hidden_size", "config.json|missing|required", model={"hidden_size": REMOVE}
    ),
    Mistake("heads that no key-value heads divide", "3", "divi|multiple", model={"num_key_value_heads": 3}),
    _job(
        "data that are absent",
        "data.paths",
        ["no-such-data"],
        "no-such-data",
        "exist|found|match|path|file",
        words=AT_SITES,
    ),
    _job("a glob that matches nothing", "data.paths", ["data/*.parquet"], "parquet", "match|file", words=AT_SITES),
    Mistake(
        "JSON Lines without the field",
        "text",
        "text_field|data.text_field",
        job={"data.paths": ["rows.jsonl"]},
        files={"rows.jsonl": '{"body": "hello"}\n' * 50},
        words=AT_SITES,
    ),
    Mistake(
        "JSON Lines with a broken row",
        r"rows\.jsonl",
        "JSON|line",
        job={"data.paths": ["rows.jsonl"]},
        files={"rows.jsonl": '{"text": "hello"}\n{"text": \n' * 50},
        words=AT_SITES,
    ),
    Mistake(
        "a chat without messages",
        "messages",
        "messages",
        job={"data.paths": ["rows.jsonl"], "data.format": "chat", "task": "finetune", "data.chat_template": "plain"},
        files={"model/model.safetensors": "weights", "rows.jsonl": '{"text": "hello"}\n' * 50},
        words=AT_SITES,
    ),
    Mistake(
        "a chat without a template",
        "template",
        "chat_template",
        job={"data.paths": ["rows.jsonl"], "data.format": "chat", "task": "finetune", "data.tokenizer": "bytes"},
        files={"rows.jsonl": PROMPTS * 50},
        words=AT_SITES,
    ),
    _job(
        "a tokenizer that is absent",
        "data.tokenizer",
        "no-tokenizer.json",
        "no-tokenizer",
        "tokenizer.json|bytes",
        words=AT_SITES,
    ),
    Mistake(
        "a tokenizer that is none",
        "tokenizer.json",
        "tokenizer",
        job={"data.tokenizer": "tokenizer.json"},
        files={"tokenizer.json": "{}"},
        words=AT_SITES,
    ),
    Mistake("a vocabulary below the tokenizer's", "260|257|259|256", "vocab_size", model={"vocab_size": 100}),
    _job(
        "too little data for one sequence",
        "training.sequence_length",
        250,
        "250|token",
        "token|data|shorter",
        files={"data/text.txt": "too short"},
        words=AT_SITES,
    ),
    Mistake("the result among the data", "data", "output", job={"output": "data/result", "data.paths": ["data"]}),
    _job("the result over the checkpoints", "output", "checkpoints", "checkpoints", "output|folder"),
    _job("the result over a file", "output", "pool.yaml", "pool.yaml", "folder", words=AT_SITES),
    _job(
        "the result over another's files",
        "output",
        "old",
        "old",
        "empty|another|output",
        files={"old/model.safetensors": "weights"},
        words=AT_SITES,
    ),
    _job("checkpoints over a file", "checkpoints.folder", "pool.yaml", "pool.yaml", "folder", words=AT_SITES),
    _job(
        "checkpoints of another run",
        "checkpoints.folder",
        "strange",
        "strange",
        "resume|folder",
        files={"strange/step-00000004/manifest.json": "{}", "strange/step-4/.metadata": "x"},
        words=AT_SITES,
    ),
    Mistake(
        "checkpoints among the data",
        "data",
        "folder",
        job={"checkpoints.folder": "data/checkpoints", "data.paths": ["data"]},
    ),
    Mistake("an empty job", r"job\.yaml", "empty|name|schema", files={"job.yaml": ""}),
    Mistake("a job that is a list", r"job\.yaml", "mapping|schema|field", files={"job.yaml": "- a\n- b\n"}),
    Mistake("a job that is no text", r"job\.yaml", "text|UTF-8|YAML", files={"job.yaml": bytes(range(128, 256))}),
    Mistake("a tab in the job", r"job\.yaml", "line|tab|YAML", files={"job.yaml": "name: x\n\tmodel: y\n"}),
    Mistake("a bomb of aliases", r"job\.yaml", "alias|large|anchor|nest", files={"job.yaml": BOMB}),
    _words("a job file that is absent", "submit absent.yaml", r"absent\.yaml", "exist|not found|No such|file"),
    _words("a folder for a job", "submit model", "model", "file|folder|directory"),
)
"""Wrong models, data and files."""

PLACES = (
    _job("a cluster that is absent", "placement.clusters", ["c"], "c", "a, b|a and b|a or b|there are|pool"),
    _job("an owner that is absent", "placement.owners", ["owner-c"], "owner-c", "owner-a|owner-b"),
    _job("a chip that is absent", "placement.chips", ["H2O"], "H2O", "CPU-core|H20"),
    _job("a region that is absent", "placement.regions", ["north"], "north", "east"),
    _job("data of an owner that is absent", "placement.data_owners", ["owner-c"], "owner-c", "owner-a|owner-b"),
    _job("no chips", "placement.max_chips", 0, "0", "at least 1|greater than or equal to 1"),
    _job("tensor parallelism of 3 on 4 heads", "parallel.tp", 3, "3", "1|2|4|divi"),
    _job("more stages than layers", "parallel.pp", 9, "9", "4"),
    _job("more expert groups than experts", "parallel.ep", 8, "8", "4|remove"),
    _job("more replicas than samples in a batch", "parallel.dp", 5, "5", "4|batch", words=PLAN),
    _job("a mistyped degree", "parallel.tpp", 2, "tpp", "tp"),
    _job("a parallel degree of 0", "parallel.tp", 0, "0", "at least 1|greater than or equal to 1"),
)
"""Wrong places and degrees."""

POOLS = (
    _pool("a chip of no catalogue", f"{GROUP}.chip", "H2O", "H2O", "H20|chips"),
    _pool("no nodes", f"{GROUP}.nodes", 0, "0", "at least 1|greater than or equal to 1"),
    _pool("a link to no cluster", "links.0.between", ["a", "c"], "c", "cluster"),
    _pool("a link with one end", "links.0.between", ["a"], "a|between", "two|2"),
    _pool("a link of no rate", "links.0.bandwidth_gbps", 0, "0", "greater than 0|above 0"),
    _pool("a link that loses all", "links.0.loss", 1.5, r"1\.5", "less than 1|below 1"),
    _pool("two clusters of one name", "clusters.1.name", "a", "a", "twice|unique|name"),
    _pool("a cluster without an owner", "clusters.0.owner", REMOVE, "owner", "required|missing"),
    _pool("no clusters", "clusters", [], "clusters", "at least|one"),
    _pool("a mistyped field of a pool", "clusters.0.regoin", "east", "regoin", "region"),
    _pool("a negative price", f"{GROUP}.price_per_chip_hour", -1, "-1", "at least 0|greater than or equal to 0"),
    _words(
        "a pool file that is absent", "plan job.yaml --pool absent.yaml", r"absent\.yaml", "exist|not found|No such"
    ),
)
"""Wrong pool files."""

COMMANDS = (
    _words("a server that does not run", "jobs --server http://127.0.0.1:9", "127.0.0.1:9", "serve|running|--server"),
    _words("an address without a scheme", "jobs --server localhost:8470", "localhost:8470", "http"),
    _words("TLS to a server without", "jobs --server https://127.0.0.1:PORT", "PORT|TLS|SSL|https", "http"),
    _words("a wrong token", "jobs --token-file wrong.token", "token", "token", files={"wrong.token": "0" * 43}),
    _words("a token file that is absent", "jobs --token-file no.token", "no.token", "token"),
    _words(
        "an empty token file", "jobs --token-file empty.token", "empty.token", "empty|token", files={"empty.token": ""}
    ),
    _words("a job that is absent", "show no-such-job", "no-such-job", "jobs"),
    _words("a plan of a job that is absent", "choose no-such-job plan-1", "no-such-job", "jobs"),
    _words("cancelling what is absent", "cancel no-such-job", "no-such-job", "jobs"),
    _words("logs of what is absent", "logs no-such-job", "no-such-job", "jobs"),
    _words("a token for an owner that is absent", "token create --owner owner-c", "owner-c", "owner-b|owner-a"),
    _words("a mistyped command", "sumbit job.yaml", "sumbit", "submit|--help"),
    _words("a mistyped option", "submit job.yaml --wacth", "--wacth", "--watch|--help"),
    _words(
        "an open server without TLS",
        "serve --state st --pool pool.yaml --host 0.0.0.0 --port 0",
        r"0\.0\.0\.0",
        "--tls-cert|self-signed",
    ),
    _words("a port in use", "serve --state st --pool pool.yaml --port PORT", "PORT", "--port|in use"),
    _words("a certificate without a key", "serve --state st --pool pool.yaml --tls-cert c.pem", "certificate", "key"),
    _words("a port out of range", "serve --state st --pool pool.yaml --port 70000", "--port", "65535"),
    _words("a cluster that no pool has", "agent --pool pool.yaml --cluster c --state ag", "c", "a, b|a and b|a or b"),
    _words("no cluster of several", "agent --pool pool.yaml --state ag", "cluster", "--cluster"),
    _words(
        "a state folder that is a file",
        "agent --pool pool.yaml --cluster a --state pool.yaml",
        "pool.yaml",
        "folder|directory",
    ),
    _words(
        "a mistyped policy",
        "agent --pool pool.yaml --cluster a --state ag --policy policy.yaml",
        "max_chip",
        "field|schema|max",
        files={"policy.yaml": "max_chip: 3\n"},
    ),
    _words(
        "routes that are absent",
        "agent --pool pool.yaml --cluster a --state ag --routes no.json",
        r"no\.json",
        "exist|not found|No such|links",
    ),
    _words(
        "storage that is absent",
        "agent --pool pool.yaml --cluster a --state ag --storage no-disk",
        "no-disk",
        "exist|folder|create",
    ),
    _words(
        "a plan that skips a layer",
        "simulate mine.yaml --pool pool.yaml",
        "3|layer",
        "layer",
        files={"mine.yaml": plan_file(first=3)},
    ),
    _words(
        "a plan at a cluster that is absent",
        "simulate mine.yaml --pool pool.yaml",
        "c",
        "pool|cluster",
        files={"mine.yaml": plan_file(cluster="c")},
    ),
    _words(
        "an export to no framework",
        "export mine.yaml --pool pool.yaml --to deepspeed",
        "deepspeed",
        "megatron",
        files={"mine.yaml": plan_file()},
    ),
    _words("a degree that is no number", "memory model --parallel tp=x --sequence 32", "x", "tp=|number|integer"),
    _words("a file of no form", "check data/text.txt", r"text\.txt", "job|pool|form|schema"),
)
"""Wrong commands, servers, tokens and ports."""

MISTAKES = (*VALUES, *FILES, *PLACES, *POOLS, *COMMANDS)
