"""One optimizer step at a time: precision, accumulation, clipping, averaging and the schedule, on one path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask
from timm.utils import random_seed
from timm.utils.clip_grad import dispatch_clip_grad
from torch import Tensor

from train.errors import Stopped

Batch = tuple[Tensor, Tensor]

RECIPE = ("weight_decay", "betas", "eps", "momentum")  # what an optimizer's state holds of the settings


@dataclass(frozen=True)
class Precision:
    """Compute dtype as data: None is float32, bfloat16 needs no scaling, float16 gets a gradient scaler."""

    device_type: str
    dtype: torch.dtype | None = None

    @classmethod
    def choose(cls, amp: str, device: torch.device) -> Precision:
        """Precision of a flag. "auto" is float32 on a CPU and on a GPU the 16-bit type that it computes natively."""
        if amp == "auto":
            amp = "none"
            if device.type == "cuda":
                amp = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
        return cls(device.type, {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp])

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)

    def __str__(self) -> str:
        return str(self.dtype or torch.float32).removeprefix("torch.")


@dataclass
class Trainer:
    """Steps of a task's model. `updates` counts the optimizer steps, `skipped` those that an overflow left out."""

    task: ClassificationTask
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    precision: Precision
    scaler: torch.amp.GradScaler
    accumulate: int = 1
    clip_grad: float | None = None
    distributed: bool = False
    updates: int = 0
    skipped: int = field(default=0)

    def epoch(self, batches: Iterable[Batch], on_update: Callable[[float], None]) -> float:
        """Train on all batches and return the mean loss of the updates; `on_update` gets each update's loss."""
        self.task.train()
        iterator: Iterator[Batch] = iter(batches)
        losses = []
        while group := list(islice(iterator, self.accumulate)):
            losses.append(self.update(group))
            on_update(losses[-1])
        return sum(losses) / len(losses)

    def update(self, group: list[Batch]) -> float:
        """One optimizer step on the mean loss of a group of batches of equal size, which it returns.

        Raises:
            Stopped: The loss is not finite; the weights are still those of the step before.
        """
        total = torch.zeros((), device=group[0][0].device)
        for number, (images, labels) in enumerate(group, start=1):
            with nullcontext() if number == len(group) else self.task.no_sync():
                with self.precision.autocast():
                    loss = self.task(images, labels)["loss"] / len(group)
                self.scaler.scale(loss).backward()
            total += loss.detach().float()
        loss_value = self.mean_over_processes(total)
        if not math.isfinite(loss_value):
            hint = ", try --amp bf16 or none" if self.precision.dtype is torch.float16 else ", try a smaller --lr"
            raise Stopped(f"loss must be finite: step {self.updates + 1} got {loss_value}{hint}")
        self.step()
        return loss_value

    def step(self) -> None:
        """Unscale, clip, step, average and set the next learning rate, in this order."""
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad is not None:
            dispatch_clip_grad(self.task.get_clip_parameters(), self.clip_grad)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        self.optimizer.zero_grad()
        self.updates += 1
        self.task.update_ema(step=self.updates)
        self.scheduler.step_update(self.updates)

    def mean_over_processes(self, value: Tensor) -> float:
        if self.distributed:
            torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.SUM)
            value = value / torch.distributed.get_world_size()
        return value.item()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        recipe = [{key: group[key] for key in RECIPE if key in group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, recipe, strict=True):
            group.update(own)  # these are the run's, which may have changed; the learning rate follows from the schedule
        if state["scaler"]:  # empty unless the checkpoint is of a float16 run
            self.scaler.load_state_dict(state["scaler"])
        self.updates, self.skipped = state["updates"], state["skipped"]
        self.scheduler.step_update(self.updates)


def seed_epoch(seed: int, epoch: int, rank: int = 0) -> None:
    """Start the random numbers of an epoch from (seed, epoch, rank) alone, so that a resumed run repeats them."""
    random_seed(int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1)[0]))
