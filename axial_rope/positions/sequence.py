"""Times of frames, and several samples in one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axial_rope.positions.grid import grid_positions


def frame_times(
    frames: int,
    *,
    fps: float | None,
    frames_per_token: int = 1,
    start: float = 0.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Times of a video's frames in seconds, as coordinates on the t axis.

    Parameters
    ----------
    frames
        Tokens along the time axis.
    fps
        Frames per second. It has no default: two videos of different speed would get the same times.
    frames_per_token
        Frames that a token covers (the patch size in time); the time of a token is that of its first frame.
    start
        Time of the first frame.
    device
        Where the times are made.

    Returns
    -------
    Tensor
        float32, (frames,).

    Raises
    ------
    ValueError
        If `fps` is missing or not positive, or a number is less than 1.

    Examples
    --------
    >>> frame_times(3, fps=4.0, frames_per_token=2).tolist()
    [0.0, 0.5, 1.0]
    >>> from axial_rope import axis_positions
    >>> axis_positions(frame_times(2, fps=4.0), torch.arange(1), torch.arange(2)).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.25, 0.0, 0.0], [0.25, 0.0, 1.0]]
    """
    if fps is None or not fps > 0:
        raise ValueError(f"fps must be a positive number of frames per second, read from the video: got {fps}")
    if frames < 1 or frames_per_token < 1:
        raise ValueError(f"frames and frames_per_token must be at least 1: got {frames} and {frames_per_token}")
    return torch.arange(frames, dtype=torch.float32, device=device) * frames_per_token / fps + start


def packed_positions(
    grids: Sequence[Sequence[int]],
    positions: Callable[..., Tensor] = grid_positions,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of several grids in one sequence, each starting anew.

    Parameters
    ----------
    grids
        (height, width) or (frames, height, width) of each sample.
    positions
        From a grid to positions: called as ``positions(*grid, device=...)``.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        (tokens of all grids, axes). `packed_mask` keeps the samples apart in attention.

    Raises
    ------
    ValueError
        If there is no grid, or the grids have different numbers of axes.

    Examples
    --------
    >>> packed_positions([(1, 2), (2, 1)]).tolist()
    [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    """
    axes = {len(grid) for grid in grids}
    if len(axes) != 1:
        raise ValueError(f"grids must be one or more with the same number of axes: got {[tuple(grid) for grid in grids]}")
    return torch.cat([positions(*grid, device=device) for grid in grids])


def packed_mask(lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Which tokens of a packed sequence may look at each other: those of the same sample.

    Parameters
    ----------
    lengths
        Tokens of each sample, or of each window.
    device
        Where the mask is made.

    Returns
    -------
    Tensor
        bool, (tokens, tokens), for the mask of `RotaryAttention`.

    Examples
    --------
    >>> packed_mask([1, 2]).int().tolist()
    [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """
    counts = torch.as_tensor(lengths, device=device)
    sample = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return sample[:, None] == sample
