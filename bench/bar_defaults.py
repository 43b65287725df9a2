"""Examples that name their first values, without that line: the default must serve as well.

Each job of examples/ that has `embedding.initializer` is trained as it is and with `embedding.initializer=null`, one
seed each. AUC on the split that chooses the model may not be lower by more than 0.002.

The runs are left in runs/ctr, where bar_ctr.py leaves those of the whole files: what is there is not made again. Remove
that folder to begin anew, as after a change of the code. Prints a table, then one JSON line; exits 1 below the bar.
`bar_defaults.py frappe-fm` compares one job.
"""

from __future__ import annotations

import argparse

from ruamel.yaml import YAML

from bar_ctr import FOLDER
from timing import finish, machine, print_table
from train_job import EXAMPLES, run_example

LOWER = 0.002
SEED = 1


def named() -> list[str]:
    """The examples that name their first values."""
    jobs = {path.stem: YAML(typ="safe").load(path) for path in sorted(EXAMPLES.glob("*.yaml"))}
    return [name for name, job in jobs.items() if "initializer" in job.get("embedding", {})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="job", help=f"some of: {', '.join(named())}")
    names = parser.parse_args().names or named()
    if unknown := set(names) - set(named()):
        parser.error(f"no example of these names its first values: {', '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    seed = ("--set", f"train.seed={SEED}")
    rows, failures, figures = [], [], {}
    for name in names:
        own = run_example(name, *seed, folder=FOLDER / f"{name}-{SEED}").figures["auc"]
        folder = FOLDER / f"{name}-{SEED}-defaults"
        default = run_example(name, *seed, "--set", "embedding.initializer=null", folder=folder).figures["auc"]
        rows.append([name, f"{own:.5f}", f"{default:.5f}", f"{default - own:+.5f}"])
        print_table(("job", "AUC as written", "by default", "difference"), rows[-1:])
        figures[name] = {"own": round(own, 5), "default": round(default, 5)}
        if default < own - LOWER:
            failures.append(f"{name}: AUC is {own - default:.5f} lower with the default first values")
    print_table(("job", "AUC as written", "by default", "difference"), rows)
    finish({"bench": "defaults", "machine": machine(), "seed": SEED, "figures": figures}, failures)


if __name__ == "__main__":
    main()
