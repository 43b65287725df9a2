"""Simulated jobs whose shards, machines, links and workers fail: nothing that was promised is broken.

A failing seed is repeated by `cd tests && python -m simulation SEED`.
"""

import subprocess
import sys

import pytest

from simulation import mutants
from simulation.simulation import simulate

TESTS = mutants.ROOT / "tests"
SEEDS_FOR_MUTANTS = 400


def check(seed):
    result = simulate(seed)
    assert not result.wrong, f"python -m simulation {seed}  # {result.wrong[0]}"
    return result


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_nothing_is_lost_in_ten_seeds(first):
    assert sum(sum(check(seed).faults.values()) for seed in range(first, first + 10)) > 100


def test_a_seed_repeats_itself():
    assert len({simulate(7).trace for _ in range(3)}) == 1
    assert simulate(8).trace != simulate(7).trace


@pytest.mark.long
def test_nothing_is_lost_in_500_seeds():
    for seed in range(500):
        check(seed)


@pytest.mark.long
@pytest.mark.parametrize("name", mutants.names())
def test_a_mutant_is_caught(name):
    command = [sys.executable, "-m", "simulation", mutants.seeds(name, SEEDS_FOR_MUTANTS), "--mutant", name]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 1, done.stdout
    assert f"--mutant {name}  #" in done.stdout, done.stderr
