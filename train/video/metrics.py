"""Region similarity J and contour accuracy F of masks, as DAVIS 2017 defines them (arXiv 1704.00675, 1607.05074).

J   |P and G| / |P or G|, 1 if both are empty
F   2 PR / (P + R) of boundary pixels, matched within 0.008 of the diagonal; 1 if both are empty, 0 if one is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.ndimage import binary_dilation

TOLERANCE = 0.008  # of the frame's diagonal
VOID = 255  # pixels with this label count for nothing


class Score(NamedTuple):
    """Mean, recall (share of frames above one half) and decay (first quarter's mean minus the last's) of a measure."""

    mean: float
    recall: float
    decay: float


def region_similarity(mask: np.ndarray, truth: np.ndarray) -> float:
    """J of two boolean masks (H, W).

    >>> region_similarity(np.array([[True, True, False]]), np.array([[False, True, True]]))
    0.3333333333333333
    """
    union = np.logical_or(mask, truth).sum()
    return float(np.logical_and(mask, truth).sum() / union) if union else 1.0


def boundary(mask: np.ndarray) -> np.ndarray:
    """Pixels that differ from the one to the right, below, or below to the right.

    >>> boundary(np.array([[False, True, False]])).astype(int).tolist()
    [[1, 1, 0]]
    """
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    here = padded[:-1, :-1]
    return (here ^ padded[:-1, 1:]) | (here ^ padded[1:, :-1]) | (here ^ padded[1:, 1:])


def contour_accuracy(mask: np.ndarray, truth: np.ndarray) -> float:
    """F of two boolean masks (H, W)."""
    radius = int(np.ceil(TOLERANCE * np.hypot(*mask.shape)))
    steps = np.arange(-radius, radius + 1)
    disk = steps[:, None] ** 2 + steps**2 <= radius**2
    ours, theirs = boundary(mask), boundary(truth)
    if not ours.any() or not theirs.any():
        return float(ours.any() == theirs.any())
    precision = (ours & binary_dilation(theirs, disk)).sum() / ours.sum()
    recall = (theirs & binary_dilation(ours, disk)).sum() / theirs.sum()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def statistics(values: Sequence[float]) -> Score:
    """Of one object over its frames.

    >>> statistics([1.0, 0.8, 0.6, 0.4])
    Score(mean=0.7, recall=0.75, decay=0.6)
    """
    array = np.asarray(values)
    quarters = np.array_split(array, 4)
    decay = float(quarters[0].mean() - quarters[-1].mean()) if len(array) >= 4 else 0.0
    return Score(round(float(array.mean()), 10), float((array > 0.5).mean()), round(decay, 10))


def evaluate_video(labels: Mapping[int, np.ndarray], truth: Mapping[int, np.ndarray]) -> dict[int, tuple[Score, Score]]:
    """J and F of each object of a video, (J, F) by its number.

    Args:
        labels: Label maps (H, W) by frame.
        truth: The annotated ones; frames without annotation don't count, and neither do the first and the last of them,
            as in DAVIS. An object counts from the frame after the one in which it first appears.
    """
    frames = sorted(truth)
    objects = sorted({int(label) for frame in frames for label in np.unique(truth[frame])} - {0, VOID})
    scores = {}
    for item in objects:
        first = next(frame for frame in frames if (truth[frame] == item).any())
        counted = [frame for frame in frames[1:-1] if frame > first]
        if not counted:
            continue
        pairs = []
        for frame in counted:
            known = truth[frame] != VOID
            pairs.append(((labels[frame] == item) & known, truth[frame] == item))
        regions = statistics([region_similarity(*pair) for pair in pairs])
        scores[item] = regions, statistics([contour_accuracy(*pair) for pair in pairs])
    return scores


def summarize(videos: Mapping[str, Mapping[int, tuple[Score, Score]]]) -> dict[str, float]:
    """Means over all objects of all videos: J, F, J&F, their recalls and decays; nan without any object."""
    pairs = [pair for scores in videos.values() for pair in scores.values()]
    if not pairs:
        return dict.fromkeys(("J&F", "J", "J recall", "J decay", "F", "F recall", "F decay"), float("nan"))
    means = np.array(pairs).mean(axis=0)  # (J and F, mean and recall and decay)
    return {
        "J&F": float(means[:, 0].mean()),
        **{f"J{name}": float(value) for name, value in zip(("", " recall", " decay"), means[0], strict=True)},
        **{f"F{name}": float(value) for name, value in zip(("", " recall", " decay"), means[1], strict=True)},
    }
