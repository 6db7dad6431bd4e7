"""Memory: the stored tokens that a frame of a video looks back at, with all that is known about where and when they were.

One tensor holds the tokens of all frames, one frame after another; what belongs to a token stands beside it. So frames may
have different grids, be pooled, or lack for some objects, and a memory is still plain tensors that compile and export.

    tokens      f0 f0 f0 f0 f0 f0   f1 f1 f1 f1 f1 f1   ...        pointers   p0  p1  ...
    positions   (y, x) of each, in cells of `grid`                            have no place: never rotated
    ages        3  3  3  3  3  3    2  2  2  2  2  2    ...                   5   1   ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from axial_rope.positions import grid_positions

__all__ = ["Memory", "memory_from_frames", "pool_frame", "sine_positions"]

Grid = tuple[int, int]


@dataclass(frozen=True)
class Memory:
    """Stored tokens and pointers, as `MemoryAttention` reads them.

    B samples or objects, M tokens of stored frames, P pointers, C memory channels. What is the same for all samples has no
    B in front.

    Attributes
    ----------
    tokens
        (B, M, C).
    positions
        (M, 2) or (B, M, 2): row and column of each token in cells of `grid`; None for whole frames of the reader's grid.
    grid
        The grid whose cells `positions` count. A reader with another grid puts each token at the same place of its own:
        cell centre i of h becomes ``(i + 0.5) / h * H - 0.5``. None takes the positions as they are.
    ages
        (M,) or (B, M): how long before the frame that reads each token was stored, in frames or seconds.
    slots
        (M,) or (B, M), integers: 0 for a conditioning frame, n for the n-th of the recent frames. The learned age embedding
        of SAM 2 goes by them.
    mask
        (B, M), False where a sample has no such token.
    counts
        (M,) or (B, M): how many tokens a pooled token stands for; its weight in the attention is multiplied by it.
    placed
        (M,), False for tokens that have no place in the frame (latents): they aren't rotated.
    key_position
        (M, C) or (B, M, C): added to the keys, not to the values. It may go on with rows for the tokens of the pointers.
    pointers
        (B, P, D), object pointers: D channels, cut into ``D / C`` tokens each. Never rotated.
    pointer_ages
        (P,) or (B, P), as `ages`.
    pointer_mask
        (B, P), as `mask`.
    """

    tokens: Tensor
    positions: Tensor | None = None
    grid: Grid | None = None
    ages: Tensor | None = None
    slots: Tensor | None = None
    mask: Tensor | None = None
    counts: Tensor | None = None
    placed: Tensor | None = None
    key_position: Tensor | None = None
    pointers: Tensor | None = None
    pointer_ages: Tensor | None = None
    pointer_mask: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to look at."""
        return self.tokens.shape[1] == 0 and (self.pointers is None or self.pointers.shape[1] == 0)

    def positions_on(self, grid: Grid) -> Tensor:
        """Row and column of each token in cells of the reader's grid: (M, 2) or (B, M, 2).

        Raises
        ------
        ValueError
            If there are no positions and the tokens aren't whole frames of `grid`.
        """
        if self.positions is None:
            cells, tokens = grid[0] * grid[1], self.tokens.shape[1]
            if tokens % cells:
                raise ValueError(
                    f"memory must hold whole frames of grid {grid} = {cells} tokens, or have positions: got {tokens} tokens"
                )
            positions = grid_positions(*grid, device=self.tokens.device).repeat(tokens // cells, 1)
        else:
            positions = regrid(self.positions, self.grid, grid)
        # A place of 0 on all axes turns nothing, exactly.
        return positions if self.placed is None else positions * self.placed[:, None].to(positions.dtype)


def regrid(positions: Tensor, source: Grid | None, target: Grid) -> Tensor:
    """Positions in cells of one grid as positions in cells of another that covers the same frame."""
    if source is None or source == target:
        return positions
    ratio = torch.tensor([target[0] / source[0], target[1] / source[1]], dtype=positions.dtype, device=positions.device)
    return (positions + 0.5) * ratio - 0.5


def memory_from_frames(
    frames: Sequence[Tensor],
    *,
    grids: Sequence[Grid],
    ages: Sequence[float] | Tensor | None = None,
    slots: Sequence[int] | Tensor | None = None,
    mask: Tensor | None = None,
    latents: int = 0,
    pointers: Tensor | None = None,
    pointer_ages: Sequence[float] | Tensor | None = None,
) -> Memory:
    """A memory of whole frames, each on a grid of its own.

    Parameters
    ----------
    frames
        One tensor (B, latents + h * w, C) for each frame.
    grids
        (h, w) of each frame. They are views of the same picture: (3, 5) beside (6, 10) is the same frame pooled.
    ages, slots
        One number for each frame, or (B, frames); see `Memory`.
    mask
        (B, frames), False where a sample has no such frame.
    latents
        Tokens without a place at the start of each frame (EdgeTAM's 1-D latents).
    pointers, pointer_ages
        (B, P, D) and one number for each; see `Memory`.

    Raises
    ------
    ValueError
        If a frame isn't a whole grid, or the numbers of frames, grids, ages, slots and columns of the mask differ.

    Examples
    --------
    >>> memory = memory_from_frames([torch.zeros(1, 2, 8), torch.zeros(1, 8, 8)], grids=[(1, 2), (2, 4)], ages=[2, 1])
    >>> memory.positions_on((2, 4))[:2].tolist()
    [[0.5, 0.5], [0.5, 2.5]]
    """
    if len(frames) != len(grids) or not frames:
        raise ValueError(f"frames must be one or more with a grid each: got {len(frames)} frames and {len(grids)} grids")
    for frame, (h, w) in zip(frames, grids, strict=True):
        if frame.dim() != 3 or frame.shape[1] != latents + h * w:
            raise ValueError(
                f"frames must have shape (batch, latents + {h} * {w} = {latents + h * w}, channels): "
                f"got {tuple(frame.shape)}"
            )
    device = frames[0].device
    lengths = [frame.shape[1] for frame in frames]
    reference = grids[0]
    spots = [regrid(grid_positions(*grid, device=device), grid, reference) for grid in grids]
    placed = None
    if latents:
        spots = [F.pad(spot, (0, 0, latents, 0)) for spot in spots]
        placed = torch.cat([torch.arange(length, device=device) >= latents for length in lengths])
    return Memory(
        torch.cat(list(frames), dim=1),
        torch.cat(spots),
        reference,
        ages=per_token("ages", ages, lengths, torch.float32, device),
        slots=per_token("slots", slots, lengths, torch.int64, device),
        mask=per_token("mask", mask, lengths, torch.bool, device),
        placed=placed,
        pointers=pointers,
        pointer_ages=None if pointer_ages is None else torch.as_tensor(pointer_ages, dtype=torch.float32, device=device),
    )


def per_token(
    name: str, values: Sequence[float] | Tensor | None, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """One value for each frame, (frames,) or (B, frames), as one for each token."""
    if values is None:
        return None
    values = torch.as_tensor(values, dtype=dtype, device=device)
    if values.shape[-1:] != (len(lengths),):
        raise ValueError(f"{name} must have one value for each of {len(lengths)} frames: got shape {tuple(values.shape)}")
    if len(set(lengths)) == 1:
        return values.repeat_interleave(lengths[0], dim=-1)
    columns = [value[..., None].expand(*value.shape, n) for value, n in zip(values.unbind(-1), lengths, strict=True)]
    return torch.cat(columns, dim=-1)


def pool_frame(tokens: Tensor, grid: Grid, kernel: int | Grid) -> tuple[Tensor, Grid, float]:
    """A frame averaged over cells of `kernel` tokens, before it is stored and before anything is rotated.

    Rotated keys mustn't be averaged: a pair of frequency f would shrink by cos(f / 2) on each axis.

    Parameters
    ----------
    tokens
        (B, h * w, C).
    grid
        (h, w).
    kernel
        Rows and columns that make one token; they must divide the grid.

    Returns
    -------
    tokens, grid, count
        (B, h' * w', C), (h', w') and the number of tokens in each of them, for `Memory.counts`.

    Raises
    ------
    ValueError
        If `kernel` doesn't divide `grid`, or `tokens` aren't a frame of `grid`.

    Examples
    --------
    >>> pool_frame(torch.arange(4.0).view(1, 4, 1), (1, 4), (1, 2))
    (tensor([[[0.5000],
             [2.5000]]]), (1, 2), 2.0)
    """
    rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
    (h, w), (batch, length, channels) = grid, tokens.shape
    if h % rows or w % columns:
        raise ValueError(f"kernel must divide the grid {grid}: got {(rows, columns)}")
    if length != h * w:
        raise ValueError(f"tokens must be a frame of grid {grid} = {h * w} tokens: got {length}")
    cells = tokens.view(batch, h // rows, rows, w // columns, columns, channels)
    return cells.mean(dim=(2, 4)).flatten(1, 2), (h // rows, w // columns), float(rows * columns)


def sine_positions(positions: Tensor, grid: Grid, dim: int) -> Tensor:
    """The sine embedding that SAM 2 adds to frames and memories: (..., dim), float32.

    Each axis is stretched to (0, 2 pi]: row i of h is at ``2 pi (i + 1) / h``. The first half of the channels is that of
    the rows, sines and cosines in turn (facebookresearch/sam2, modeling/position_encoding.py).

    Parameters
    ----------
    positions
        (..., 2): rows and columns in cells of `grid`.
    grid
        (h, w).
    dim
        Channels, divisible by 4.

    Raises
    ------
    ValueError
        If `dim` isn't divisible by 4.

    Examples
    --------
    >>> sine_positions(grid_positions(1, 2), (1, 2), 4)[:, 3].tolist()
    [-1.0, 1.0]
    """
    if dim % 4:
        raise ValueError(f"dim must be divisible by 4: got {dim}")
    wavelengths = 10000.0 ** (torch.arange(dim // 4, dtype=torch.float32, device=positions.device) * 4 / dim)
    waves = []
    for place, cells in zip(positions.unbind(-1), grid, strict=True):
        phase = ((place + 1) / (cells + 1e-6) * (2 * math.pi))[..., None] / wavelengths
        waves.append(torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2))
    return torch.cat(waves, dim=-1)


def sine_ages(ages: Tensor, dim: int) -> Tensor:
    """Sines, then cosines, of ages in units of the longest: (..., dim), float32; the pointer times of SAM 2.1."""
    wavelengths = 10000.0 ** (2 * (torch.arange(dim // 2, device=ages.device) // 2).to(torch.float32) / (dim // 2))
    phase = ages.to(torch.float32)[..., None] / wavelengths
    return torch.cat([phase.sin(), phase.cos()], dim=-1)
