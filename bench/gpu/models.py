"""Models of bench/wrap in their own loops on a GPU: wrapped over two shards, compared with plain torch on the same GPU.

A GPU adds gradients in an order of its own, so no bits are compared: every step's loss is as near to torch's as torch
is to itself, started from weights that differ in their last bit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from part import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from embershard.deploy.supervisor import LocalShards
from wrap import log
from wrap.compare import compare

MODULES = {"plain_models": "torch", "geometric_models": "torch_geometric"}  # and what they import


def module_on(device: str, name: str) -> ModuleType:
    """The module of models, with its data on the device; lengths stay, as packed sequences want them on the CPU."""
    module = importlib.import_module(f"wrap.{name}")

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for batch in log.batches():
            yield {key: value if key == "length" else value.to(device) for key, value in batch.items()}

    module.batches = batches  # type: ignore[attr-defined]
    module.COLUMNS = log.COLUMNS  # type: ignore[attr-defined]
    if hasattr(module, "EDGES"):
        module.EDGES = module.EDGES.to(device)
    return module


def main() -> None:
    """Train every model with every optimizer; AssertionError where a bound does not hold, after all have run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    torch.set_default_device(device)
    failures = []
    with LocalShards(2) as shards:
        for name, package in MODULES.items():
            if importlib.util.find_spec(package) is None:
                print(f"{name} is left out: {package} is not installed")
                continue
            for case in module_on(device, name).CASES:
                try:
                    results = compare(case, shards.addresses, exact=False)
                except Exception as error:
                    failures.append(f"{case.name}: {type(error).__name__}: {error}")
                    print(failures[-1], flush=True)
                    continue
                for result in results:
                    what = f"{result['model']}, {result['optimizer']}"
                    report(check=what, found=result["worst_relative_difference"], bound=result["limit"])
                    print(
                        f"{what}: {result['worst_relative_difference']:.1e}, at most {result['limit']:.1e}", flush=True
                    )
                    if not result["ok"]:
                        failures.append(f"{what}: {result}")
    assert not failures, "; ".join(failures)


if __name__ == "__main__":
    main()
