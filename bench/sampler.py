"""What the panel's sampler costs: CPU of its process and of two shards, against the same seconds without it.

The shards have tables and serve nobody else. The sampler runs in this process, which does nothing beside it, once a
second and twice (its default), without a page. Prints CPU as shares of a core, and one JSON line.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing

import numpy as np

from embershard.dash.sampler import INTERVAL_SECONDS, Sampler
from embershard.deploy.supervisor import LocalShards
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.worker.client.client import Client
from timing import cpu_seconds, finish, load, machine, print_table

TABLES = 26  # of Criteo's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    seconds = parser.parse_args().seconds
    print(f"{machine()}; {load()}", flush=True)
    found: dict[str, dict[str, float]] = {}
    with LocalShards(2) as shards:
        with closing(Client.connect(shards.addresses)) as client:
            for number in range(TABLES):
                spec = TableSpec(name=f"table-{number}", dim=16, optimizer=SGD(lr=0.1))
                client.declare(spec)
                client.pull([(spec.name, make_route(np.arange(1000), spec.space_key, client.placement))])
        for name, interval in (("none", None), ("1 s", 1.0), (f"{INTERVAL_SECONDS} s", INTERVAL_SECONDS)):
            sampler = None if interval is None else Sampler(shards.addresses, interval=interval)
            if sampler is not None:
                sampler.start(lambda sample: None)
                time.sleep(2)  # it has connected
            before = cpu_seconds([os.getpid()]), cpu_seconds(shards.pids)
            began = time.perf_counter()
            time.sleep(seconds)
            wall = time.perf_counter() - began
            own, theirs = cpu_seconds([os.getpid()]) - before[0], cpu_seconds(shards.pids) - before[1]
            found[name] = {"sampler": own / wall, "shards": theirs / wall}
            if sampler is not None:
                sampler.close()
    rows = [[name, *(f"{share:.2%}" for share in shares.values())] for name, shares in found.items()]
    print_table(["shares of a core, a sample each", "sampler", "two shards"], rows)
    finish({"bench": "sampler", **found, "load_after": load()}, [])


if __name__ == "__main__":
    main()
