"""Who is not told what a machine has lost with its power, and waits for it in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..machines import ShardMachine
    from ..simulation import Simulation
    from ..workers import SimulatedWorker

TOLD_SECONDS = 15.0  # of heartbeats and calls, in which a worker has heard of it


def untold(simulation: Simulation, waiter: SimulatedWorker) -> str:
    """What should have ended the wait of a worker that has given it up; empty where nothing should."""
    for machine in simulation.machines:
        oracle = machine.oracle
        if not oracle.has_lost or not machine.is_serving or oracle.world.now < oracle.served_at + TOLD_SECONDS:
            continue
        if machine.number in waiter.asked_lately() and not _is_known(machine, waiter):
            return f"worker {waiter.number} waits at shard {machine.number}, which has lost its join"
        for worker in simulation.workers:
            if found := _untold_by(machine, worker):
                return found
    return ""


def _is_known(machine: ShardMachine, worker: SimulatedWorker) -> bool:
    """Whether a shard knows that this incarnation of a worker is, or was, a member."""
    model = machine.oracle.model
    known = [one.get(worker.number) for one in (model.members, model.gone)]
    return any(one is not None and one.epoch == worker.client.epoch for one in known)


def _untold_by(machine: ShardMachine, worker: SimulatedWorker) -> str:
    """What a worker has not heard of, or not said again, so that others wait for it."""
    client = worker.client
    if not worker.is_training or client is None or client.membership is None or worker.process.is_stopped:
        return ""
    if client.membership.paused:
        member = machine.oracle.model.members.get(worker.number)
        if member is not None and member.epoch == client.epoch and not member.paused:
            return f"shard {machine.number} has lost that worker {worker.number} pauses, and is not told again"
        return ""
    lost = [token for token in machine.oracle.lost if token[:2] == (worker.number, client.epoch)]
    if lost:
        return f"worker {worker.number} is not told that shard {machine.number} has lost push {lost[0][2]}"
    return ""
