"""Axial: one geometric series of frequencies per axis, the scheme of most vision transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from axial_rope.frequencies.base import AxialFamily, Series, check_positive, geometric


@dataclass(frozen=True)
class Axial(AxialFamily):
    """One axis per pair, frequencies ``base ** (-i / n)`` for the n pairs of an axis.

    The scheme of RoFormer (arXiv 2104.09864) for one axis, and of rope-vit (arXiv 2403.13298), EVA-02, SAM 2 and most
    others for two and three. `base` is what others call theta or temperature.

    Parameters
    ----------
    head_dim
        Channels of an attention head.
    axes
        1, 2 or 3 axes, or their order in the head as a string: 2 is "yx"; rope-vit and SAM 2 have "xy".
    base
        The slowest pairs turn by about ``1 / base`` radians per unit of position. One number, or one per axis in the order
        of `axes`. rope-vit uses 100 for images; 10000, meant for text, hardly turns half of the pairs on a small grid.
    pairs_per_axis
        Pairs of each axis in the order of `axes`; equal shares of the whole head by default. Where they don't fill the
        head, its last channels are left unrotated.
    layout
        "interleaved", "half" or "half_per_axis", see `axial_rope.rotation`.
    dealt
        True deals one series over all pairs, ``base ** (-i / P)``, to the axes in turn, so that each axis has frequencies
        of its own: Pixtral gives the even ones to y and the odd ones to x. The pairs still stand axis by axis in the head.

    Raises
    ------
    ValueError
        If the pairs don't fit in the head, or an argument is unknown.

    Examples
    --------
    >>> Axial(head_dim=8, axes=2, base=100.0).frequencies()
    tensor([[1.0000, 0.1000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.1000]])
    >>> Axial(head_dim=8, axes=2, base=16.0, dealt=True).frequencies()
    tensor([[1.0000, 0.2500, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.1250]])
    """

    head_dim: int
    axes: int | str = 2
    base: float | Sequence[float] = 10000.0
    pairs_per_axis: Sequence[int] | None = None
    layout: str = "interleaved"
    dealt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.base, int | float):
            object.__setattr__(self, "base", tuple(self.base))
            if len(self.bases) != self.columns:
                raise ValueError(f"base must be one number or one per axis: got {len(self.bases)} for {self.columns} axes")
        check_positive("base", *self.bases)
        if self.dealt and (len(set(self.split)) > 1 or not isinstance(self.base, int | float)):
            raise ValueError(
                f"dealt must come with one base and equal pairs_per_axis: got base={self.base} and {self.split} pairs"
            )

    @property
    def bases(self) -> tuple[float, ...]:
        """The base of each axis, in the order of `axes`."""
        return (self.base,) * self.columns if isinstance(self.base, int | float) else tuple(self.base)

    def geometry(self, index: int) -> tuple[float, float | None]:
        return 1.0, self.bases[index]

    def series(self) -> list[Series]:
        own = super().series()
        if not self.dealt:
            return own
        turns = [tuple(range(turn, self.pairs, self.columns)) for turn in range(self.columns)]
        return [series._replace(places=turn, length=self.pairs) for series, turn in zip(own, turns, strict=True)]

    def band(self, index: int) -> Tensor:
        if self.dealt:
            return geometric(self.bases[index], self.pairs)[index :: self.columns]
        return geometric(self.bases[index], self.split[index])
