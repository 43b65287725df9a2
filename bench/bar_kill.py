"""kill -9 of shards with a log, a thousand times at random moments: no acknowledged push is lost, none counts twice.

Two shard processes and two workers that push to three tables (plain, topk with error feedback, int8; every third push
is a difference, as of local steps). Shards are killed at random: while they serve, and while they start or recover.
The modes take turns: asynchronous, bounded (3), synchronous; --durability log and fsync. After each 25 kills all
workers come to the same step, and then:

- the log of each shard has each push exactly once (by worker and seq);
- the rows are equal, to the bit, to what a replay of these logs makes;
- and to what the same pushes make of shards that nothing happened to.

No worker may end with an error, or need anybody. Prints one JSON line; exits 1 on anything else.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos import MODES, differing, job_on, kill, log_problems, random_pause, shards_with_logs, undisturbed
from timing import disk, finish, load, median

SHARDS = 2


def one_round(
    folder: Path, mode: str, durability: str, kills: int, chooser: random.Random, seen: Counter[str]
) -> tuple[list[str], list[float]]:
    """Some kills of shards that begin empty; what was wrong afterwards, and how long the workers waited."""
    pauses: list[float] = []
    with shards_with_logs(SHARDS, folder, durability, lambda line: None) as shards:
        done = 0
        with job_on(shards.addresses, mode) as job:
            while done < kills:
                random_pause(chooser, job)
                victim = chooser.randrange(SHARDS)
                began = time.monotonic()
                if not kill(shards, victim):
                    continue
                done += 1
                seen["kills"] += 1
                if chooser.random() < 0.2:  # both at once
                    hit = kill(shards, 1 - victim)
                    done += hit
                    seen["kills"] += hit
                if chooser.random() < 0.2:
                    job.await_steps(2)
                    pauses.append(time.monotonic() - began)
            steps, rows = job.finish()
    problems = log_problems(folder, SHARDS, steps, rows, seen)
    problems += [
        f"other rows of table {name} than undisturbed" for name in differing(rows, undisturbed(steps, mode, SHARDS))
    ]
    return [f"{mode}, {durability}: {problem}" for problem in problems], pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--round", type=int, default=25, help="kills between two looks at everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where logs are kept; default: a temporary folder")
    args = parser.parse_args()
    chooser, seen, failures, pauses = random.Random(args.seed), Counter[str](), list[str](), list[float]()
    began, number, rounds = time.monotonic(), 0, Counter[str]()
    while seen["kills"] < args.kills and not failures:
        mode, durability = list(MODES)[number % 3], ("log", "fsync")[number // 3 % 2]
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            kills = min(args.round, args.kills - seen["kills"])
            found, waited = one_round(folder, mode, durability, kills, chooser, seen)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failures += found
        pauses += waited
        rounds[f"{mode} {durability}"] += 1
        number += 1
        print(
            f"{seen['kills']} kills, {time.monotonic() - began:.0f} s, {mode}, {durability}: {found or 'ok'}",
            flush=True,
        )
    result = {
        "bar": "kill",
        "load": load(),
        "disk": disk(args.folder),
        "seed": args.seed,
        **{name: seen[name] for name in ("kills", "lost", "doubled", "pushes", "events")},
        "rounds": dict(rounds),
        "seconds_until_all_workers_went_on": {"median": round(median(pauses), 2), "worst": round(max(pauses), 2)}
        if pauses
        else {},
        "seconds": round(time.monotonic() - began, 1),
    }
    finish(result, failures)


if __name__ == "__main__":
    main()
