"""Checks before a run: whatever is wrong with the request is said in one sentence, before anything is written."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from models.rope_vit import patch_size
from train.checkpoint import FILES
from train.data import Images, image_files
from train.errors import Refusal

SPLITS = {"train": ("train",), "val": ("val", "validation")}


def check_settings(args: Any) -> None:
    """Refuse settings that contradict each other, packages that lack, and an output that can't be a folder."""
    try:
        patch = patch_size(args.model)
    except ValueError as error:
        raise Refusal(str(error).replace("size must", "model must", 1)) from error
    for flag, sizes in (("img-size", [args.img_size]), ("eval-sizes", args.eval_sizes or [])):
        wrong = [size for size in sizes if size % patch]
        if wrong:
            raise Refusal(f"{flag} must be a multiple of the patch {patch} of {args.model}: got {wrong[0]}")
    if args.scale[0] > args.scale[1]:
        raise Refusal(f"scale must be a range from low to high: got {args.scale[0]} {args.scale[1]}")
    if (args.mixup or args.cutmix) and args.batch_size % 2:
        raise Refusal(f"batch-size must be even for mixup and cutmix: got {args.batch_size}")
    if args.warmup_epochs > args.epochs:
        raise Refusal(f"warmup-epochs must be at most epochs = {args.epochs}: got {args.warmup_epochs}")
    if args.subset and not args.data:
        raise Refusal("subset must come with a data folder: got none")
    needed = {"tqdm": "tqdm", "matplotlib": "matplotlib", "safetensors": "safetensors"}
    if not args.data:
        needed["sklearn"] = "scikit-learn"
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Refusal(f'packages must be installed: {", ".join(missing)} lack, get them with pip install -e ".[train]"')
    check_output(args.output)
    taken = [name for name in FILES if (Path(args.output) / name).is_dir()]
    if taken:
        raise Refusal(f"output must not hold folders of the names of results: {args.output} has {taken[0]}")


def check_output(output: str) -> None:
    """Refuse a folder that can't be made or written."""
    for path in (Path(output), *Path(output).parents):
        if path.exists() and not path.is_dir():
            raise Refusal(f"output must be a folder: {path} is a file")
    existing = next(path for path in (Path(output), *Path(output).absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise Refusal(f"output must be a folder that can be written: {existing} can't ({error.strerror})") from error


def check_device(device: str) -> None:
    """Refuse a device that isn't there, or that holds no numbers."""
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Refusal(f"device must be usable: got {device} ({str(error).splitlines()[0]})") from error


def scan(data: str, subset: list[str] | None) -> Images:
    """Samples of a folder with train/CLASS/... and val/CLASS/...; class indices follow the names sorted as text.

    Raises:
        Refusal: A split or a class lacks, a class holds no image, or the splits have different classes.
    """
    root = Path(data)
    if not root.is_dir():
        raise Refusal(f"data must be a folder with train and val in it: got {data}")
    folders = {split: split_folder(root, split) for split in SPLITS}
    found = {
        split: {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
        for split, folder in folders.items()
    }
    classes = sorted(read_subset(root, subset, found["train"]) if subset else found["train"])
    if not subset:
        for one, other in (("val", "train"), ("train", "val")):
            extra = sorted(found[one] - found[other])
            if extra:
                raise Refusal(f"{one} must hold the classes of {other}: {other} has no {short(extra)}")
    if len(classes) < 2:
        raise Refusal(f"train must hold at least 2 class folders: got {len(classes)} in {folders['train']}")
    samples: dict[str, list[tuple[Path, int]]] = {split: [] for split in SPLITS}
    for split, folder in folders.items():
        for index, name in enumerate(classes):
            samples[split] += [(path, index) for path in image_files(folder / name)]
    images = Images(root.resolve().name, tuple(classes), tuple(samples["train"]), tuple(samples["val"]))
    check_classes(images)
    return images


def split_folder(root: Path, split: str) -> Path:
    """Folder of a split, or a refusal that names it."""
    for name in SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    raise Refusal(f"data must hold the folder {' or '.join(SPLITS[split])}: {root} has none")


def read_subset(root: Path, subset: list[str], known: set[str]) -> set[str]:
    """Class names of --subset: each word is a text file, the name of one (NAME.txt) in the data folder, or a class.

    A line of a file is a class name, or starts with one: "n01558993 robin" and "n01558993, robin" are read alike.
    """
    names: set[str] = set()
    for word in subset:
        file = next((path for path in (Path(word), root / f"{word}.txt") if path.is_file()), None)
        if file is None:
            names.add(word)
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(f"subset must name a text file or classes: {file} can't be read as text") from error
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        names |= {line if line in known else line.replace(",", " ").split()[0] for line in lines}
    missing = sorted(names - known)
    if missing:
        raise Refusal(f"subset must name classes of train: {root} has no {short(missing)}")
    return names


def check_classes(images: Images) -> None:
    """Refuse a class that has no image left in one of the splits."""
    for split, samples in (("train", images.train), ("val", images.val)):
        counts = Counter(label for _, label in samples)
        empty = [name for index, name in enumerate(images.classes) if not counts[index]]
        if empty:
            raise Refusal(f"each class must hold a readable image in {split}: {short(empty)} has none")


def check_batches(images: Images, args: Any, world_size: int) -> None:
    """Refuse a batch that the training images can't fill, which would make an empty epoch."""
    share = len(images.train) // world_size
    if share < args.batch_size:
        raise Refusal(f"batch-size must be at most the {share} training images of a process: got {args.batch_size}")


def short(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def fingerprint(classes: tuple[str, ...]) -> str:
    """SHA-256 of the sorted class names, one a line: tells apart the many lists called ImageNet-100."""
    return hashlib.sha256("\n".join(sorted(classes)).encode()).hexdigest()[:16]
