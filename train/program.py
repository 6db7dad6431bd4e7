"""The run from settings to files: check, train, evaluate, report."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import init_distributed_device, unwrap_model

from models.rope_vit import patch_size, rope_vit
from train import report
from train.arguments import parse
from train.checkpoint import load_checkpoint, save_checkpoint, save_weights
from train.data import Images, digits, eval_loader, train_loader, without_broken
from train.engine import Precision, Trainer, seed_epoch
from train.errors import Refusal, Stopped
from train.evaluate import default_sizes, evaluate, sweep
from train.preflight import check_batches, check_classes, check_settings, fingerprint, scan, short


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0, 1 (training had to stop) or 2 (the request was refused, nothing written)."""
    try:
        run(parse(argv))
    except Refusal as refusal:
        print(f"python -m train: {refusal}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"python -m train: {stop}", file=sys.stderr)
        return 1
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def run(args: Any) -> dict[str, Any]:
    """Train and evaluate as the settings say, and return the summary that is also written."""
    check_settings(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = vars(args).copy()
    device = choose_device(args)
    images = load_images(args)
    check_batches(images, args, args.world_size)
    resume = resume_path(args)
    state = load_checkpoint(resume, args, images.classes) if resume else None
    session = Session.build(args, settings, images, device, state)
    session.train()
    return session.finish()


def choose_device(args: Any) -> torch.device:
    """Device of this process; joins the others under torchrun."""
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise Refusal(f"device must be usable: got {args.device}, {str(error).splitlines()[0]}") from error
    return init_distributed_device(args)


def load_images(args: Any) -> Images:
    """The data set without its broken files, which are counted and named on stderr."""
    if not args.data:
        return digits()
    images = scan(args.data, args.subset)
    if args.verify:
        threads = max(args.workers, 1)
        images = without_broken(images, threads, args.rank, args.world_size, quiet=args.rank > 0)
        check_classes(images)
    if images.skipped and args.rank == 0:
        print(f"skipped {len(images.skipped)} unreadable images: {short(list(images.skipped))}", file=sys.stderr)
    return images


def resume_path(args: Any) -> str | None:
    """The checkpoint to continue from, if any; "auto" is the one that the output folder has."""
    if args.resume != "auto":
        return args.resume
    last = Path(args.output) / "last.pt"
    return str(last) if last.is_file() else None


@dataclass
class Session:
    """A run's moving parts."""

    args: Any
    settings: dict[str, Any]
    images: Images
    device: torch.device
    trainer: Trainer
    batches: Any
    history: list[dict[str, Any]]
    seconds: float = 0.0

    @classmethod
    def build(cls, args: Any, settings: dict[str, Any], images: Images, device: torch.device, state: Any) -> Session:
        """Model, optimizer, schedule and loaders, as they were at the end of the epoch that `state` holds, if any."""
        seed_epoch(args.seed, 0)
        model = rope_vit(
            args.model,
            args.rope,
            num_classes=len(images.classes),
            image_size=args.img_size,
            channels=images.channels,
            class_token=args.class_token,
            drop_path=args.drop_path,
        ).to(device)
        mixing = bool(args.mixup or args.cutmix)
        loss = dict(smoothing=0.0 if mixing else args.smoothing, soft_targets=mixing)
        task = ClassificationTask(model, criterion_kwargs=loss, device=device, verbose=False)
        try:
            optimizer = create_optimizer_v2(
                model, args.opt, lr=args.lr, weight_decay=args.weight_decay, layer_decay=args.layer_decay
            )
        except (ValueError, AssertionError) as error:
            raise Refusal(f"opt must be an optimizer of timm: got {args.opt}") from error
        batches = train_loader(images, args, device, args.distributed)
        scheduler, _ = create_scheduler_v2(
            optimizer,
            args.sched,
            num_epochs=args.epochs,
            warmup_epochs=args.warmup_epochs,
            min_lr=args.min_lr,
            step_on_epochs=False,
            updates_per_epoch=math.ceil(len(batches) / args.grad_accum_steps),
        )
        precision = Precision.choose(args.amp, device)
        trainer = Trainer(
            task,
            optimizer,
            scheduler,
            precision,
            precision.scaler(),
            args.grad_accum_steps,
            args.clip_grad,
            args.distributed,
        )
        if args.model_ema:
            task.setup_ema(decay=args.model_ema_decay, use_warmup=True)
        session = cls(args, settings, images, device, trainer, batches, [])
        if state:
            session.restore(state)
        if args.distributed:
            task.prepare_distributed(device_ids=[device.index] if device.type == "cuda" else None)
        return session

    @property
    def primary(self) -> bool:
        return self.args.rank == 0

    @property
    def title(self) -> str:
        return f"{self.images.name}, {self.args.model}, {self.args.rope}, seed {self.args.seed}"

    @property
    def output(self) -> Path:
        return Path(self.args.output)

    def restore(self, state: dict[str, Any]) -> None:
        task = self.trainer.task
        task.load_checkpoint_state(state["state_dict"])
        if task.has_ema():
            task.load_checkpoint_state(state["state_dict_ema"], ema=True)
        self.trainer.load_state_dict(state["trainer"])
        self.history, self.seconds = state["history"], state["seconds"]

    def train(self) -> None:
        """All epochs that are left, each ending with a checkpoint."""
        from tqdm import tqdm

        args, trainer = self.args, self.trainer
        self.announce()
        total = args.epochs * math.ceil(len(self.batches) / args.grad_accum_steps)
        bar = tqdm(total=total, initial=trainer.updates, desc="train", unit="step", disable=not self.primary)
        started = time.perf_counter() - self.seconds
        with bar:
            for epoch in range(len(self.history) + 1, args.epochs + 1):
                loss, metrics = self.epoch(epoch, lambda _: bar.update())
                self.seconds = time.perf_counter() - started
                self.record(epoch, loss, metrics)
                shown = {"epoch": epoch, "loss": f"{loss:.3f}", **{k: f"{v:.1f}" for k, v in metrics.items() if k == "top1"}}
                bar.set_postfix(shown)

    def announce(self) -> None:
        """One line on what is trained."""
        if not self.primary:
            return
        images = self.images
        parameters = sum(p.numel() for p in unwrap_model(self.trainer.task.get_trainable_module()).parameters())
        print(
            f"{self.title}: {parameters / 1e6:.2f} M parameters, {len(images.train)} images to train on and "
            f"{len(images.val)} to evaluate on, {len(images.classes)} classes ({fingerprint(images.classes)}), "
            f"{self.trainer.precision} on {self.device}"
        )

    def epoch(self, epoch: int, on_update: Callable[[float], None]) -> tuple[float, dict[str, float]]:
        """Train for one epoch; mean loss, and the metrics if it is one to evaluate after."""
        args = self.args
        seed_epoch(args.seed, epoch, args.rank)
        if hasattr(self.batches.sampler, "set_epoch"):
            self.batches.sampler.set_epoch(epoch)
        loss = self.trainer.epoch(self.batches, on_update)
        if epoch % args.val_interval and epoch < args.epochs:
            return loss, {}
        loader = eval_loader(self.images, args.img_size, args, self.device, args.distributed)
        return loss, evaluate(self.trainer.task, loader, self.trainer.precision, args.distributed)

    def record(self, epoch: int, loss: float, metrics: dict[str, float]) -> None:
        """Add the epoch to the history and write what is known by now."""
        best = max((row["top1"] for row in self.history if row["top1"] is not None), default=-1.0)
        self.history.append(
            {
                "epoch": epoch,
                "steps": self.trainer.updates,
                "lr": max(group["lr"] for group in self.trainer.optimizer.param_groups),
                "train_loss": loss,
                "val_loss": metrics.get("loss"),
                "top1": metrics.get("top1"),
                "top5": metrics.get("top5"),
                "skipped_steps": self.trainer.skipped,
                "seconds": round(self.seconds, 2),
            }
        )
        if not self.primary:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        task = self.trainer.task
        state = {
            "args": self.settings,
            "classes": list(self.images.classes),
            "epoch": epoch,
            "history": self.history,
            "seconds": self.seconds,
            "trainer": self.trainer.state_dict(),
            **task.get_checkpoint_state(),
            **(task.get_checkpoint_state(ema=True) if task.has_ema() else {}),
        }
        save_checkpoint(self.output / "last.pt", state)
        report.write_metrics(self.output / "metrics.csv", self.history)
        if metrics and metrics["top1"] > best:
            weights = unwrap_model(task.get_eval_model(ema=task.has_ema())).state_dict()
            save_weights(self.output / "best.safetensors", weights, self.about() | {"epoch": epoch, "top1": metrics["top1"]})

    def about(self) -> dict[str, Any]:
        """What has to be known to use the weights: the arguments of rope_vit, and the classes in the order of the head."""
        images, args = self.images, self.args
        return {
            "model": args.model,
            "rope": args.rope,
            "num_classes": len(images.classes),
            "image_size": args.img_size,
            "channels": images.channels,
            "class_token": args.class_token,
            "mean": list(images.mean),
            "std": list(images.std),
            "classes": list(images.classes),
        }

    def finish(self) -> dict[str, Any]:
        """Evaluate the last weights over sizes, print the table and write summary and pictures."""
        args, images, trainer = self.args, self.images, self.trainer
        patch = patch_size(args.model)
        grid = (args.img_size // patch,) * 2
        sizes = sorted(set(args.eval_sizes or default_sizes(args.img_size, patch)))
        loader_of = partial(self.eval_loader_of)
        top1 = sweep(trainer.task, loader_of, sizes, grid, args.rope, trainer.precision, args.distributed)
        measured = [row for row in self.history if row["top1"] is not None]
        best = max(measured, key=lambda row: row["top1"])
        summary = {
            "data": images.name,
            "model": args.model,
            "encoding": args.rope,
            "seed": args.seed,
            "epochs": args.epochs,
            "steps": trainer.updates,
            "skipped_steps": trainer.skipped,
            "seconds": round(self.seconds, 2),
            "precision": str(trainer.precision),
            "image_size": args.img_size,
            "train_images": len(images.train),
            "val_images": len(images.val),
            "classes": list(images.classes),
            "classes_sha256": fingerprint(images.classes),
            "skipped_images": list(images.skipped),
            "best": {"epoch": best["epoch"], "top1": best["top1"]},
            "top1": top1,
        }
        if self.primary:
            self.output.mkdir(parents=True, exist_ok=True)
            report.write_metrics(self.output / "metrics.csv", self.history)
            report.plot_training(self.output / "training.png", self.history, self.title)
            report.plot_resolution(self.output / "resolution.png", top1, args.img_size, self.title)
            report.write_summary(self.output / "summary.json", summary)
            print(report.table(top1, args.img_size))
            print(f"{trainer.updates} steps in {self.seconds:.0f} s, results in {self.output}")
        return summary

    def eval_loader_of(self, size: int) -> Any:
        return eval_loader(self.images, size, self.args, self.device, self.args.distributed)
