"""GPT-2 over histories of items: by transformers' Trainer, and by a loop of accelerate with accumulation."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import nn

import embershard as es
from wrap.compare import Case
from wrap.log import ITEMS, LENGTH, batches


class Losses(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "loss" in logs:
            self.values.append(logs["loss"])


def in_torch_terms(optimizer: Any) -> torch.optim.Optimizer:
    return es.ShardOptimizer(optimizer) if isinstance(optimizer, es.Session) else optimizer


def by_trainer(model: nn.Module, optimizer: Any) -> list[float]:
    """Lowers the learning rate linearly, as it does unless told otherwise.

    It does not clip: a norm of rows has other last bits than one of a whole table.
    """
    rows = [{"input_ids": ids, "labels": ids} for batch in batches() for ids in batch["hist_item"]]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, per_device_train_batch_size=64, num_train_epochs=1, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, max_grad_norm=0, dataloader_pin_memory=False, seed=1,
        )  # fmt: skip
        losses = Losses()
        transformers.Trainer(
            model, settings, train_dataset=rows, optimizers=(in_torch_terms(optimizer), None), callbacks=[losses]
        ).train()
    return losses.values


def by_accelerate(model: nn.Module, optimizer: Any) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    theirs, prepared = accelerator.prepare(model, in_torch_terms(optimizer))
    losses = []
    theirs.train()
    for batch in batches():
        with accelerator.accumulate(theirs):
            loss = theirs(input_ids=batch["hist_item"], labels=batch["hist_item"]).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(theirs.parameters(), 0.01)
            prepared.step()
            prepared.zero_grad()
        losses.append(loss.item())
    return losses


def gpt2(*, tied: bool) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=ITEMS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def case(
    package: str, name: str, build: Callable[[], nn.Module], train: Callable[..., list[float]], *, tied: bool
) -> Case:
    return Case(package=package, name=name, build=build, train=train, sgd=0.2, adagrad=0.02, reads_whole=tied)


CASES = (
    case("transformers", "GPT-2, tied, by Trainer", functools.partial(gpt2, tied=True), by_trainer, tied=True),
    case("accelerate", "GPT-2, accumulated", functools.partial(gpt2, tied=False), by_accelerate, tied=False),
)
