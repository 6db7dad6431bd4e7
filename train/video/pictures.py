"""Pictures of tracked clips: overlays as GIF, and a sheet of clips with true and found masks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from train.checkpoint import write_atomic
from train.video.folders import palette
from train.video.metrics import boundary


def overlay(frame: Tensor, labels: Tensor, strength: float = 0.5) -> np.ndarray:
    """A frame (1 or 3, H, W) in [0, 1] with coloured objects and white contours: uint8, (H, W, 3)."""
    picture = frame.expand(3, -1, -1).permute(1, 2, 0).numpy().astype(np.float64) * 255
    names = labels.numpy().astype(np.int64) & 255
    colours = np.array(palette()).reshape(256, 3)[names]
    # The palette is dark; doubled it stands out on frames.
    picture = np.where(names[..., None] > 0, (1 - strength) * picture + strength * np.minimum(2 * colours, 255), picture)
    edge = boundary(names) > 0
    picture[edge] = 0.5 * picture[edge] + 127
    return picture.clip(0, 255).astype(np.uint8)


def write_gif(path: Path, pictures: Sequence[np.ndarray], *, milliseconds: int = 80, scale: int = 1) -> None:
    """An endless GIF of pictures (H, W, 3)."""
    images = [Image.fromarray(np.kron(picture, np.ones((scale, scale, 1), np.uint8))) for picture in pictures]
    data = io.BytesIO()
    images[0].save(data, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: file.write(data.getvalue()))


def write_sheet(
    path: Path, frames: Tensor, truth: Tensor, found: dict[str, Tensor], *, every: int = 3, scale: int = 3
) -> None:
    """Clips (B, T, 1, H, W) from left to right, under each other the true masks and those that each variant found."""
    rows = []
    for clip in range(len(frames)):
        for masks in [truth, *found.values()]:
            cells = [overlay(frames[clip, t], masks[clip, t]) for t in range(0, frames.shape[1], every)]
            rows.append(np.concatenate([np.pad(cell, ((1, 1), (1, 1), (0, 0)), constant_values=90) for cell in cells], 1))
        rows.append(np.zeros((3, rows[-1].shape[1], 3), np.uint8))
    sheet = np.kron(np.concatenate(rows[:-1]), np.ones((scale, scale, 1), np.uint8))
    data = io.BytesIO()
    Image.fromarray(sheet).save(data, "PNG")
    write_atomic(path, lambda file: file.write(data.getvalue()))


def disk_labels(height: int, width: int, centre: tuple[float, float], radius: float) -> Tensor:
    """A disk labelled 1: a first mask to draw where there is none.

    >>> disk_labels(3, 4, (1, 1), 1).tolist()
    [[0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 0, 0]]
    """
    y, x = torch.arange(height)[:, None] - centre[0], torch.arange(width) - centre[1]
    return (y**2 + x**2 <= radius**2).to(torch.uint8)
