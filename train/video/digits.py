"""Moving digits: clips with exact masks, made from scikit-learn's handwritten digits by a seed.

Each clip shows a target, its twin (the same digit image), another digit, and a bar that passes over them; digits start
apart, bounce at the frame, jitter, and hide one another. Only where it was tells the target from its twin.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SPRITE = 8  # side of a digit in pixels, as scikit-learn has it
VISIBLE = 15  # pixels of the target that the first frame shows at least
INK = 0.35  # from this brightness on, a pixel of the sprite belongs to the digit


class Clips(NamedTuple):
    """Frames (B, T, 1, H, W) in [0, 1] and labels (B, T, H, W): 0 background and bar, 1 target, 2 twin, 3 other."""

    frames: Tensor
    labels: Tensor


@cache
def sprites(split: str) -> np.ndarray:
    """The digits of a split as (N, SPRITE, SPRITE) in [0, 1]; every fifth one is for testing."""
    from sklearn.datasets import load_digits

    images = load_digits().images.astype(np.float32) / 16
    test = np.arange(len(images)) % 5 == 4
    return images[test if split == "test" else ~test]


def paths(rng: np.random.Generator, count: int, steps: int, room: tuple[int, int]) -> np.ndarray:
    """Corners (steps, count, 2) of sprites that move straight with jitter and bounce at 0 and at `room`."""
    limit = np.array(room, dtype=np.float64)
    start = rng.random((count, 2)) * limit
    angle = rng.random(count) * 2 * np.pi
    speed = rng.uniform(0.5, 1.5, count)
    velocity = np.stack([np.sin(angle), np.cos(angle)], axis=1) * speed[:, None]
    jitter = rng.normal(0, 0.25, (steps, count, 2))
    way = start + velocity * np.arange(steps)[:, None, None] + jitter
    period = 2 * limit
    folded = np.mod(way, period)
    return np.where(folded > limit, period - folded, folded)


def moving_digits(
    clips: int, frames: int, *, size: tuple[int, int] = (32, 32), seed: int = 0, split: str = "train", stride: int = 1
) -> Clips:
    """Clips of moving digits; the same arguments give the same clips.

    Args:
        clips: Number of clips B.
        frames: Frames T of each.
        size: Height and width in pixels.
        seed: Seed of all random choices.
        split: "train" or "test": which digits are used.
        stride: Keep every stride-th frame of a longer clip.

    >>> clips = moving_digits(2, 3, size=(32, 48))
    >>> clips.frames.shape, sorted(clips.labels.unique().tolist())
    (torch.Size([2, 3, 1, 32, 48]), [0, 1, 2, 3])
    """
    rng = np.random.default_rng([seed, 7])
    images, (height, width) = sprites(split), size
    frame_set = np.zeros((clips, frames, height, width), np.float32)
    label_set = np.zeros((clips, frames, height, width), np.uint8)
    for clip in range(clips):
        while True:
            draw_clip(rng, images, frame_set[clip], label_set[clip], stride)
            if (label_set[clip, 0] == 1).sum() >= VISIBLE:
                break
    frame_set += rng.normal(0, 0.05, frame_set.shape).astype(np.float32)
    return Clips(torch.from_numpy(frame_set.clip(0, 1))[:, :, None], torch.from_numpy(label_set))


def draw_clip(rng: np.random.Generator, images: np.ndarray, frames: np.ndarray, labels: np.ndarray, stride: int) -> None:
    """One clip without its noise, in place."""
    frames[:], labels[:] = 0, 0
    count, height, width = frames.shape
    target, other = rng.choice(len(images), 2, replace=False)
    digits = [images[target], images[target], images[other]]
    while True:  # until they start apart
        corners = paths(rng, 3, (count - 1) * stride + 1, (height - SPRITE, width - SPRITE))[::stride].round().astype(int)
        gaps = np.abs(corners[0] - corners[0, [1, 2, 0]]).max(axis=1)
        if gaps.min() >= SPRITE:
            break
    depth = rng.permutation(3)
    for frame in range(count):
        for index in depth:
            y, x = corners[frame, index]
            ink = digits[index] > INK
            frames[frame, y : y + SPRITE, x : x + SPRITE][ink] = digits[index][ink]
            labels[frame, y : y + SPRITE, x : x + SPRITE][ink] = index + 1
    draw_bar(rng, frames, labels, stride)


def draw_bar(rng: np.random.Generator, frames: np.ndarray, labels: np.ndarray, stride: int) -> None:
    """A bar across the frame that moves sideways, over everything else, in place."""
    upright = rng.random() < 0.5
    if not upright:
        frames, labels = frames.swapaxes(1, 2), labels.swapaxes(1, 2)
    room, width = frames.shape[2], int(rng.integers(4, 8))
    speed = rng.uniform(0.5, 1.5) * (1 if rng.random() < 0.5 else -1)
    start, shade = rng.random() * room, rng.uniform(0.3, 0.6)
    for index in range(len(frames)):
        left = int(start + speed * index * stride) % (room + width) - width
        span = slice(max(left, 0), max(left + width, 0))
        frames[index, :, span], labels[index, :, span] = shade, 0
