"""A run in progress: its epochs, the checkpoint after each, and the evaluation at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.utils import unwrap_model

from models.rope_vit import patch_size
from train import report
from train.assemble import make_batches, make_model, make_task, make_trainer, refusing, updates_in
from train.checkpoint import FILES, save_checkpoint, save_weights, set_aside
from train.data import Images, eval_loader
from train.engine import Trainer, seed_epoch
from train.evaluate import default_sizes, evaluate, sweep
from train.preflight import fingerprint


@dataclass
class Training:
    """A run's moving parts. `settings` are the arguments as given; `history` has a row for each finished epoch."""

    args: Any
    settings: dict[str, Any]
    images: Images
    device: torch.device
    trainer: Trainer
    batches: Any
    history: list[dict[str, Any]]
    seconds: float = 0.0

    @classmethod
    def start(cls, args: Any, settings: dict[str, Any], images: Images, device: torch.device, state: Any) -> Training:
        """A run at its first epoch, or after the last epoch of a checkpoint `state`; nothing is written yet."""
        seed_epoch(args.seed, 0)
        batches = make_batches(args, images, device)
        task = make_task(args, make_model(args, images), device)
        trainer = make_trainer(args, task, updates_in(batches, args.grad_accum_steps), device)
        training = cls(args, settings, images, device, trainer, batches, [])
        if state:
            with refusing(f"resume must fit the model and the optimizer: {args.resume} does not"):
                training.restore(state)
        if args.distributed:
            task.prepare_distributed(device_ids=[device.index] if device.type == "cuda" else None)
        return training

    @property
    def primary(self) -> bool:
        return self.args.rank == 0

    @property
    def output(self) -> Path:
        return Path(self.args.output)

    @property
    def title(self) -> str:
        return f"{self.images.name}, {self.args.model}, {self.args.rope}, seed {self.args.seed}"

    def restore(self, state: dict[str, Any]) -> None:
        """Take over weights, averaged weights, optimizer, scaler, counts and history."""
        task = self.trainer.task
        task.load_checkpoint_state(state["state_dict"])
        if task.has_ema():
            task.load_checkpoint_state(state["state_dict_ema"], ema=True)
        self.trainer.load_state_dict(state["trainer"])
        self.history, self.seconds = state["history"], state["seconds"]

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint, of plain types and tensors; weights under timm's names."""
        task = self.trainer.task
        return {
            "args": self.settings,
            "classes": list(self.images.classes),
            "epoch": len(self.history),
            "history": self.history,
            "seconds": self.seconds,
            "trainer": self.trainer.state_dict(),
            **task.get_checkpoint_state(),
            **(task.get_checkpoint_state(ema=True) if task.has_ema() else {}),
        }

    def train(self) -> None:
        """All epochs that are left, each ending with a checkpoint."""
        from tqdm import tqdm

        args, trainer = self.args, self.trainer
        if self.primary:
            self.prepare_output()
        total = args.epochs * updates_in(self.batches, args.grad_accum_steps)
        started = time.perf_counter() - self.seconds
        with tqdm(total=total, initial=trainer.updates, desc="train", unit="step", disable=not self.primary) as bar:
            for epoch in range(len(self.history) + 1, args.epochs + 1):
                loss, metrics = self.epoch(epoch, lambda _: bar.update())
                self.seconds = time.perf_counter() - started
                self.record(epoch, loss, metrics)
                shown = {name: f"{metrics[name]:.1f}" for name in ("top1",) if name in metrics}
                bar.set_postfix({"epoch": epoch, "loss": f"{loss:.3f}", **shown})

    def prepare_output(self) -> None:
        """Move an earlier run's files aside, and bring those of a run that goes on here from another folder."""
        source = Path(self.args.resume).resolve().parent if self.args.resume else None
        if source == self.output.resolve():
            return
        set_aside(self.output, FILES)
        if source is None:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.args.resume, self.output / "last.pt")
        if (source / "best.safetensors").is_file():
            shutil.copyfile(source / "best.safetensors", self.output / "best.safetensors")

    def epoch(self, epoch: int, on_update: Callable[[float], None]) -> tuple[float, dict[str, float]]:
        """Train for one epoch; its mean loss, and the metrics if it is one to evaluate after."""
        args = self.args
        seed_epoch(args.seed, epoch, args.rank)
        if hasattr(self.batches.sampler, "set_epoch"):
            self.batches.sampler.set_epoch(epoch)
        loss = self.trainer.epoch(self.batches, on_update)
        if epoch % args.val_interval and epoch < args.epochs:
            return loss, {}
        return loss, evaluate(self.trainer.task, self.eval_loader(args.img_size), self.trainer.precision, args.distributed)

    def record(self, epoch: int, loss: float, metrics: dict[str, float]) -> None:
        """Add the epoch to the history and write what is known by now."""
        trainer = self.trainer
        kept = self.output / "best.safetensors"
        best = max((row["top1"] for row in self.history if row["top1"] is not None and kept.exists()), default=-1.0)
        self.history.append(
            {
                "epoch": epoch,
                "steps": trainer.updates,
                "lr": max(group["lr"] for group in trainer.optimizer.param_groups),
                "train_loss": loss,
                "val_loss": metrics.get("loss"),
                "top1": metrics.get("top1"),
                "top5": metrics.get("top5"),
                "skipped_steps": trainer.skipped,
                "seconds": round(self.seconds, 2),
            }
        )
        if not self.primary:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        if metrics and metrics["top1"] > best:
            model = unwrap_model(trainer.task.get_eval_model(ema=trainer.task.has_ema()))
            about = self.about() | {"epoch": epoch, "top1": metrics["top1"]}
            save_weights(kept, model.state_dict(), about)
        # Last, so that a run that is killed in between repeats the epoch.
        report.write_metrics(self.output / "metrics.csv", self.history)
        save_checkpoint(self.output / "last.pt", self.state_dict())

    def about(self) -> dict[str, Any]:
        """What has to be known to use the weights: arguments of rope_vit, pixels, classes in the order of the head."""
        args, images = self.args, self.images
        return {
            "model": args.model,
            "rope": args.rope,
            "image_size": args.img_size,
            "channels": images.channels,
            "class_token": args.class_token,
            "mean": list(images.mean),
            "std": list(images.std),
            "classes": list(images.classes),
        }

    def eval_loader(self, size: int) -> Any:
        return eval_loader(self.images, size, self.args, self.device, self.args.distributed)

    def finish(self) -> dict[str, Any]:
        """Evaluate the last weights over sizes, print the table, write and return the summary."""
        args, trainer = self.args, self.trainer
        patch = patch_size(args.model)
        grid = (args.img_size // patch, args.img_size // patch)
        sizes = sorted(set(args.eval_sizes or default_sizes(args.img_size, patch)))
        top1 = sweep(trainer.task, self.eval_loader, sizes, grid, args.rope, trainer.precision, args.distributed)
        summary = self.summary(top1)
        if self.primary:
            self.output.mkdir(parents=True, exist_ok=True)
            report.write_metrics(self.output / "metrics.csv", self.history)
            report.plot_training(self.output / "training.png", self.history, self.title)
            report.plot_resolution(self.output / "resolution.png", top1, args.img_size, self.title)
            report.write_summary(self.output / "summary.json", summary)
            print(report.table(top1, args.img_size))
            print(f"{trainer.updates} steps in {self.seconds:.0f} s, results in {self.output}")
        return summary

    def summary(self, top1: report.Top1) -> dict[str, Any]:
        """Everything that identifies the run and its result. `top1` is that of the last weights, chosen by nothing."""
        args, images, trainer = self.args, self.images, self.trainer
        measured = [row for row in self.history if row["top1"] is not None]
        best = max(measured, key=lambda row: row["top1"], default=None)
        return {
            "data": images.name,
            "model": args.model,
            "encoding": args.rope,
            "seed": args.seed,
            "epochs": len(self.history),
            "steps": trainer.updates,
            "skipped_steps": trainer.skipped,
            "seconds": round(self.seconds, 2),
            "precision": str(trainer.precision),
            "image_size": args.img_size,
            "train_images": len(images.train),
            "val_images": len(images.val),
            "skipped_images": list(images.skipped),
            "classes": list(images.classes),
            "classes_sha256": fingerprint(images.classes),
            "best": best and {"epoch": best["epoch"], "top1": best["top1"]},
            "top1": top1,
        }

    def announce(self) -> None:
        """Say in one line what is trained."""
        if self.primary:
            images, model = self.images, unwrap_model(self.trainer.task.get_trainable_module())
            parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            print(
                f"{self.title}: {parameters:.2f} M parameters, {len(images.train)} images to train on, {len(images.val)} "
                f"to evaluate on, {len(images.classes)} classes ({fingerprint(images.classes)}), "
                f"{self.trainer.precision} on {self.device}"
            )
