"""Other people's models, with their own settings and in their own training loops, train wrapped as they do in torch.

Models of deepctr-torch (BaseModel.fit), torch-rechub (CTRTrainer, MatchTrainer), RecBole (Trainer), torchrec
(TrainPipelineBase), Lightning (Trainer), transformers (Trainer), accelerate, torchfm, torch-geometric and of our own
loops; regularisers and dropout are on. Each is built once and copied; the copy is wrapped over two shard processes, and
`session` stands where the loop expects an optimizer. SGD:
every step's loss and the weights at the end have torch's bits, or are within 1e-6 for a model that reads a table as a
whole (named in the table). Adagrad, and Adam for dense weights and tables that are read as a whole: every loss is as
near to torch's as torch is to itself, started from weights that differ in their last bit. Prints a table and one JSON
line; exits 1 below the bar. `bar_wrap.py recbole BERT4Rec` trains the models whose package or name has one of these.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings
from itertools import groupby
from typing import Any

import torch

from embershard.deploy.supervisor import LocalShards
from timing import finish, print_table

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
# deepctr-torch looks up its newest version when it is imported, and needs this package for nothing else
sys.modules["requests"] = types.ModuleType("requests")

from wrap.compare import KINDS, WHOLE_TOLERANCE, compare  # noqa: E402

PACKAGES = "deepctr rechub recbole torchrec lightning torchfm transformers geometric plain".split()
SHARDS, MODELS = 2, 25


def cell(result: dict[str, Any]) -> str:
    text = f"{result['worst_relative_difference']:.1e}".replace("0.0e+00", "0")
    if "torch_one_bit_off" in result:
        text += f" ({result['torch_one_bit_off']:.1e})"
    return text if result["ok"] else f"{text} FAILS"


def main() -> None:
    torch.set_num_threads(1)
    cases = [case for name in PACKAGES for case in importlib.import_module(f"wrap.{name}_models").CASES]
    if sys.argv[1:]:
        cases = [case for case in cases if any(part in f"{case.package} {case.name}" for part in sys.argv[1:])]
    results: list[dict[str, Any]] = []
    failures = []
    with LocalShards(SHARDS) as shards:
        for number, case in enumerate(cases, start=1):
            print(f"{number}/{len(cases)} {case.package} {case.name}", file=sys.stderr, flush=True)
            try:
                results += compare(case, shards.addresses)
            except Exception as error:
                failures.append(f"{case.package} {case.name}: {type(error).__name__}: {error}")
    table: list[list[object]] = []
    for (package, version, name), parts in groupby(results, lambda r: (r["package"], r["version"], r["model"])):
        of = {result["optimizer"]: result for result in parts}
        whole = "as a whole" if of["SGD"]["read_as_a_whole"] else "by rows"
        cells = [cell(of[kind]) if kind in of else "no such weights" for kind in KINDS]
        table.append([name, f"{package} {version}", whole, *cells])
    print_table(["model", "package", "tables are read", "SGD", "Adagrad (torch)", "Adam (torch)"], table)
    failures += [f"{r['package']} {r['model']}, {r['optimizer']}" for r in results if not r["ok"]]
    if not sys.argv[1:] and len(cases) < MODELS:
        failures.append(f"{len(cases)} models, not {MODELS}")
    figures = {"shards": SHARDS, "models": len(cases), "tolerance_of_whole_tables": WHOLE_TOLERANCE, "results": results}
    finish({"bar": "wrap", **figures}, failures)


if __name__ == "__main__":
    main()
