"""Orders of tokens other than row-major: merged blocks and windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from axial_rope.positions.grid import grid_positions


def merge_order(height: int, width: int, *, merge: int = 2, frames: int = 1) -> Tensor:
    """The order in which the cells of each ``merge x merge`` block follow each other, block after block.

        row-major   0 1 2 3      merged   0 1 4 5  2 3 6 7      Qwen2-VL's vision tower, whose merger joins four tokens
                    4 5 6 7

    Parameters
    ----------
    height, width
        The grid of patches, divisible by `merge`.
    merge
        Cells along each side of a block.
    frames
        Grids one after another.

    Returns
    -------
    Tensor
        int64, (frames * height * width,): ``x[..., order, :]`` puts row-major tokens into merged order.

    Raises
    ------
    ValueError
        If `height` or `width` isn't a multiple of `merge`.

    Examples
    --------
    >>> merge_order(2, 4).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    if min(height, width, merge, frames) < 1 or height % merge or width % merge:
        raise ValueError(f"height and width must be multiples of merge={merge}: got {height} and {width}")
    cells = torch.arange(frames * height * width, device="cpu").reshape(frames, height, width)
    return rearrange(cells, "t (h i) (w j) -> (t h w i j)", i=merge, j=merge)


def merged_positions(
    height: int, width: int, *, merge: int = 2, frames: int = 1, device: torch.device | str | None = None
) -> Tensor:
    """Index positions (y, x) of a grid whose tokens are in merged order, repeated for every frame.

    The positions of the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which have no temporal axis. For several images
    in one sequence, concatenate theirs. Qwen2.5-VL permutes tokens and positions further, by `window_order`.

    Parameters
    ----------
    height, width, merge, frames
        As for `merge_order`.
    device
        Where the positions are made.

    Returns
    -------
    Tensor
        float32, (frames * height * width, 2).

    Examples
    --------
    >>> merged_positions(2, 4)[:5].tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]
    """
    order = merge_order(height, width, merge=merge)
    return grid_positions(height, width, device=device)[order.to(device)].repeat(frames, 1)


def window_order(*size: int, window: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """The order in which the cells of each window follow each other, window after window, and the cells in each.

    Windows are cut from the top left; those at the right and the bottom may be smaller. This is the order of Qwen2.5-VL's
    window attention, whose cells are merged blocks (see `block_order`).

    Parameters
    ----------
    size
        ``(height, width)`` or ``(frames, height, width)``; a window lies within one frame.
    window
        Cells along each side of a window, one number or (height, width).

    Returns
    -------
    order : Tensor
        int64, (cells,): ``x[..., order, :]`` puts row-major cells into window order; its inverse is ``order.argsort()``.
    lengths : Tensor
        int64, (windows,): cells of each window, for `packed_mask`.

    Raises
    ------
    ValueError
        If an axis or a window has less than one cell.

    Examples
    --------
    >>> order, lengths = window_order(2, 3, window=2)
    >>> order.tolist(), lengths.tolist()
    ([0, 1, 3, 4, 2, 5], [4, 2])
    """
    high, wide = (window, window) if isinstance(window, int) else tuple(window)
    if len(size) not in (2, 3) or min(*size, high, wide) < 1:
        raise ValueError(
            f"size must be (height, width) or (frames, height, width), window (height, width), each at least 1: "
            f"got {size} and {(high, wide)}"
        )
    frames, height, width = (1, *size) if len(size) == 2 else size
    cells = torch.arange(frames * height * width, device="cpu").reshape(frames, height, width)
    windows = [part.reshape(-1) for frame in cells for row in frame.split(high, dim=0) for part in row.split(wide, dim=1)]
    return torch.cat(windows), torch.tensor([len(part) for part in windows], device="cpu")


def block_order(order: Tensor, block: int) -> Tensor:
    """The order of tokens where each cell of `order` is a block of consecutive tokens.

    Examples
    --------
    >>> block_order(torch.tensor([1, 0]), block=4).tolist()
    [4, 5, 6, 7, 0, 1, 2, 3]
    """
    return (order[:, None] * block + torch.arange(block, device=order.device)).flatten()
