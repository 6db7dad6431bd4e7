"""Positions of the cells of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Offset = float | Sequence[float]


def axis_positions(*coordinates: Tensor) -> Tensor:
    """Positions of every combination of the coordinates given for each axis.

    Parameters
    ----------
    coordinates
        One 1-D tensor per axis, in the order (t, y, x), of T, H and W values in any unit; for example frame times in
        seconds, rows and columns.

    Returns
    -------
    Tensor
        float32, (T * H * W, axes), the last axis running fastest.

    Examples
    --------
    >>> axis_positions(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0, 3.0])).tolist()
    [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.5, 1.0], [0.5, 2.0], [0.5, 3.0]]
    """
    if not coordinates:
        raise ValueError("coordinates must hold one tensor per axis: got none")
    for axis, values in enumerate(coordinates):
        if values.dim() != 1:
            raise ValueError(f"coordinates must be 1-D: those of axis {axis} have shape {tuple(values.shape)}")
    columns = torch.meshgrid(*(values.to(torch.float32) for values in coordinates), indexing="ij")
    return torch.stack(columns, dim=-1).flatten(0, -2)  # (T * H * W, axes)


def grid_positions(
    *size: int,
    offset: Offset = 0.0,
    reference: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Index positions of a grid: row 0, 1, 2, ... and column 0, 1, 2, ...

    Parameters
    ----------
    size
        The grid: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
    offset
        Added to the indices before any rescaling, one number or one per axis. Perception Encoder, Llama-4 and torchtune
        count from 1.
    reference
        Grid that the positions are interpolated to, in the order of `size`: index k of an axis with n cells becomes
        ``(k + offset) / n * reference``. EVA-02 and timm (``ref_feat_shape``) use the grid of the pretraining here, so
        that a larger grid has positions in between those that the model has seen.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        float32, (tokens, axes), columns (t, y, x).

    Raises
    ------
    ValueError
        If an axis has less than one cell, or `offset` or `reference` don't have one value per axis.

    Examples
    --------
    >>> grid_positions(2, 3).tolist()
    [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    >>> grid_positions(4, 2, reference=(2, 2))[:, 0].tolist()
    [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    """
    _check_size(size)
    offsets = _per_axis("offset", offset, len(size))
    coordinates = [torch.arange(n, dtype=torch.float32, device=device) + o for n, o in zip(size, offsets, strict=True)]
    if reference is not None:
        # Divided even where n equals the reference: k / n * n is not k in float32 for many n, and the references divide.
        targets = _per_axis("reference", reference, len(size))
        if not all(target > 0 for target in targets):
            raise ValueError(f"reference must be positive on every axis: got {tuple(reference)}")
        coordinates = [values / n * r for values, n, r in zip(coordinates, size, targets, strict=True)]
    return axis_positions(*coordinates)


def centered_positions(
    *size: int,
    normalize: str = "separate",
    offset: Offset = 0.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Cell centres of a grid, scaled to (-1, 1).

    The positions of DINOv3 (``2 * (k + 0.5) / n - 1``) and of timm's ``grid_type="centered"``.

    Parameters
    ----------
    size
        The grid: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
    normalize
        What stands for n: ``"separate"`` each axis's own cells, ``"max"`` those of the longest axis, ``"min"`` those of
        the shortest (the longer axes then reach beyond 1).
    offset
        Added to the indices before the scaling, one number or one per axis.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        float32, (tokens, axes), columns (t, y, x).

    Raises
    ------
    ValueError
        If an axis has less than one cell, `normalize` is unknown or `offset` doesn't have one value per axis.

    Examples
    --------
    >>> centered_positions(1, 4).tolist()
    [[0.0, -0.75], [0.0, -0.25], [0.0, 0.25], [0.0, 0.75]]
    """
    _check_size(size)
    offsets = _per_axis("offset", offset, len(size))
    if normalize == "separate":
        cells: tuple[int, ...] = size
    elif normalize in ("max", "min"):
        cells = (max(size) if normalize == "max" else min(size),) * len(size)
    else:
        raise ValueError(f'normalize must be "separate", "max" or "min": got {normalize!r}')
    centres = [torch.arange(n, dtype=torch.float32, device=device) + 0.5 + o for n, o in zip(size, offsets, strict=True)]
    return axis_positions(*(2.0 * (values / n) - 1.0 for values, n in zip(centres, cells, strict=True)))


def pixel_positions(*size: int, device: torch.device | str | None = None) -> Tensor:
    """Evenly spaced positions from -1 to 1, both ends included.

    The positions of timm's ``in_pixels=True`` and of lucidrains' ``freqs_for="pixel"``, for the family `Pixels`.

    Parameters
    ----------
    size
        The grid: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        float32, (tokens, axes), columns (t, y, x).

    Examples
    --------
    >>> pixel_positions(3).tolist()
    [[-1.0], [0.0], [1.0]]
    """
    _check_size(size)
    return axis_positions(*(torch.linspace(-1.0, 1.0, n, dtype=torch.float32, device=device) for n in size))


def cropped_positions(*size: int, start: Offset, stop: Offset, device: torch.device | str | None = None) -> Tensor:
    """Positions of a grid that is laid over the cells `start` to `stop` of another.

    An axis of n cells gets n even steps from ``start`` to ``stop * (n - 1) / n``: CogVideoX's
    ``get_3d_rotary_pos_embed(grid_type="linspace")`` with ``crops_coords``. Portrait and landscape are transposes of each
    other where their crops are.

    Parameters
    ----------
    size
        The grid: ``(length,)``, ``(height, width)`` or ``(frames, height, width)``.
    start, stop
        One number each, or one per axis in the order of `size`; CogVideoX has 0 and the number of frames on t.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        float32, (tokens, axes), columns (t, y, x).

    Raises
    ------
    ValueError
        If an axis has less than one cell, or `start` or `stop` don't have one value per axis.

    Examples
    --------
    >>> cropped_positions(4, start=0.0, stop=6.0).flatten().tolist()
    [0.0, 1.5, 3.0, 4.5]
    """
    _check_size(size)
    starts, stops = _per_axis("start", start, len(size)), _per_axis("stop", stop, len(size))
    steps = [
        torch.linspace(first, last * (n - 1) / n, n, dtype=torch.float32, device=device)
        for n, first, last in zip(size, starts, stops, strict=True)
    ]
    return axis_positions(*steps)


def _check_size(size: Sequence[int]) -> None:
    if not 1 <= len(size) <= 3:
        raise ValueError(f"size must be (length,), (height, width) or (frames, height, width): got {tuple(size)}")
    if any(isinstance(n, float | str | Sequence) for n in size):
        raise TypeError(f"size must be whole numbers, one for each axis: got {size}")
    if any(n < 1 for n in size):
        raise ValueError(f"size must have at least one cell on every axis: got {tuple(size)}")


def _per_axis(name: str, value: Offset, axes: int) -> tuple[float, ...]:
    values = (value,) * axes if isinstance(value, int | float) else tuple(value)
    if len(values) != axes:
        raise ValueError(f"{name} must have one value per axis: got {len(values)} values for {axes} axes")
    return values
