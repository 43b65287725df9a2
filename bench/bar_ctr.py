"""CTR models on Frappe through two shard processes and two workers, and PERSIA's recipe on Adult.

Frappe: trained on the train file, stopped early on one half of the validation file's users, reported on the other half.
Published test AUC / logloss: LR .9356 / .3076, FM .9671 / .2065, Wide&Deep .9841 / .1490, DeepFM .9842 / .1482, DCN-V2
.9845 / .1491, DLRM .9840 / .1444. Adult: one epoch of 254 batches; PERSIA's own test asserts AUC .89286.
Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import sys

from timing import finish, machine
from train_job import Bounds, run_example

DEEP: Bounds = {"auc": (0.983, 1.0), "logloss": (0.0, 0.16)}
BARS: dict[str, Bounds] = {
    "frappe-lr": {"auc": (0.93, 1.0)},
    "frappe-fm": {"auc": (0.957, 1.0)},
    "frappe-wide-deep": DEEP,
    "frappe-deepfm": DEEP,
    "frappe-dcn-v2": DEEP,
    "frappe-dlrm": DEEP,
    "adult": {"auc": (0.8909, 0.8949)},
}


def main() -> None:
    names = sys.argv[1:] or list(BARS)
    outcomes = [run_example(name) for name in names]
    result: dict[str, object] = {"bench": "ctr", "machine": machine()}
    result |= {o.name: o.summary(("auc", "logloss")) for o in outcomes}
    finish(result, [failure for o in outcomes for failure in o.failures(BARS[o.name])])


if __name__ == "__main__":
    main()
