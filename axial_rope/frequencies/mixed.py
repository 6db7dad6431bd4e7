"""Mixed: learned frequencies on all axes at once, RoPE-Mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from axial_rope.frequencies.base import Family, check_positive, check_split, geometric
from axial_rope.rotation import check_layout


@dataclass(frozen=True)
class Mixed(Family):
    """All axes in every pair, learned, for each head (and each block): RoPE-Mixed of rope-vit (arXiv 2403.13298).

    Each head starts from a random orthogonal frame of directions. The pairs are dealt to the directions in equal shares,
    and share i of n turns along its direction with frequency ``base ** (-i / n)``. For two axes and one seed the table is
    the one that rope-vit and timm draw.

    Parameters
    ----------
    head_dim
        Channels of an attention head; divisible by ``2 * axes``.
    heads
        Attention heads, each with its own frequencies.
    blocks
        Blocks with frequencies of their own, or None for one table that is used wherever the embedding is called.
    axes
        Number of position columns, 2 or 3.
    base
        10 in rope-vit.
    random_directions
        False starts every head from the axes themselves, which is how rope-vit's Swin makes its axial variant.
    layout
        "interleaved" or "half".

    Examples
    --------
    >>> Mixed(head_dim=64, heads=6, blocks=12).frequencies().shape
    torch.Size([2, 12, 6, 32])
    """

    head_dim: int
    heads: int
    blocks: int | None = None
    axes: int = 2
    base: float = 10.0
    random_directions: bool = True
    layout: str = "interleaved"

    learned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.axes not in (2, 3):
            raise ValueError(f"axes must be 2 or 3: got {self.axes}")
        check_split(self.head_dim, self.axes, None)
        check_layout(self.layout)
        if self.layout == "half_per_axis":
            raise ValueError('layout must be "interleaved" or "half", since every pair turns along all axes: got '
                             '"half_per_axis"')  # fmt: skip
        if self.heads < 1 or (self.blocks is not None and self.blocks < 1):
            raise ValueError(f"heads and blocks must be at least 1: got heads={self.heads}, blocks={self.blocks}")
        check_positive("base", self.base)

    @property
    def columns(self) -> int:
        return self.axes

    @property
    def split(self) -> tuple[int, ...]:
        return (self.head_dim // 2,)

    def frequencies(self) -> Tensor:
        magnitudes = geometric(self.base, self.pairs // self.axes)
        heads = [self._directions() for _ in range((self.blocks or 1) * self.heads)]
        frames = torch.stack(heads, dim=1)  # (axes, blocks * heads, directions)
        table = frames[..., None] * magnitudes  # (axes, blocks * heads, directions, share)
        blocks = () if self.blocks is None else (self.blocks,)
        return table.reshape(self.axes, *blocks, self.heads, self.pairs)

    def _directions(self) -> Tensor:
        """Rows (t, y, x), one column per direction, for one head."""
        if self.axes == 2:
            turn = torch.rand if self.random_directions else torch.zeros
            angle = turn(1, dtype=torch.float32, device="cpu") * 2 * torch.pi
            x = torch.cat([torch.cos(angle), torch.cos(torch.pi / 2 + angle)])
            y = torch.cat([torch.sin(angle), torch.sin(torch.pi / 2 + angle)])
            return torch.stack([y, x])
        if not self.random_directions:
            return torch.eye(3, dtype=torch.float32, device="cpu")
        frame: Tensor = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float32, device="cpu"))[0]
        return frame
