"""MRope: one series of frequencies for text, images and videos, its pairs dealt to the axes t, y and x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axial_rope.frequencies.base import Family, Series, check_positive, check_whole, geometric
from axial_rope.rotation import check_layout


@dataclass(frozen=True)
class MRope(Family):
    """One 1-D series ``base ** (-i / P)`` whose pairs are dealt to the axes (t, y, x): multimodal RoPE.

    Pair i keeps its frequency and turns along one axis. A text token has the same position on all three axes, so for text
    this is plain 1-D RoPE.

        contiguous   sections (2, 2, 2)    t t y y x x     Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL
        strided      sections (2, 2, 2)    t y x t y x     Qwen3-VL (arXiv 2511.21631), timm's RotaryEmbeddingMRope

    In the strided order, pair i is y's if ``i % 3 == 1`` and ``i < 3 * y_section``, x's if ``i % 3 == 2`` and
    ``i < 3 * x_section``, and else t's.

    Parameters
    ----------
    head_dim
        Channels of an attention head.
    sections
        Pairs of t, y and x. (16, 24, 24) in Qwen2-VL, (24, 20, 20) in Qwen3-VL, for a head of 128.
    base
        1000000 in Qwen2-VL, 5000000 in Qwen3-VL.
    order
        "contiguous" or "strided".
    rotary_dim
        Channels that are rotated, the first ones of the head; all by default.
    layout
        "half" or "interleaved".

    Raises
    ------
    ValueError
        If the sections don't add up to ``rotary_dim / 2`` pairs, or have no room in the strided order.

    Examples
    --------
    >>> MRope(head_dim=12, sections=(2, 2, 2), order="strided").frequencies().nonzero()[:, 0].bincount()
    tensor([2, 2, 2])
    >>> MRope(head_dim=12, sections=(2, 2, 2), order="strided").axis_of_pair
    (0, 1, 2, 0, 1, 2)
    """

    head_dim: int
    sections: Sequence[int] = (16, 24, 24)
    base: float = 1000000.0
    order: str = "contiguous"
    rotary_dim: int | None = None
    layout: str = "half"

    def __post_init__(self) -> None:
        sections = tuple(self.sections)
        check_whole("head_dim", self.head_dim)
        check_whole("sections", *sections)
        object.__setattr__(self, "sections", sections)
        check_layout(self.layout)
        if self.layout == "half_per_axis":
            raise ValueError(
                'layout must be "half" or "interleaved", since an axis has no block of its own: got "half_per_axis"'
            )
        if self.order not in ("contiguous", "strided"):
            raise ValueError(f'order must be "contiguous" or "strided": got {self.order!r}')
        check_positive("base", self.base)
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 2 <= rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 2 and head_dim={self.head_dim}: got rotary_dim={rotary_dim}"
            )
        if len(sections) != 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2:
            raise ValueError(
                f"sections must be three numbers of pairs (t, y, x) that add up to {rotary_dim} / 2 = {rotary_dim // 2}: "
                f"got {sections}, {sum(sections)} pairs"
            )
        dealt = tuple(self.axis_of_pair.count(row) for row in range(3))
        if dealt != sections:
            raise ValueError(f"sections must leave room for each other in the strided order: got {sections}, dealt {dealt}")

    @property
    def columns(self) -> int:
        return 3

    @property
    def split(self) -> tuple[int, ...]:
        return (sum(self.sections),)

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The position column, 0 for t, 1 for y and 2 for x, along which each pair turns."""
        t, y, x = self.sections
        if self.order == "contiguous":
            return (0,) * t + (1,) * y + (2,) * x
        return tuple(1 if i % 3 == 1 and i < 3 * y else 2 if i % 3 == 2 and i < 3 * x else 0 for i in range(t + y + x))

    def series(self) -> list[Series]:
        found = []
        for row in range(3):
            own = tuple(pair for pair, axis in enumerate(self.axis_of_pair) if axis == row)
            found.append(Series(row, own, own, self.pairs, 1.0, self.base))
        return found

    def frequencies(self) -> Tensor:
        table = torch.zeros(3, self.pairs, dtype=torch.float32, device="cpu")
        for pair, (row, frequency) in enumerate(zip(self.axis_of_pair, geometric(self.base, self.pairs), strict=True)):
            table[row, pair] = frequency
        return table
