"""Periods: DINOv3's frequencies, for positions in (-1, 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axial_rope.frequencies.base import AxialFamily, check_positive


@dataclass(frozen=True)
class Periods(AxialFamily):
    """One axis per pair, frequencies ``2 * pi / period``, for positions in (-1, 1).

    The scheme of DINOv3 (facebookresearch/dinov3, layers/rope_position_encoding.py), to be used with
    `centered_positions`. A period of 2 is one full turn over the image.

    Parameters
    ----------
    head_dim
        Channels of an attention head.
    axes
        1, 2 or 3 axes, or their order in the head as a string.
    base
        Periods ``base ** (i / n)`` for the n pairs of an axis, from 1 up to nearly `base`.
    period_range
        ``(shortest, longest)`` period, in a geometric series with both ends; replaces `base`.
    periods
        The periods themselves, the same for every axis; replaces `base`. Released DINOv3 checkpoints hold periods that
        were rounded to bfloat16 (``rope_embed.periods``), up to 0.2 % off the formula.
    pairs_per_axis, layout
        As for `Axial`.

    Raises
    ------
    ValueError
        If the pairs don't fit in the head, not exactly one of `base`, `period_range` and `periods` is given, or a period
        isn't positive.

    Examples
    --------
    >>> Periods(head_dim=8, period_range=(0.5, 2.0)).frequencies() / torch.pi
    tensor([[4., 1., 0., 0.],
            [0., 0., 4., 1.]])
    """

    head_dim: int
    axes: int | str = 2
    base: float | None = None
    period_range: Sequence[float] | None = None
    periods: Sequence[float] | None = None
    pairs_per_axis: Sequence[int] | None = None
    layout: str = "half"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("period_range", "periods"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(float(period) for period in value))
        given = [name for name in ("base", "period_range", "periods") if getattr(self, name) is not None]
        if not given:
            object.__setattr__(self, "base", 100.0)
        elif len(given) > 1:
            raise ValueError(f"base, period_range and periods must not be given together: got {' and '.join(given)}")
        if self.period_range is not None and len(self.period_range) != 2:
            raise ValueError(f"period_range must be (shortest, longest): got {len(self.period_range)} numbers")
        if self.periods is not None and set(self.split) - {len(self.periods)}:
            raise ValueError(f"periods must have one number per pair of an axis, {self.split}: got {len(self.periods)}")
        if self.base is not None:
            check_positive("base", self.base)
        check_positive("periods", *(self.period_range or ()), *(self.periods or ()))

    def geometry(self, index: int) -> tuple[float, float | None]:
        pairs = self.split[index]
        if self.period_range is None:
            return 2 * math.pi, self.base
        shortest, longest = self.period_range
        return 2 * math.pi / shortest, (longest / shortest) ** (pairs / (pairs - 1)) if pairs > 1 else None

    def band(self, index: int) -> Tensor:
        return 2 * math.pi / self.period_band(self.split[index])

    def period_table(self) -> Tensor:
        table = torch.full((self.columns, self.pairs), torch.inf, dtype=torch.float32, device="cpu")
        for series in self.series():
            table[series.row, list(series.pairs)] = self.period_band(len(series.pairs))
        return table

    def period_band(self, pairs: int) -> Tensor:
        """The periods of an axis with that many pairs, float32, in units of position."""
        if self.periods is not None:
            return torch.tensor(self.periods, dtype=torch.float32, device="cpu")
        if self.period_range is not None:
            shortest, longest = self.period_range
            ratio = longest / shortest
            exponents = torch.linspace(0, 1, pairs, dtype=torch.float32, device="cpu")
            return ratio**exponents / ratio * longest
        exponents = 2 * torch.arange(pairs, dtype=torch.float32, device="cpu") / (2 * pairs)
        return (self.base or 1.0) ** exponents
