"""`--rank`, `--world-size` and their like: one worker's place among all of a run, and among those of its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

RANK_VARIABLES = ["RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"]  # torchrun's, Slurm's, Kubernetes'; the first counts

RankOption = Annotated[int, typer.Option("--rank", envvar=RANK_VARIABLES, help="Number of this worker, from 0.", min=0)]
WorldSizeOption = Annotated[
    int,
    typer.Option("--world-size", envvar=["WORLD_SIZE", "SLURM_NTASKS"], help="Number of workers.", min=1, max=65_535),
]
StartWorkersOption = Annotated[
    int | None,
    typer.Option(
        "--start-workers",
        help="Number of workers with which the job begins; others may join later.  [default: all]",
        min=1,
    ),
]
LocalRankOption = Annotated[
    int | None,
    typer.Option(
        "--local-rank",
        envvar=["LOCAL_RANK", "SLURM_LOCALID"],
        help="Number of this worker among those on this machine, from 0.  [default: its rank]",
        min=0,
    ),
]
LocalWorldSizeOption = Annotated[
    int,
    typer.Option(
        "--local-world-size",
        envvar="LOCAL_WORLD_SIZE",
        help="Number of workers on this machine, which share its cores.",
        min=0,
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRanks:
    """One worker's place among all of a run, and among those of its machine.

    The job begins with `at_start` workers, where others may come later; 0: with all. BadParameter for a rank that the
    run does not have.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    at_start: int = 0

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise typer.BadParameter(f"workers count from 0, so rank {self.rank} of {self.world_size} does not exist")

    @property
    def is_elastic(self) -> bool:
        """Whether workers may come later, and leave before the end."""
        return 0 < self.at_start < self.world_size
