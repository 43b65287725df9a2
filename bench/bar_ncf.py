"""NCF's GMF and MLP on MovieLens-1M, through two shard processes and two workers, against the published figures.

The protocol is the paper's: each user's held-out item ranked among 99 others, the best epoch reported. HR@10 / NDCG@10
of the authors' released weights: GMF with 8 factors .6368 / .3691, MLP 64-32-16-8 .6710 / .3963.
Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

from timing import finish, machine
from train_job import Bounds, run_example

BARS: dict[str, Bounds] = {
    "ncf-gmf": {"hr@10": (0.63, 1.0), "ndcg@10": (0.365, 1.0)},
    "ncf-mlp": {"hr@10": (0.665, 1.0), "ndcg@10": (0.39, 1.0)},
}


def main() -> None:
    outcomes = [run_example(name) for name in BARS]
    result = {"bench": "ncf", "machine": machine(), "workers": 2, "shards": 2}
    result |= {o.name: o.summary(("hr@10", "ndcg@10")) for o in outcomes}
    finish(result, [failure for o in outcomes for failure in o.failures(BARS[o.name])])


if __name__ == "__main__":
    main()
