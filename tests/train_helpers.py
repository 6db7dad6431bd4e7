"""What the tests of models/ and train/ share: settings, image folders, and the words of a small run."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from train.arguments import parse

COLOURS = {"cat": (200, 60, 40), "dog": (40, 180, 70), "emu": (50, 70, 210)}


def settings(**changes) -> argparse.Namespace:
    """Default settings of a run in one process, with changes."""
    args = parse([])
    vars(args).update(rank=0, world_size=1, distributed=False, **changes)
    return args


def picture(colour: tuple[int, int, int], height: int, width: int, seed: int) -> Image.Image:
    """Noise around a colour."""
    noise = np.random.default_rng(seed).integers(-30, 30, (height, width, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype("uint8"))


def image_tree(root: Path, classes: dict[str, tuple[int, int, int]] | None = None, train: int = 6, val: int = 4) -> Path:
    """Write root/{train,val}/CLASS/*.JPEG: pictures around a colour for each class, half of them tall, half wide."""
    for split, count in (("train", train), ("val", val)):
        for name, colour in (classes or COLOURS).items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                height, width = (24, 40) if index % 2 else (40, 24)
                picture(colour, height, width, seed=index).save(folder / f"{index}.JPEG")
    return root


def small(data: Path, output: Path, *more: str) -> list[str]:
    """Words of a run on an image folder that takes a second or two."""
    words = f"--data {data} --output {output} --model N/8 --img-size 16 --epochs 2 -b 6 --warmup-epochs 0 --workers 0"
    return [*words.split(), "--threads", "1", "--lr", "2e-3", "--scale", "0.5", "1", *more]
