"""Channels and pairs: taking a head apart into the members of its pairs, and putting it together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Table", "channels", "join_pairs", "pair_views", "split_pairs"]


class Table(NamedTuple):
    """What every backend is given beside the tensors that it turns.

    Attributes
    ----------
    cos, sin
        (..., N, P): they broadcast against the pairs of the turned tokens, (..., N, P).
    layout, split
        Which channels are pairs, see `axial_rope.rotation`. Channels from 2 P on are left as they are.
    prefix, suffix
        Tokens at the start and the end that are left as they are.
    angle
        What `cos` and `sin` were made of, if it is learned: their gradient goes to it.
    """

    cos: Tensor
    sin: Tensor
    layout: str
    split: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0
    angle: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of turned channels, 2 P."""
        return 2 * self.cos.shape[-1]

    def inverse(self) -> Table:
        """The table of the negative angles."""
        return self._replace(sin=-self.sin, angle=None)

    def wide(self, x: Tensor) -> torch.dtype:
        """The dtype of the arithmetic: float32, or float64 where `x` or the table has it."""
        return torch.promote_types(torch.promote_types(x.dtype, self.cos.dtype), torch.float32)

    def turned(self, x: Tensor) -> Tensor:
        """A view of the turned tokens of `x`, (..., prefix + N + suffix, head_dim); `x` itself where that is all of it."""
        if not self.prefix and not self.suffix:
            return x
        return x.narrow(-2, self.prefix, x.shape[-2] - self.prefix - self.suffix)

    def members(self, x: Tensor) -> Tensor:
        """A view of all pairs of the turned tokens of `x`, (..., N, 2 P); `x` itself where that is all of it."""
        return channels(self.turned(x), 0, self.width)

    def kept(self, x: Tensor) -> list[Tensor]:
        """Views of the tokens that are left as they are: the prefix and the suffix, if there are any."""
        ends = []
        if self.prefix:
            ends.append(x.narrow(-2, 0, self.prefix))
        if self.suffix:
            ends.append(x.narrow(-2, x.shape[-2] - self.suffix, self.suffix))
        return ends


def channels(x: Tensor, start: int, stop: int) -> Tensor:
    """``x[..., start:stop]``; `x` itself where that is all of it, since a view takes as long as the turn of a few tokens."""
    return x if stop - start == x.shape[-1] else x[..., start:stop]


def split_pairs(x: Tensor, layout: str, split: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first and the second members of all pairs, each (..., P), from channels (..., 2 P)."""
    if layout == "interleaved":
        a, b = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)  # a view: splitting an axis always is one
        return a, b
    if layout == "half":
        a, b = x.chunk(2, dim=-1)
        return a, b
    blocks = [block.chunk(2, dim=-1) for block in torch.split_with_sizes(x, [2 * pairs for pairs in split], dim=-1)]
    return torch.cat([a for a, _ in blocks], dim=-1), torch.cat([b for _, b in blocks], dim=-1)


def join_pairs(a: Tensor, b: Tensor, layout: str, split: Sequence[int]) -> Tensor:
    """The channels (..., 2 P) of the pairs whose members are `a` and `b`: the inverse of `split_pairs`."""
    if layout == "interleaved":
        return torch.stack([a, b], dim=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])
    if layout == "half":
        return torch.cat([a, b], dim=-1)
    blocks = zip(*(torch.split_with_sizes(part, list(split), dim=-1) for part in (a, b)), strict=True)
    return torch.cat([member for block in blocks for member in block], dim=-1)


def pair_views(x: Tensor, layout: str, split: Sequence[int]) -> list[tuple[Tensor, Tensor, slice]]:
    """Views of the members of pairs in channels (..., 2 P), and which of the P pairs they belong to.

    One view of each member is enough but for "half_per_axis", which has one for each axis.
    """
    if layout == "half_per_axis":
        views, start = [], 0
        for pairs in split:
            a, b = x[..., 2 * start : 2 * (start + pairs)].chunk(2, dim=-1) if pairs else (x[..., :0], x[..., :0])
            views.append((a, b, slice(start, start + pairs)))
            start += pairs
        return views
    a, b = split_pairs(x, layout, split)
    return [(a, b, slice(0, a.shape[-1]))]
