"""Which role may call which method."""

from __future__ import annotations

from embershard.proto.messages import (
    METHODS,
    Compress,
    Declare,
    GetStatus,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Load,
    Pull,
    Push,
    Rendezvous,
    Request,
    Restore,
    Snapshot,
    TakeSplit,
)

ROLES = ("read", "train", "admin")  # each may do what those before it may

# The least role of each method. Health (grpc.health.v1) has no row: anyone may ask it.
LEAST_ROLE: dict[type[Request], str] = {
    Hello: "read",
    GetStatus: "read",
    Pull: "read",
    Declare: "read",  # to compare a table with the one that is there; more needs train: see Access.admit_declare
    Load: "train",
    Push: "train",
    Join: "train",
    Leave: "train",
    Heartbeat: "train",
    Rendezvous: "train",
    TakeSplit: "train",
    Snapshot: "train",  # worker 0 takes checkpoints,
    Compress: "train",  # switches codecs,
    Restore: "train",  # and goes on from a checkpoint: of tables that are its own, see Access.admit
}
if missing := set(METHODS) ^ set(LEAST_ROLE):
    raise ImportError(
        f"roles.py says of no role, or too much, of {', '.join(sorted(kind.__name__ for kind in missing))}"
    )

ALLOWED: dict[str, frozenset[type[Request]]] = {
    role: frozenset(kind for kind, least in LEAST_ROLE.items() if ROLES.index(least) <= ROLES.index(role))
    for role in ROLES
}
