"""The subjects of the benchmarks: a page each under `docs/benchmarks`, and the figures of its summary there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A figure of the summary: the first row of a benchmark whose `what` matches the regular expression `row`."""

    benchmark: str
    label: str
    row: str


@dataclass(frozen=True)
class Subject:
    """A page: its file name without suffix, its title, what it answers, its benchmarks in order, its figures."""

    page: str
    title: str
    question: str
    benchmarks: tuple[str, ...]
    figures: tuple[Figure, ...]


SUBJECTS = (
    Subject(
        "planning",
        "Planning",
        "How good the plans are, how long the search takes, and how both compare with other planners.",
        ("search_quality", "search_scale", "unlike_sizes", "peers"),
        (
            Figure(
                "search_quality",
                "plans as fast as the best of exhaustive search",
                r"simulated time equal .*: \d+ small instances \(",
            ),
            Figure("search_quality", "slower than the best random plan, worst", "slower than the best of .*random"),
            Figure("search_scale", "search over 8,192 chips, A100 and V100", "search: 8,192 chips"),
            Figure("search_scale", "search over 100,000 chips of 4 types at 8 sites", "search: 100,000 chips"),
            Figure("search_scale", "gap to the proven bound, 9,984 chips", "gap to the proven bound, 9,984"),
            Figure(
                "unlike_sizes",
                "micro-batch sizes by replica: search equal to every layout",
                "search equal to every layout",
            ),
            Figure("peers", "speed of the plan, 128 A100 and 384 V100", r"iterations a second, .*128 A100 \+ 384"),
            Figure("peers", "speed over the best peer's, worst random case", "iterations a second over the best"),
        ),
    ),
    Subject(
        "simulation",
        "Simulation",
        "How fast the simulator of a training iteration is.",
        ("simulator",),
        (
            Figure("simulator", "events of the kernel", "kernel: events"),
            Figure(
                "simulator",
                "an iteration of 100,352 chips, overlapped schedule",
                "an iteration of 100,352 chips: overlapped",
            ),
        ),
    ),
    Subject(
        "prediction",
        "Prediction",
        "How far the predicted iteration is from measured ones: published, on this machine, and on virtual chips.",
        ("published", "demo", "whitepaper"),
        (
            Figure(
                "published",
                "tasks of the cross-domain report: mean error",
                r"report 5\.2, \d+ published tasks predicted: mean",
            ),
            Figure("published", "runs of papers and submissions: mean error", r"published rows: \d+ predicted"),
            Figure("demo", "step of the demo, predicted", "predicted step, "),
            Figure(
                "whitepaper",
                "tasks of the report, run on virtual chips: mean distance from the simulator",
                r"\d+ tasks: distance from the simulator",
            ),
        ),
    ),
    Subject(
        "training",
        "Training",
        "What checkpoints and faults cost a training run, what ways to divide it are worth, and how well copies of a "
        "GPU overlap with computing.",
        ("checkpoints", "faults", "gpu", "parallel"),
        (
            Figure(
                "checkpoints",
                "training time lost per GB, a checkpoint in memory at every step",
                "lost per GB, into shared memory",
            ),
            Figure("checkpoints", "training time lost per GB, a checkpoint on disk", "lost per GB, onto disk"),
            Figure("checkpoints", "restore per GB, from disk, checksums verified", "restore per GB, from disk"),
            Figure("faults", "all ranks train on after a killed worker", "kill -9 of a worker, .*: resumed"),
            Figure("faults", "all ranks train on after a link returns", "a WAN cut of .*: resumed"),
            Figure("faults", "faults by seed that end as they must", r"\d+ faults by seed"),
            Figure("gpu", "overlap of copies with computing", ".*: overlap"),
            Figure(
                "parallel",
                "time that a searched schedule saves over 1F1B across sites, median, at its peak memory",
                "schedule search, .*: less time than 1f1b, median \\(",
            ),
            Figure("parallel", "search of a schedule, 16 stages x 128 micro-batches", "schedule search, 16 stages"),
        ),
    ),
    Subject(
        "rl",
        "Reinforcement learning",
        "How many bytes a new version of weights takes, how fast it is coded, and what faults do to the trajectories.",
        ("rl",),
        (
            Figure("rl", "bytes per changed weight, 1 % changed", r"bytes per changed weight, .*rate 1e-06"),
            Figure("rl", "weights coded by a core", "coding: weights by CPU time"),
            Figure("rl", "prompts lost over seeded faults", ".*: prompts lost"),
        ),
    ),
    Subject(
        "transport",
        "Transport",
        "Whether emulated links behave as stated, and what distance and loss cost a pipeline across clusters.",
        (
            "wan_links",
            "wan_packets",
            "wan_proxy",
            "roce_gateway",
            "wan_control",
            "tenants",
            "wan_crossing",
            "wan_pipeline",
            "collectives",
            "neighbours",
            "passing",
        ),
        (
            Figure("wan_links", "goodput of a link of 1 Gbit/s, 100 ms", "goodput, one flow, 1 Gbit/s, 100 ms"),
            Figure("wan_links", "largest rate within 5 %, all ends on this machine", "largest rate within 5 %"),
            Figure("wan_packets", "TCP over packets emulated at 10 Gbit/s", "TCP, MTU 1500, 10 Gbit/s: .* lost"),
            Figure("wan_control", "paths over 1,000 nodes, 20 domains, by CPU time", "light load: requests answered"),
            Figure("tenants", "frames at another of 1,000 tenants with one address plan", "1,000 .* crossings"),
            Figure("tenants", "one more of 1,000 tenants up", "1,000 .* one more, from its file"),
            Figure(
                "wan_pipeline",
                "rate at 50 ms over one cluster's, micro-batches of 200 ms",
                "50 ms, 1 hops, .* of 200 ms: one cluster's rate",
            ),
            Figure("wan_pipeline", "times as fast as the peer at 20 ms, 4 stages", "4 stages, .* 2 MiB, 20 ms"),
            Figure("wan_pipeline", "rate at 0.1 % packet loss over the ideal pipeline's", "loss 1e-3, .*BBR"),
            Figure(
                "wan_pipeline",
                "rate of chips of speed 1 : 2 : 4 over the sum of them alone",
                "speeds 1 : 2 : 4, .* zero bubble",
            ),
            Figure("wan_pipeline", "steps of random plans, predicted: mean error", r"\d+ random plans, .* mean"),
            Figure("collectives", "a sum of 4 KiB over two clusters", r"all-reduce 2\+2, .*, 4 KiB \("),
        ),
    ),
    Subject(
        "control-plane",
        "Control plane",
        "How fast the control plane decides, stores, places and orders, and what owners gain in the pool.",
        ("control_core", "control_plane", "control_store", "placement", "global_order", "site_queue"),
        (
            Figure("control_core", "gangs placed, whole life", "gangs placed"),
            Figure("control_core", "memory of a million queued jobs", "memory of"),
            Figure("control_plane", "Kueue's baseline of 15,000 workloads", "Kueue's baseline: .* in all"),
            Figure("control_plane", "KAI's scale test of 4,000 jobs", "KAI's scale test: .* in all"),
            Figure(
                "control_plane",
                "joint preemption over 5 owners, agreed to all ready, p99",
                "joint preemption .*: agreed to all ready",
            ),
            Figure("control_plane", "own p95 wait in the pool over alone, load 0.85, worst owner", "trace 'busy'"),
            Figure(
                "control_store",
                "durable submissions, one per request, SQLite",
                r"durable submissions, one a request, 16 clients, SQLite \(",
            ),
            Figure(
                "control_store",
                "start with 100,000 queued jobs, SQLite",
                "start with .*, SQLite, behind a snapshot .* wall",
            ),
            Figure("placement", "placement on 100,000 nodes, p99", "100,000 nodes, .*: p99 of .* random requests"),
            Figure("placement", "requests that are placed, 100,000 nodes", "100,000 nodes, .*: requests that are"),
            Figure(
                "global_order",
                "order of 10,000 waiting jobs by utilisation",
                "order of 10,000 waiting jobs, utilisation",
            ),
            Figure("site_queue", "10,000 pending jobs of a site reordered", "10,000 pending, 100%.*: reordered"),
            Figure("site_queue", "moves for it", "10,000 pending, 100%.*: moves"),
        ),
    ),
    Subject(
        "ranks",
        "Ranks",
        "What a replaced worker changes for other ranks and for the network between them.",
        ("ranks",),
        (
            Figure("ranks", "1,000 workers replaced: others' numbers or addresses changed", r"1,000 .*: other ranks"),
            Figure("ranks", "links of 1,000 replaced workers mapped again", r"1,000 .*: links mapped again, all"),
        ),
    ),
    Subject(
        "sites",
        "Real sites",
        "What jobs over real schedulers cost beyond them, and what the schedulers' faults do to jobs.",
        ("sites",),
        (
            Figure(
                "sites",
                "lost, doubled or half started under seeded faults",
                r"[\d,]+ seeded faults on a real Slurm, .*: holds",
            ),
            Figure(
                "sites", "jobs lost when slurmctld is killed after it accepted them", "slurmctld killed .*: jobs lost"
            ),
            Figure(
                "sites",
                "one job over two Slurms: all ranks up, beyond a bare srun, p50",
                "one job over two Slurms, .*: submission to all ranks up, .* p50",
            ),
            Figure("sites", "one look at 2,000 jobs of Slurm", r"one look at 2,000 jobs, p50"),
            Figure("sites", "courier at 10 MB/s: CPU of the agent's end", "courier, .*: CPU of the agent's end"),
        ),
    ),
    Subject(
        "first-hour",
        "First hour",
        "What a new user meets: time to the first loss, several machines, mistakes, shared folders, and true results.",
        ("first_hour",),
        (
            Figure("first_hour", "git clone to the first loss, packages cached", "git clone to the first loss"),
            Figure("first_hour", "mistakes refused before chips are held", r"\d+ mistakes: refused"),
            Figure("first_hour", "refusals that say what, which value, what next", r"\d+ mistakes: the refusal"),
            Figure("first_hour", "pairs of jobs with a silent reuse", r"\d+ pairs of jobs"),
            Figure("first_hour", "messages drawn beside the links' record", "messages between clusters, .*: largest"),
            Figure("first_hour", "losses beside a plain torch loop, Mixtral", "losses of Mixtral"),
        ),
    ),
    Subject(
        "protocol",
        "Protocol",
        "Whether the protocol of the control plane holds in every state, and under seeded faults.",
        ("model_check", "pool_chaos"),
        (
            Figure(
                "model_check",
                "states of two jobs at 2 owners, one fault, one preemption, all checked",
                "2 owners, j:ab k:ab, 1 faults, 1 preemptions: states",
            ),
            Figure("pool_chaos", "seeded runs with a problem", r"\d+ runs with a problem"),
            Figure("pool_chaos", "longest hold of a card for an unwanted part", "longest that a card was kept"),
        ),
    ),
    Subject(
        "business",
        "Business",
        "Whether the ledger is exact under faults and restarts, what metering costs, how fast the console answers, and "
        "how a site places parts.",
        ("business", "console", "monitoring", "site_placement"),
        (
            Figure("business", "sum of all entries under seeded faults", r"[\d,]+ seeded runs: sum"),
            Figure(
                "business", "intervals that the ledger lacks", r"[\d,]+ seeded runs: intervals that the ledger lacks"
            ),
            Figure("business", "intervals booked twice", r"[\d,]+ seeded runs: intervals booked twice"),
            Figure("business", "a month of 100,000 jobs, ledger from nothing", r"a month of [\d,]+ jobs: ledger"),
            Figure("business", "the meter's share of the coordinator's time", "the meter's share of the coordinator"),
            Figure("business", "the meter's share of handling a log", "the meter's share of handling a log"),
            Figure("site_placement", "placing a part on 10,000 nodes, p99", "10,000 nodes, .*: p99"),
            Figure("site_placement", "wait of whole-ToR gangs with moves, of the better fit's", r"\d+ traces: wait"),
            Figure("console", "console with 1,000,000 queued jobs: first content of the queue", "queue: first content"),
            Figure("console", "a click answered there, p99", "click to another page"),
            Figure("console", "an event on 200 open pages, p99", "an event on .* open pages"),
            Figure("monitoring", "a scrape of 10,000 series, p99", "a scrape of .*: p99"),
        ),
    ),
    Subject(
        "trust",
        "Trust boundaries",
        "What protection from strangers, users and owners costs, and what seeded attackers gain.",
        ("trust",),
        (
            Figure("trust", "seeded attacks that succeeded", r"\d+ seeded attacks of"),
            Figure("trust", "refusals that the audit log lacks", r"\d+ refusals of these"),
            Figure("trust", "keys of links: CPU time of both ends", "keys on links, both ends"),
            Figure("trust", "keys of links: step of the demo's pipeline longer by", "step of the demo's pipeline"),
            Figure("trust", "restore on two other sites: bytes moved over needed", "restore on two other sites"),
        ),
    ),
)
