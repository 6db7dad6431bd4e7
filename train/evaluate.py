"""Accuracy at one size, and over sizes with raw and with interpolated positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from timm.task import ClassificationTask, evaluation_sample_limit
from timm.utils import unwrap_model

from axial_rope import grid_positions
from train.engine import Precision

# How a position encoding meets another grid than the one it was trained on.
RULES = {
    "axial": ("raw", "interpolated"),
    "mixed": ("raw", "interpolated"),
    "learned": ("resampled",),
    "none": ("none",),
}


@torch.no_grad()
def evaluate(task: ClassificationTask, loader: Any, precision: Precision, distributed: bool = False) -> dict[str, float]:
    """Loss, top1 and top5 in percent of the averaged weights if there are any, each image counted once."""
    model = task.get_eval_model(ema=task.has_ema())
    model.eval()
    evaluator = task.create_evaluator(max_samples=evaluation_sample_limit(loader))
    for images, labels in loader:
        with precision.autocast():
            logits = model(images)
        evaluator.update(logits, labels)
    return dict(evaluator.compute(distributed=distributed))


@contextmanager
def positions_by(model: torch.nn.Module, rule: str, grid: tuple[int, int]) -> Iterator[None]:
    """Let a rotary model number its patches by a rule; "interpolated" maps every grid onto the training grid."""
    if rule not in ("raw", "interpolated"):
        yield
        return
    before = model.rope_positions
    model.rope_positions = grid_positions if rule == "raw" else partial(grid_positions, reference=grid)
    try:
        yield
    finally:
        model.rope_positions = before


def sweep(
    task: ClassificationTask,
    loader_of: Callable[[int], Any],
    sizes: list[int],
    grid: tuple[int, int],
    rope: str,
    precision: Precision,
    distributed: bool = False,
) -> dict[str, dict[int, float]]:
    """Top-1 in percent by rule and size; `grid` is the (height, width) of the training images in patches."""
    model = unwrap_model(task.get_eval_model(ema=task.has_ema()))
    top1: dict[str, dict[int, float]] = {rule: {} for rule in RULES[rope]}
    for size in sizes:
        loader = loader_of(size)
        for rule in RULES[rope]:
            with positions_by(model, rule, grid):
                top1[rule][size] = round(evaluate(task, loader, precision, distributed)["top1"], 2)
    return top1


def default_sizes(size: int, patch: int) -> list[int]:
    """Sizes around the training size, in whole patches.

    >>> default_sizes(8, 2), default_sizes(224, 16)
    ([6, 8, 10, 12, 16], [160, 224, 288, 336, 448])
    """
    return sorted({max(1, round(size * factor / patch)) * patch for factor in (0.75, 1, 1.25, 1.5, 2)})
