"""A substitute for the training program: a real process that uses a worker's folder, and trains nothing.

It notes each start as one line `job attempt rank pid` in `<output>/starts`, checks in, waits for the rank
map, and then writes a metrics line and a log line for each of the job's steps, twenty steps a second.
"""

import json
import os
import sys
import time
from pathlib import Path

STEP_S = 0.05
PATIENCE_S = 60.0


def put(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def main() -> None:
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    run, attempt, rank = spec["run"], spec["attempt"], spec["rank"]
    output = Path(spec["job"]["output"])
    output.mkdir(parents=True, exist_ok=True)
    with (output / "starts").open("a") as starts:
        starts.write(f"{run} {attempt} {rank} {os.getpid()}\n")
    cluster = spec["plan"]["stages"][rank]["cluster"]
    put(
        folder / "checkin.json",
        json.dumps({"rank": rank, "cluster": cluster, "host": spec["host"], "port": 9000 + rank}),
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "ranks.json").exists():
        if time.monotonic() > deadline:
            sys.exit("TimeoutError: no rank map")
        time.sleep(0.01)
    for step in range(spec["job"]["training"]["steps"]):
        line = {"job": run, "attempt": attempt, "rank": rank, "step": step, "values": {"loss": 5.0 - step}}
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
        print(f"step {step} of rank {rank} äöü", flush=True)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
