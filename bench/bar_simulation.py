"""Ten thousand simulated jobs whose shards, machines, links and workers fail: 0 promises broken.

tests/simulation runs real shards, logs, clients and memberships in one thread, over simulated clocks, disks, links and
processes; docs/durability.md says how, and what its oracle looks at. Here:

- 10,000 seeds, none wrong;
- at least 2,000 faults a minute of one core. A fault counts only where it hits a request that is not answered, or a
  write or sync of a disk: others do not happen;
- each kind of fault at least 100 times in each state of a shard that it can come in;
- one seed repeated 100 times is 100 times the same, by a checksum of all that happened;
- at least 19 of 20 planted mutants are caught, each by the seed or test that it names, or within --mutant-seeds seeds.

It goes on where an interrupted run of the same code ended, and runs the mutants again if one of them, or a test that
one names, has changed. Prints one JSON line; exits 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from timing import finish, load

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
CODE = ("proto", "ps", "worker/client", "worker/compression", "tests/simulation", "tests/harness")
PIECE = 100  # seeds between two notes of how far it is
FAULTS_PER_MINUTE, TIMES_IN_EACH_STATE = 2000, 100
REPEATED_SEED = 7

sys.path.insert(0, str(TESTS))


def code_files() -> list[Path]:
    """What decides what a seed does."""
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if not path.name.startswith("test_")]


def mutant_files() -> list[Path]:
    """The mutants, and the files of the tests that they name."""
    from simulation import mutants

    caught_by = [mutants.arguments(name, 0)[0] for name in mutants.names()]
    tests = {TESTS / test.partition("::")[0] for test in caught_by if "::" in test}
    return [*sorted(mutants.FOLDER.glob("*.patch")), *sorted(tests)]


def sha256_of(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


class Progress:
    """What a run has found so far, kept in a file."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        code = sha256_of(code_files())
        self.state: dict[str, Any] = {"code": code, "first": first, "next": first, "cpu_seconds": 0.0}
        self.state |= {"wrong": [], "faults": {}, "states": {}, "covered": {}, "events": 0, "mutants": {}, "repeats": 0}
        if path.exists():
            before = json.loads(path.read_text())
            if all(before[name] == self.state[name] for name in ("code", "first")):
                self.state = before
        if self.state.get("mutant_files") != (mutant_files_now := sha256_of(mutant_files())):
            self.state |= {"mutant_files": mutant_files_now, "mutants": {}}

    def add(self, name: str, counts: Counter[Any]) -> None:
        for key, count in counts.items():
            key = key if isinstance(key, str) else " | ".join(key)
            self.state[name][key] = self.state[name].get(key, 0) + count

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.state))


def run_seeds(progress: Progress, end: int) -> None:
    from simulation.simulation import simulate

    simulate(0)  # compiles
    state = progress.state
    while state["next"] < end:
        began = time.process_time()
        for seed in range(state["next"], min(end, state["next"] + PIECE)):
            result = simulate(seed)
            if result.wrong:
                print(f"cd tests && python -m simulation {seed}  # {result.wrong[0]}", flush=True)
                state["wrong"].append(seed)
            progress.add("faults", result.faults)
            progress.add("states", result.states)
            progress.add("covered", result.covered)
            state["events"] += result.events
            state["next"] = seed + 1
        state["cpu_seconds"] += time.process_time() - began
        progress.write()
        total, minutes = sum(state["faults"].values()), state["cpu_seconds"] / 60
        print(f"{state['next'] - state['first']} seeds, {len(state['wrong'])} wrong, {total} faults, "
              f"{total / minutes:.0f} a minute of CPU; {load()}", flush=True)  # fmt: skip


def run_mutants(progress: Progress, names: list[str], seeds: int) -> None:
    """Note the seed, or the test, that catches each mutant; empty where nothing does."""
    from simulation import mutants

    for name in names:
        if progress.state["mutants"].get(name):
            continue
        arguments = mutants.arguments(name, seeds)
        command = [sys.executable, "-m", "simulation", *arguments]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
        caught = progress.state["mutants"][name] = mutants.catcher(arguments, done.stdout)
        progress.write()
        wrong = next((line.partition("# ")[2] for line in done.stdout.splitlines() if f"--mutant {name}" in line), "")
        print(f"mutant {name}: {f'[{caught}] {wrong}' if caught else 'not caught'}", flush=True)


def run_repeats(progress: Progress, count: int) -> None:
    from simulation.simulation import simulate

    traces = {simulate(REPEATED_SEED).trace for _ in range(count)}
    progress.state["repeats"] = count if len(traces) == 1 else 0
    print(f"seed {REPEATED_SEED}, {count} times: {len(traces)} different traces", flush=True)
    progress.write()


def print_table(states: dict[str, int]) -> list[str]:
    """Print the faults by kind and state; those that are too rare."""
    from simulation.faults import IMPOSSIBLE, KINDS, STATES

    print("faults".ljust(13) + "".join(state[:9].rjust(10) for state in STATES))
    rare = []
    for kind in KINDS:
        counts = [states.get(f"{kind} | {state}", 0) for state in STATES]
        cells = ["-" if (kind, state) in IMPOSSIBLE else str(n) for state, n in zip(STATES, counts, strict=True)]
        print(kind.ljust(13) + "".join(cell.rjust(10) for cell in cells))
        rare += [
            f"{kind} in {state}: {count}"
            for state, count in zip(STATES, counts, strict=True)
            if count < TIMES_IN_EACH_STATE and (kind, state) not in IMPOSSIBLE
        ]
    return rare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--mutant-seeds", type=int, default=400)
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "bar_simulation.json")
    args = parser.parse_args()
    from simulation import mutants

    progress = Progress(args.state, args.first)
    state, names = progress.state, mutants.names()
    run_seeds(progress, args.first + args.seeds)
    if state["repeats"] < args.repeats:
        run_repeats(progress, args.repeats)
    run_mutants(progress, names, args.mutant_seeds)
    rare = print_table(state["states"])
    print("\n".join(f"{count:9} {what}" for what, count in sorted(state["covered"].items())))
    total, seeds = sum(state["faults"].values()), state["next"] - state["first"]
    per_minute = 60 * total / state["cpu_seconds"] if state["cpu_seconds"] else 0.0
    catchers = [catcher for catcher in state["mutants"].values() if catcher]
    caught, by_test = len(catchers), sum("::" in catcher for catcher in catchers)
    print(f"mutants: {caught - by_test} of {len(names)} caught by a seed, {by_test} by the test that they name")
    failures = [f"seed {seed} is wrong" for seed in state["wrong"]]
    if per_minute < FAULTS_PER_MINUTE:
        failures.append(f"{per_minute:.0f} faults a minute of CPU, not {FAULTS_PER_MINUTE}")
    if args.seeds >= 10_000:
        failures += [f"too rare: {what}" for what in rare]
    if state["repeats"] < args.repeats:
        failures.append(f"seed {REPEATED_SEED} does not repeat itself")
    if caught * 20 < 19 * len(names):
        failures.append(f"{caught} of {len(names)} mutants caught")
    result = {
        "bar": "simulation",
        "load": load(),
        "seeds": seeds,
        "wrong": len(state["wrong"]),
        "faults": total,
        "faults_per_minute_of_a_core": round(per_minute),
        "cpu_seconds": round(state["cpu_seconds"], 1),
        "events": state["events"],
        "recoveries": state["covered"].get("recoveries", 0),
        "rarest_fault_in_a_state": min((int(what.rpartition(": ")[2]) for what in rare), default=TIMES_IN_EACH_STATE),
        "repeats": f"{state['repeats']}/{args.repeats}",
        "mutants_caught_by_a_seed": f"{caught - by_test}/{len(names)}",
        "mutants_caught_by_a_named_test": f"{by_test}/{len(names)}",
        "mutants_caught_by": state["mutants"],
    }
    finish(result, failures)


if __name__ == "__main__":
    main()
