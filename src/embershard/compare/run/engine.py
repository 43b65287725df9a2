"""Make the runs of a plan that a folder does not hold yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from embershard.compare.results import ArmRun
from embershard.compare.run.cluster import emptied_shards
from embershard.compare.run.folder import Folder
from embershard.compare.run.netns import Namespaces
from embershard.compare.run.plan import ComparisonPlan, Task, can_be_limited
from embershard.compare.run.progress import Show, duration, time_left
from embershard.compare.run.runs import RunSetup, make_run


class Engine:
    """Makes the runs of one comparison. With `namespaces` shards and workers run in network namespaces."""

    def __init__(
        self, plan: ComparisonPlan, folder: Folder, setup: RunSetup, show: Show, namespaces: Namespaces | None
    ) -> None:
        self._plan, self._folder, self._setup, self._show, self._namespaces = plan, folder, setup, show, namespaces

    @property
    def chosen(self) -> Mapping[str, float]:
        """Each arm's best multiple of the learning rate, by the runs made so far."""
        return self._plan.choose(list(self._folder.runs.values()))

    @property
    def complete(self) -> bool:
        """Whether nothing is left to run."""
        return not self._left(self._plan.tasks(self.chosen))

    def run(self) -> None:
        """Make all runs that are not there, in order; each is on the disk before the next begins."""
        try:
            first = [*self._plan.tuning(), *self._plan.judged()]
            if len(self._left(first)) < len(first):
                self._show.say(f"{len(first) - len(self._left(first))} of {len(first)} runs are there already")
            self._make(first)
            self._make(self._plan.tuned(self.chosen))
        finally:
            self._show.close()

    def _left(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks that have no successful run yet."""
        runs = self._folder.runs
        return [task for task in tasks if task.key not in runs or not runs[task.key].ok]

    def _make(self, tasks: Sequence[Task]) -> None:
        left = self._left(tasks)
        seconds = time_left(left, self._folder.runs)
        if left and seconds is not None:
            self._show.say(f"{len(left)} runs to make, about {duration(seconds)}")
        while left:
            self._show.begin(left, self._folder.runs, len(tasks) - len(left))
            run = self._run(left[0])
            self._folder.add(run)
            self._show.end(run)
            left = left[1:]

    def _run(self, task: Task) -> ArmRun:
        """Make one run on the link that it names."""
        job = self._plan.arms[task.arm][1]
        if ps := self._plan.experiment.ps:
            emptied = partial(emptied_shards, ps, self._setup.tls)
            setup = replace(self._setup, shards=emptied) if job.has_shards else replace(self._setup, words=())
            return make_run(task, setup, self._show.look)
        if self._namespaces is None or not can_be_limited(job):
            return make_run(task, self._setup, self._show.look)
        bits = next(b.bits_per_second for b in self._plan.bandwidths if b.label == task.bandwidth)
        self._namespaces.shape(None if bits is None else bits * job.workers)
        shards = partial(self._namespaces.shards, job.shards, self._plan.experiment.imports)
        setup = replace(self._setup, prefix=self._namespaces.worker_prefix, shards=shards)
        return make_run(task, setup, self._show.look)
