"""Images and labels: scikit-learn's digits or a folder of classes, and timm loaders over them.

Class indices follow the sorted names of the folders, compared as text: with folders 0 to 11, class "10" has index 2.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import FastCollateMixup, create_loader, is_img_extension
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset

from train.errors import Stopped

Sample = tuple[Any, int]  # path of an image, or the image itself, and its class index


@dataclass(frozen=True)
class Images:
    """A data set: names, samples of both splits, and what the model has to know of the pixels."""

    name: str
    classes: tuple[str, ...]
    train: tuple[Sample, ...]
    val: tuple[Sample, ...]
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    skipped: tuple[str, ...] = ()

    @property
    def channels(self) -> int:
        return len(self.mean)


class SampleDataset(Dataset):
    """Samples behind timm's loaders, which set `transform`; a file that can't be read is an error, never replaced."""

    def __init__(self, samples: Sequence[Sample], channels: int) -> None:
        self.samples = samples
        self.mode = "L" if channels == 1 else "RGB"
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        source, label = self.samples[index]
        image = source if isinstance(source, Image.Image) else read_image(source, self.mode)
        return self.transform(image), label


def read_image(path: str | Path, mode: str = "RGB") -> Image.Image:
    """Decode an image of any color mode; `Stopped` names the file when it can't be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd EXIF data, palettes with transparency
            with Image.open(path) as image:
                if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                    return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype("uint8")).convert(mode)
                return image.convert(mode)
    except Exception as error:  # each of Pillow's decoders has its own
        raise Stopped(f"image must be readable: {path} is not, leave out --no-verify to skip such files") from error


def digits() -> Images:
    """The 1797 digits of 8x8 pixels: 1347 to train on and 450 to test on, the same stratified split for every seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    pictures = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype("uint8")
    samples = [(Image.fromarray(picture), int(label)) for picture, label in zip(pictures, labels, strict=True)]
    train, test = train_test_split(samples, test_size=450, random_state=0, stratify=labels)
    names = tuple(str(digit) for digit in range(10))
    return Images("digits", names, tuple(train), tuple(test), mean=(0.3053,), std=(0.3761,))


def image_files(folder: Path) -> list[Path]:
    """Image files anywhere below a folder, by their extension (timm's list), sorted by path."""
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(parent) in seen:  # a link back to where the walk has been
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        found += [Path(parent, name) for name in names if is_img_extension(Path(name).suffix.lower())]
    return sorted(found)


def is_broken(path: Path) -> bool:
    """Whether an image fails to decode. JPEGs are decoded at an eighth of their size, which reads the whole file."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))
            image.load()
    except Exception:  # each of Pillow's decoders has its own
        return True
    return False


def without_broken(images: Images, threads: int, rank: int = 0, world_size: int = 1) -> Images:
    """The data set without the files that can't be decoded, which `skipped` names; processes share the reading."""
    from tqdm import tqdm

    paths = [path for path, _ in (*images.train, *images.val)][rank::world_size]
    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")
        flags = pool.map(is_broken, paths)
        flags = tqdm(flags, total=len(paths), desc="verify", unit="image", delay=2, leave=False, disable=rank > 0)
        broken = {path for path, flag in zip(paths, flags, strict=True) if flag}
    if world_size > 1:
        shares: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(shares, broken)
        broken = set().union(*shares)
    keep = [tuple(sample for sample in split if sample[0] not in broken) for split in (images.train, images.val)]
    return replace(images, train=keep[0], val=keep[1], skipped=tuple(sorted(map(str, broken))))


def train_loader(images: Images, args: Any, device: torch.device, distributed: bool = False):
    """Batches `(B, channels, size, size)`, normalized on the device, with labels `(B,)`, or `(B, classes)` when mixed.

    The last, smaller batch is left out.
    """
    mix = None
    if args.mixup or args.cutmix:
        mix = FastCollateMixup(
            mixup_alpha=args.mixup,
            cutmix_alpha=args.cutmix,
            label_smoothing=args.smoothing,
            num_classes=len(images.classes),
        )
    loader = create_loader(
        SampleDataset(images.train, images.channels),
        is_training=True,
        scale=tuple(args.scale),
        hflip=args.hflip,
        color_jitter=args.color_jitter or None,
        auto_augment=args.aa,
        re_prob=args.reprob,
        re_mode="pixel",
        collate_fn=mix,
        **loader_options(images, args.img_size, args, device, distributed),
    )
    keep_one_bit(loader.dataset.transform)
    return loader


def eval_loader(images: Images, size: int, args: Any, device: torch.device, distributed: bool = False):
    """Every validation image once, resized and centre-cropped to `size` pixels; batches as those of training."""
    options = loader_options(images, size, args, device, distributed)
    return create_loader(SampleDataset(images.val, images.channels), crop_pct=args.crop_pct, **options)


def loader_options(images: Images, size: int, args: Any, device: torch.device, distributed: bool) -> dict[str, Any]:
    """What both loaders share. Workers end with each epoch, so that an epoch's randomness depends on its seed alone."""
    return dict(
        input_size=(images.channels, size, size),
        batch_size=args.batch_size,
        interpolation=args.interpolation,
        mean=images.mean,
        std=images.std,
        num_workers=args.workers,
        persistent_workers=False,
        pin_memory=device.type == "cuda",
        device=device,
        distributed=distributed,
    )


def keep_one_bit(transform: Any) -> None:
    """Keep timm's Posterize at one bit or more: with Pillow >= 13 its strongest setting, 0 bits, is an error."""
    for policy in getattr(transform, "transforms", ()):
        for op in flatten([getattr(policy, "ops", ()), getattr(policy, "policy", ())]):
            if op.name.startswith("Posterize") and op.level_fn is not None:
                op.level_fn = partial(at_least_one, op.level_fn)


def at_least_one(level: Any, magnitude: float, hparams: dict[str, Any]) -> tuple[int]:
    return (max(1, level(magnitude, hparams)[0]),)


def flatten(nested: Iterable[Any]) -> Iterable[Any]:
    for item in nested:
        if isinstance(item, (list, tuple)):
            yield from flatten(item)
        else:
            yield item
