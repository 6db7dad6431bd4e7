"""Files that are there whole or not at all: checkpoints to continue from, and weights to use."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from train.errors import Refusal

FILES = ("last.pt", "best.safetensors", "metrics.csv", "summary.json", "resolution.png", "training.png")
# What a checkpoint has to share with the run that continues it.
IDENTITY = ("model", "rope", "img_size", "class_token", "opt", "layer_decay", "model_ema")


def write_atomic(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a new file beside `path`, then put it in place: a reader sees the old or the new, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside(folder: Path, patterns: Sequence[str]) -> None:
    """Move the results of an earlier run, files of these names, into a folder beside them: nothing is written over."""
    files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    if not files:
        return
    numbers = (number for number in itertools.count(1) if not (folder / f"earlier-{number}").exists())
    earlier = folder / f"earlier-{next(numbers)}"
    earlier.mkdir()
    for path in files:
        path.rename(earlier / path.name)
    print(f"results of an earlier run moved to {earlier}")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    write_atomic(path, lambda file: torch.save(state, file))


def save_weights(path: Path, weights: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Weights as safetensors; `about` goes into the metadata as JSON under "axial_rope"."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    blob = save(tensors, metadata={"axial_rope": json.dumps(about)})
    write_atomic(path, lambda file: file.write(blob))


def load_checkpoint(path: str, args: Any, classes: tuple[str, ...]) -> dict[str, Any]:
    """Read a checkpoint of this program that fits the run.

    Raises:
        Refusal: The file lacks, isn't a whole checkpoint of this program, or is of another model or other classes.
    """
    if not Path(path).is_file():
        raise Refusal(f"resume must be a checkpoint file: got {path}, which isn't there")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        settings, known = {key: state["args"][key] for key in IDENTITY}, tuple(state["classes"])
        done = len(state["history"])
        if state["epoch"] != done:
            raise ValueError(f"epoch must be that of the history: got {state['epoch']} and {done}")
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise Refusal(f"resume must be a last.pt of this program: {path} can't be read as one") from error
    if done > args.epochs:
        raise Refusal(f"epochs must be at least the {done} that {path} has behind it: got {args.epochs}")
    for key in IDENTITY:
        if settings[key] != getattr(args, key):
            flag = key.replace("_", "-")
            raise Refusal(f"resume must fit {flag}={getattr(args, key)}: {path} was trained with {settings[key]}")
    if known != classes:
        raise Refusal(f"resume must have the {len(classes)} classes of the data: {path} has {difference(known, classes)}")
    return state


def difference(known: tuple[str, ...], classes: tuple[str, ...]) -> str:
    """What distinguishes the classes of a checkpoint from those of the data, in a few words."""
    extra, missing = sorted(set(known) - set(classes)), sorted(set(classes) - set(known))
    if extra:
        return f"{len(known)}, among them {extra[0]}"
    return f"{len(known)}, without {missing[0]}" if missing else "them in another order"
