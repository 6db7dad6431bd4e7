"""The program from its words to its exit code: check everything, then train, evaluate and report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.utils import init_distributed_device

from train.arguments import parse
from train.checkpoint import load_checkpoint
from train.data import Images, digits, without_broken
from train.errors import Refusal, Stopped
from train.preflight import check_batches, check_classes, check_device, check_settings, scan, short
from train.training import Training


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0, 1 (training had to stop) or 2 (the request was refused, nothing written)."""
    try:
        run(parse(argv))
    except (Refusal, Stopped) as end:
        sentence = str(end).splitlines()[-1].removeprefix("train.errors.Stopped: ")  # a loader's process adds its traceback
        print(f"python -m train: {sentence}", file=sys.stderr)
        return end.exit_code
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def run(args: Any) -> dict[str, Any]:
    """Train and evaluate as the settings say, and return the summary that is also written."""
    check_settings(args)
    settings = vars(args).copy()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = choose_device(args)
    images = scan(args.data, args.subset) if args.data else digits()
    check_batches(images, args, args.world_size)
    args.resume = resume_path(args)
    state = load_checkpoint(args.resume, args, images.classes) if args.resume else None
    if args.data and args.verify:
        images = readable_images(images, args)
    training = Training.start(args, settings, images, device, state)
    training.announce()
    if state and training.primary:
        print(continuation(state, settings))
    training.train()
    return training.finish()


def choose_device(args: Any) -> torch.device:
    """Device of this process, which joins the others under torchrun."""
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(args.device)
    return init_distributed_device(args)


def readable_images(images: Images, args: Any) -> Images:
    """The data set without its broken files, which are counted and named on stderr."""
    images = without_broken(images, max(args.workers, 1), args.rank, args.world_size)
    check_classes(images)
    check_batches(images, args, args.world_size)
    if images.skipped and args.rank == 0:
        print(f"skipped {len(images.skipped)} unreadable images: {short(list(images.skipped))}", file=sys.stderr)
    return images


def resume_path(args: Any) -> str | None:
    """The checkpoint to continue from, if any; "auto" is the one that the output folder has."""
    if args.resume != "auto":
        return args.resume
    last = Path(args.output) / "last.pt"
    return str(last) if last.is_file() else None


def continuation(state: dict[str, Any], settings: dict[str, Any]) -> str:
    """Where a checkpoint is continued, and which settings of the recipe differ from those it was made with.

    >>> continuation({"epoch": 3, "args": {"lr": 0.1, "seed": 0}}, {"lr": 0.2, "seed": 0})
    'continues after epoch 3, changed: lr 0.1 -> 0.2'
    """
    recipe = state["args"].keys() - {"output", "resume", "config", "workers", "threads", "device", "verify"}
    old = {key: state["args"][key] for key in sorted(recipe)}
    changed = [f"{key} {value} -> {settings.get(key)}" for key, value in old.items() if settings.get(key) != value]
    return f"continues after epoch {state['epoch']}" + (", changed: " + ", ".join(changed) if changed else "")
