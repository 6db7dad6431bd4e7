"""From settings to the parts of a run: model, task, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask

from models.rope_vit import rope_vit
from train.data import Images, train_loader
from train.engine import Precision, Trainer
from train.errors import Refusal


@contextmanager
def refusing(sentence: str) -> Iterator[None]:
    """Turn what timm raises for a name or value that it doesn't know into a refusal."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Refusal(f"{sentence} ({reason})") from error


def make_model(args: Any, images: Images) -> VisionTransformer:
    return rope_vit(
        args.model,
        args.rope,
        num_classes=len(images.classes),
        image_size=args.img_size,
        channels=images.channels,
        class_token=args.class_token,
        drop_path=args.drop_path,
    )


def make_batches(args: Any, images: Images, device: torch.device) -> Any:
    """Loader of the training images."""
    with refusing(f"aa must be an augmentation of timm: got {args.aa}"):
        return train_loader(images, args, device, args.distributed)


def make_task(args: Any, model: VisionTransformer, device: torch.device) -> ClassificationTask:
    """Model, loss and averaged weights; mixed labels are smoothed where they are mixed."""
    mixing = bool(args.mixup or args.cutmix)
    loss = {"smoothing": 0.0 if mixing else args.smoothing, "soft_targets": mixing}
    task = ClassificationTask(model.to(device), criterion_kwargs=loss, device=device, verbose=False)
    if args.model_ema:
        task.setup_ema(decay=args.model_ema_decay, use_warmup=True)
    return task


def make_trainer(args: Any, task: ClassificationTask, updates_per_epoch: int, device: torch.device) -> Trainer:
    """Optimizer, schedule over updates and precision around a task that isn't distributed yet."""
    model = task.get_trainable_module()
    with refusing(f"opt must be an optimizer of timm: got {args.opt}"):
        optimizer = create_optimizer_v2(
            model, args.opt, lr=args.lr, weight_decay=args.weight_decay, layer_decay=args.layer_decay
        )
    precision = Precision.choose(args.amp, device)
    return Trainer(
        task,
        optimizer,
        make_scheduler(args, optimizer, updates_per_epoch),
        precision,
        precision.scaler(),
        accumulate=args.grad_accum_steps,
        clip_grad=args.clip_grad,
        distributed=args.distributed,
    )


def make_scheduler(args: Any, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Scheduler:
    """Learning rate as a function of the number of updates alone."""
    with refusing(f"sched must fit the epochs: got {args.sched} for {args.epochs} with {args.warmup_epochs} of warm-up"):
        scheduler, _ = create_scheduler_v2(
            optimizer,
            args.sched,
            num_epochs=args.epochs,
            warmup_epochs=args.warmup_epochs,
            min_lr=args.min_lr,
            step_on_epochs=False,
            updates_per_epoch=updates_per_epoch,
        )
    return scheduler


def updates_in(batches: Any, accumulate: int) -> int:
    """Optimizer steps of an epoch; the last one may take fewer batches than the others."""
    return math.ceil(len(batches) / accumulate)
