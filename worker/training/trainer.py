"""The training loop. One class drives one worker of many; they synchronise at evaluations and checkpoints only."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.proto.timing import begin_step, end_step
from embershard.worker.checkpoint.checkpoint import Checkpoint
from embershard.worker.checkpoint.tensors import Stateful
from embershard.worker.client.worker_group import Evicted, WorkerGroup
from embershard.worker.data.batch import Dataset
from embershard.worker.data.splits import SplitQueue
from embershard.worker.job.job import Job
from embershard.worker.models.recommender import num_dense_parameters
from embershard.worker.models.user_defined import forward_of
from embershard.worker.nn.onednn import onednn_is_faster, use_onednn
from embershard.worker.reporting.prometheus import MonitoredWorker, StepCounters
from embershard.worker.reporting.records import BestWeights, RunResult
from embershard.worker.reporting.report import Observers, Report
from embershard.worker.reporting.throughput import Throughput
from embershard.worker.reporting.worker_record import WorkerRecord
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import EpochBatch
from embershard.worker.training.budget import Segment, TrainingPlan, steps_of
from embershard.worker.training.build import choose_strategy, job_model, rates_of, step_of
from embershard.worker.training.codecs import JobCodecs
from embershard.worker.training.evaluate import Best, Evaluator
from embershard.worker.training.loader import LoaderProcess
from embershard.worker.training.saver import (
    BUFFERS,
    FILES,
    LOCAL_STEPS,
    LOCAL_WEIGHTS,
    NUMBERING,
    RANDOM,
    TRIAL,
    Attributes,
    BestNotRestored,
    Buffers,
    Numbering,
    RandomNumbers,
    Saver,
    TrainingData,
)


class Trainer:
    """Trains a job's model on this worker's share of the data until its budget or early stop.

    `session` is the connection to the shards, None for a strategy that has none. With `resume` it goes on from a
    checkpoint, from which the shards were restored before. `output`, the run's folder, is noted in its checkpoints.
    `best_folder` is where a job without checkpoint.folder keeps its best weights. At the end of a run these are put
    back, unless the job or `restore_best` says otherwise.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        session: Session | None,
        group: WorkerGroup,
        observers: Observers = (),
        loader: LoaderProcess | None = None,
        *,
        output: Path | None = None,
        resume: Checkpoint | None = None,
        best_folder: Path | None = None,
        restore_best: bool = True,
        owner: str = "",
    ) -> None:
        self._job, self._dataset, self._group, self._session = job, dataset, group, session
        self.device = device_of(job)
        model = build_model(job, dataset)
        self._dense_parameters = num_dense_parameters(model)
        forward = forward_of(model, job.model.name)  # of the bare model: what wraps it takes anything
        self._codecs = JobCodecs(job, session)
        self.strategy = choose_strategy(job, model, session, self.device)
        self.model = self.strategy.model
        before = None if resume is None else resume.manifest
        begun = 0 if before is None else steps_of(job, before.step, before=before.world_size, now=group.world_size)
        self._codecs.begin(begun)
        torch.manual_seed(job.train.seed + 1 + group.rank)  # dropout differs between workers
        log_q = getattr(dataset, "log_q", None)  # of the readers that draw negatives
        self._learn = step_of(job, self.strategy, session, self.device, forward, worker=group.rank, log_q=log_q)
        self._evaluator = Evaluator(
            job,
            dataset,
            self.strategy,
            group,
            forward=forward,
            device=self.device,
            averaged=self._learn.averaged,
            curves=job.own_loss is None,  # else a logit need not tell of a probability
        )
        has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())
        smallest_batch = 2 if has_batch_norm else 1  # one sample has no variance
        num_splits = job.num_splits(group.world_size)
        self._splits = SplitQueue(session, num_splits) if session is not None and num_splits else None
        self._budget = TrainingPlan(job, dataset, group, loader, smallest_batch, self._splits)
        self._rates = rates_of(job, self.strategy, self._budget.total_steps)
        min_delta = job.train.early_stop.min_delta if job.train.early_stop else 0.0
        self._best = Best(metric=job.metric, lower_is_better=job.lower_is_better, min_delta=min_delta)
        self._meter = Throughput(self.strategy, group.at_start)
        record = None if output is None else WorkerRecord(output, group.rank)
        self._report = Report(job, dataset, self.strategy, group, self._meter, observers, record)
        self._epoch = 0
        self._stopped = False
        self._restores = restore_best and job.checkpoint.restore_best
        self._not_restored: BestNotRestored | None = None
        self._saver = self._make_saver(session, output, resume, best_folder, owner)
        self._resumed_step = None if before is None else begun
        if resume is not None:
            self._restore(resume)

    def monitored(self, steps: StepCounters) -> MonitoredWorker:
        """This worker as its exporter sees it; `steps` counts those of the installed Recorder."""
        return MonitoredWorker(steps, self._meter, self._report, self.strategy, self._session)

    def _restore(self, checkpoint: Checkpoint) -> None:
        was_there = self._saver.restore(checkpoint)
        before, now = checkpoint.manifest.world_size, self._group.world_size
        self._learn.steps = steps_of(self._job, self._learn.steps, before=before, now=now)
        self._learn.skipped *= was_there  # else they are the first one's, who counts them

    def run(self) -> RunResult | None:
        """Train and evaluate in turn; None where this worker left before the end.

        NonFiniteLoss, or an error of shards, of other workers or the data, ends it.
        """
        with self.strategy.collective_errors():
            result = self._run()
        if self._not_restored is not None:  # only now: the result is reported
            raise self._not_restored
        return result

    def _run(self) -> RunResult | None:
        now = self._join()
        if self._group.late:
            self._saver.forget_residuals()
            self._count_on()
        self._report.started(
            device=str(self.device),
            dense_parameters=self._dense_parameters,
            total_samples=self._budget.total_samples,
            resumed_step=self._resumed_step,
            warnings=(self._data.warning,) if self._data.warning else (),
        )
        number = 0  # of the pauses before
        for segment in self._budget.segments():
            if self._stopped:
                break
            pauses = (segment.evaluation and self._dataset.splits) or (segment.checkpoint and self._saver.saves)
            if number == now:  # else the others are beyond it
                self._train(segment.parts)
                if self._group.leaving:
                    return None
                now = self._synchronise(segment, number) if pauses else now
            number += bool(pauses)
        self.strategy.pause()
        return self._report.finished(
            now,
            at_end=self._restore_best,
            step=self._learn.steps,
            epoch=self._epoch,
            stopped_early=self._stopped,
            skipped_steps=self._learn.skipped,
            returned_splits=self._splits.returned if self._splits is not None else 0,
        )

    def _count_on(self) -> None:
        """Count samples from where the worker before had come that had this number, and left or was lost."""
        rank = self._group.rank
        came_later = self._group.at_start <= rank  # a checkpoint has nothing of it
        self._meter.samples = self._report.samples_known().get(rank, 0 if came_later else self._meter.samples)

    def _train(self, parts: Iterator[Iterator[EpochBatch]]) -> None:
        self._meter.resume(self._learn.steps)
        for part in parts:
            begin_step()
            for batch in self.strategy.batches(self._meter.timed(part)):
                self._epoch = batch.epoch + 1
                self._rates.set(self._learn.steps)
                self._codecs.before_step(self._learn.steps)
                loss = self._learn(batch)
                self._meter.add(batch.samples, loss)
                if self._meter.due():
                    self._report.trained(self._learn.steps, self._epoch, self._rates.scale)
                end_step()
            self._learn.finish()
        self._report.trained(self._learn.steps, self._epoch, self._rates.scale)
        self._meter.pause(self._learn.steps)

    def _join(self) -> int:
        """Take part with the other workers from here on; the number of the pauses that they have made."""
        number, shared_state = self._group.join_segment(self._shared_state())
        self._budget.follow(shared_state["budget"], late=self._group.late)
        if self._group.late:
            # about as many as each of them made: with local(k), whose clocks are rounds, k of them in each
            since = max(0, self.strategy.clock - int(shared_state["clock"])) * (self._job.train.local_steps or 1)
            self._learn.steps = max(self._learn.steps, int(shared_state["steps"]) + since)
            self._stopped = bool(shared_state["stopped"]) or self._group.over
            self._meter.began = float(shared_state["began"])
            for name, part in self._common.items():
                part.load_state_dict(shared_state[name])
        return number

    def _shared_state(self) -> dict[str, Any]:
        """State that this worker sends to the others, above all to those that join late."""
        common = {name: part.state_dict() for name, part in self._common.items()}
        at = {"steps": self._learn.steps, "clock": self.strategy.clock, "budget": self._budget.shared_state}
        return {"stopped": self._stopped, "began": self._meter.began, **at, **common}

    def _synchronise(self, segment: Segment, number: int) -> int:
        """Do with all workers what is due after a segment, while nobody's clock waits; the next segment's number."""
        self.strategy.pause()
        try:
            self._group.end_segment(number)
            self._meter.agree(self._group, self._report.samples_known())
            self._epoch = self._group.highest(self._epoch)  # one that came late may have had no batch of it
            best = bool(segment.evaluation and self._dataset.splits) and self._evaluate()
            due, last = segment.checkpoint or self._stopped, segment.last or self._stopped
            if due or best:
                self.strategy.refresh()  # copies of rows are no part of a checkpoint
                self._group.retry_on_membership_change(
                    lambda: self._saver.save(self._learn.steps, best=best, due=due, wait=last)
                )
            self._group.begin_segment(number, self.strategy.resume, self.strategy.clock, self._shared_state())
        except Evicted:
            return self._join()
        return number + 1

    def _evaluate(self) -> bool:
        """Evaluate, and see whether to stop; whether it is the best evaluation so far."""
        self._report.evaluating()
        self._group.retry_on_membership_change(self._saver.check_best)
        start = time.perf_counter()
        figures = self._evaluator.evaluate()
        improved = self._best.observe(figures[self._report.split or ""][self._job.metric])
        self._rates.schedule.observe(improved)
        self._report.evaluated(
            figures,
            step=self._learn.steps,
            epoch=self._epoch,
            improved=improved,
            seconds=time.perf_counter() - start,
            reliability=self._evaluator.curves,
        )
        early_stop = self._job.train.early_stop
        self._stopped = early_stop is not None and self._best.worse_in_a_row >= early_stop.patience
        return improved

    def _restore_best(self) -> BestWeights:
        """Put the best weights back where the last ones are others; where they are, and whether they are here."""
        best = self._best
        self._group.retry_on_membership_change(self._saver.check_best)
        if best.checkpoint is None or best.is_latest or not self._restores:
            not_kept = self._saver.not_kept
            if best.worse_in_a_row and math.isnan(best.value):
                not_kept = f"{self._job.metric} was undefined in every evaluation, and so none was the best"
            return BestWeights(checkpoint=best.checkpoint, current=best.is_latest, not_kept=not_kept)
        steps, skipped = self._learn.steps, self._learn.skipped
        try:
            state = self._group.retry_on_membership_change(self._saver.restore_best)
        except BestNotRestored as error:
            self._not_restored = error
            return BestWeights(checkpoint=best.checkpoint)
        # the average of the weights is a part of the step
        self._learn.load_state_dict({**cast(dict[str, Any], state["step"]), "steps": steps, "skipped": skipped})
        self.strategy.refresh()
        return BestWeights(checkpoint=best.checkpoint, current=True, restored=True)

    def _make_saver(
        self,
        session: Session | None,
        output: Path | None,
        source: Checkpoint | None,
        best_folder: Path | None,
        owner: str,
    ) -> Saver:
        schedule = Attributes(self._rates.schedule, "plateaus", "worse_in_a_row")
        self._common: dict[str, Stateful] = {"schedule": schedule, "best": self._best, "report": self._report}
        self._data = TrainingData(self._dataset)
        shared: dict[str, Stateful] = {NUMBERING: Numbering(self._dataset), FILES: self._data, **self._common}
        if self.strategy.local_weights is not None:
            shared[LOCAL_WEIGHTS] = self.strategy.local_weights
        own: dict[str, Stateful] = {
            RANDOM: RandomNumbers(self.device),
            BUFFERS: Buffers(self.model),
            "budget": self._budget,
            "step": self._learn,
            "meter": self._meter,
            "epoch": Attributes(self, "_epoch"),
        }
        if session is not None and session.local_steps is not None:
            own[LOCAL_STEPS] = session.local_steps
        if self._codecs.trial is not None:
            own[TRIAL] = self._codecs.trial
        return Saver(
            self._job,
            self._group,
            shared=shared,
            own=own,
            client=None if session is None else session.client,
            best=self._best,
            output=output,
            source=source,
            best_folder=best_folder,
            owner=owner,
        )


def build_model(job: Job, dataset: Dataset) -> nn.Module:
    """The model with its first dense weights, the same for all workers; its tables on the meta device, if it is ours.

    JobError, BadModule or UserCodeFailed where job, model and data do not fit together.
    """
    torch.manual_seed(job.train.seed)
    model = job_model(job, dataset.schema)
    if job.train.linear == "onednn" or (job.train.linear == "auto" and onednn_is_faster()):
        use_onednn(model)
    return model


def device_of(job: Job) -> torch.device:
    """Return the device on which a job computes. JobError for one that this machine does not have."""
    if job.train.device == "cuda" and not torch.cuda.is_available():
        raise JobError(where="train.device", reason="this machine has no CUDA device; use auto or cpu")
    wanted = job.train.device
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")
