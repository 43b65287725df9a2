"""Run the shards and workers of a job on the nodes of a Slurm allocation, each in a job step of its own (srun)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embershard.deploy.engine import Place
from embershard.proto.errors import EmbershardError, Status

_SECONDS = 30  # for scontrol
_LOOK_SECONDS = 2.0
_LOST = {"down", "error", "powered_down", "powering_down", "future"}  # states of a node
# of an allocation as it was: srun would compare them with what is left of it after a node was lost
_SIZES = (
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NODELIST",
    "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
)  # fmt: skip
_SIGNALLED = 128  # srun's exit code of a step that a signal ended is this and its number


class NotInSlurm(EmbershardError):
    """There is no Slurm allocation to run in, or its commands are not there."""

    status = Status.FAILED_PRECONDITION
    template = "{reason}; start it in an allocation, with sbatch (embershard manifests slurm) or salloc"


class SlurmEngine:
    """The nodes of the allocation that this process runs in.

    Shards are spread over the nodes from the first one on, workers from the node after the last shard: both have nodes
    of their own where there are enough.
    """

    name = "slurm"
    is_local = False

    def __init__(self, nodes: Sequence[str], announce: Path, *, shards: int) -> None:
        self.announce: Path | None = announce
        self._nodes = tuple(nodes)
        self._shards = shards
        self._lock = threading.Lock()
        self._watched: list[tuple[subprocess.Popen[Any], str]] = []
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    @classmethod
    def of_allocation(cls, announce: Path, *, shards: int, environment: Mapping[str, str] = os.environ) -> SlurmEngine:
        """The engine of this process's own allocation, for so many shards, which `announce` themselves. NotInSlurm."""
        names = environment.get("SLURM_JOB_NODELIST", "")
        if not names:
            raise NotInSlurm(reason="this process runs in no Slurm allocation (SLURM_JOB_NODELIST is not set)")
        for command in ("scontrol", "sinfo", "srun"):
            if shutil.which(command) is None:
                raise NotInSlurm(reason=f"{command} is not in PATH")
        nodes = _said("scontrol", "show", "hostnames", names).split()
        return cls(nodes, announce, shards=shards)

    def shards(self, count: int) -> Sequence[Place]:
        """Spread from the first node on."""
        return self._spread(count, 0)

    def workers(self, count: int, most: int = 0) -> Sequence[Place]:
        """Spread from the node after the last shard on."""
        return self._spread(count, self._shards)

    def another_worker(self, rank: int, most: int) -> Place:
        """On the node of the allocation where the fewest processes run."""
        return self._emptiest(self._lost())

    def give_back(self, place: Place) -> None:
        """Do nothing: the nodes are the allocation's until it ends."""

    def again(self, place: Place) -> Place:
        """On the same node, or where Slurm says that this is lost, on the one where the fewest processes run."""
        lost = self._lost()
        return place if place.host not in lost or lost >= set(self._nodes) else self._emptiest(lost)

    def exit_code(self, code: int, place: Place) -> int:
        """srun says 128 and the number of a signal, and of a step whose node was lost nothing that tells it apart."""
        if _SIGNALLED < code <= _SIGNALLED + signal.NSIG:
            return _SIGNALLED - code
        return -signal.SIGKILL if code and place.host in self._lost() else code

    def watch(self, process: subprocess.Popen[Any], place: Place) -> None:
        """End an srun whose node is lost: it would wait for the end of its task for ever."""
        with self._lock:
            self._watched = [(one, host) for one, host in self._watched if one.returncode is None]
            self._watched.append((process, place.host))
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._end_lost, name="slurm", daemon=True)
                self._watcher.start()

    def close(self) -> None:
        """Slurm takes the nodes back at the end of the allocation."""
        self._closed.set()

    def _emptiest(self, lost: set[str]) -> Place:
        with self._lock:
            running = Counter(host for process, host in self._watched if process.returncode is None)
        usable = [node for node in self._nodes if node not in lost] or list(self._nodes)
        node = min(usable, key=lambda node: running[node])
        # as if all that runs there were of its kind: they share the node's memory and cores
        return Place(_srun(node), node, running[node], running[node] + 1)

    def _end_lost(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if lost := self._lost():
                with self._lock:
                    for process, host in self._watched:
                        if host in lost and process.returncode is None:
                            process.kill()

    def _lost(self) -> set[str]:
        """The nodes that Slurm has set down; one that only does not answer may come back."""
        try:
            listed = _said("sinfo", "--noheader", "--Node", f"--nodes={','.join(self._nodes)}", "--format=%N %T")
        except NotInSlurm:
            return set()
        return {node for node, state in map(str.split, listed.splitlines()) if state.rstrip("*~#!%$@^-") in _LOST}

    def _spread(self, count: int, first: int) -> Sequence[Place]:
        lost = self._lost()
        usable = [node for node in self._nodes if node not in lost] or list(self._nodes)
        nodes = [usable[(first + number) % len(usable)] for number in range(count)]
        total, seen = Counter(nodes), Counter[str]()
        places = []
        for node in nodes:
            places.append(Place(_srun(node), node, seen[node], total[node]))
            seen[node] += 1
        return places


def _said(*command: str) -> str:
    """What a command of Slurm prints. NotInSlurm where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotInSlurm(reason=f"{command[0]} gave no answer within {_SECONDS} s") from None
    if done.returncode:
        raise NotInSlurm(reason=f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _srun(node: str) -> tuple[str, ...]:
    """A step of one task on a node, which shares the allocation with the others and ends with its srun."""
    unset = (word for name in _SIZES for word in ("-u", name))
    # a pseudo-terminal, for a progress bar: in the log of a batch job that would be a megabyte every ten minutes
    shown = ("--unbuffered",) if sys.stdout.isatty() else ()
    return (
        "env", *unset, "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--export=ALL",
        *shown, "--kill-on-bad-exit=1", "--no-kill=off", "--quit-on-interrupt", "--mem=0", "--cpu-bind=none",
        "--quiet",
    )  # fmt: skip
