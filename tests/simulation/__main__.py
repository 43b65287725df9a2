"""Run seeds: python -m simulation 17, or 0:1000; --mutant NAME plants a fault, --trace prints all that happens.

In place of seeds, a test (ps/test_shard.py::test_a) runs with the fault that is planted.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

import pytest

from . import mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, FIRST:END, or FILE::TEST")
    parser.add_argument("--mutant", choices=mutants.names())
    parser.add_argument("--focus", help="of the faults, in place of the seed's own; '' is none")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    args = parser.parse_args()
    if args.mutant:
        mutants.install(args.mutant)
    if "::" in args.seeds:
        return pytest.main(["-q", "-p", "no:cacheprovider", args.seeds])
    from .simulation import Simulation

    first, _, end = args.seeds.partition(":")
    bases = 0
    began, faults, events, recoveries, failed = time.process_time(), Counter(), 0, 0, []
    seeds = range(int(first), int(end)) if end else [int(first)]
    for seed in seeds:
        simulation = Simulation(seed, focus=args.focus, lines=args.trace)
        try:
            result = simulation.run()
        except Exception:
            traceback.print_exc()
            result = None
        if args.trace:
            print("\n".join(simulation.world.lines or []))
        wrong = simulation.world.wrong if result is None else result.wrong
        if result is None or wrong:
            failed.append(seed)
            mutant = f" --mutant {args.mutant}" if args.mutant else ""
            print(
                f"python -m simulation {seed}{mutant}  # {simulation.scenario.durability}:",
                wrong[0] if wrong else "it raised",
                flush=True,
            )
            if not args.keep_going:
                break
        if result is not None:
            faults += result.faults
            events, recoveries, bases = events + result.events, recoveries + result.recoveries, bases + result.bases
            if len(list(seeds)) == 1:
                print(result)
    seconds = time.process_time() - began
    print(f"{seeds} {len(failed)} wrong; {sum(faults.values())} faults, {events} events, "
          f"{recoveries} recoveries with {bases} bases, "
          f"{seconds:.1f} s of CPU, {60 * sum(faults.values()) / seconds:.0f} faults/min")  # fmt: skip
    return bool(failed)


sys.exit(main())
