"""What every family of frequencies is, and the checks that they share.

A family is plain data, a frozen dataclass that prints itself, compares, and goes into a checkpoint as a dict and back. Its
one product is a table of frequencies in radians per unit of position,

    frequencies()  ->  (axes, pairs)  |  (axes, heads, pairs)  |  (axes, blocks, heads, pairs)

whose rows stand in the order of the position columns, (t, y, x). Where the pairs of one axis stand in the head is said by
the string `axes`: "yx" gives the first pairs to y and the next to x, "xy" the other way round (rope-vit, SAM 2).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from axial_rope.rotation import check_layout

COLUMNS = "tyx"  # the order of position columns


def geometric(base: float, pairs: int) -> Tensor:
    """``base ** (-i / pairs)`` for i = 0 .. pairs - 1: the schedule of RoFormer (arXiv 2104.09864), float32."""
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu") / (2 * pairs)
    return 1.0 / base**exponents


class Series(NamedTuple):
    """A series of frequencies along one axis: what a context extension needs to know of a family.

    Attributes
    ----------
    row
        Row of the table, which is the position column.
    pairs
        The pairs of the table that are of this axis.
    places
        Place of each of them in its series.
    length
        Frequencies of the whole series; more than `pairs` has where one series is dealt to several axes.
    first, base
        Frequency i of the series is ``first * base ** (-i / length)``; `base` is None where it isn't geometric.
    """

    row: int
    pairs: tuple[int, ...]
    places: tuple[int, ...]
    length: int
    first: float
    base: float | None


class Family(ABC):
    """What every family offers; see the module's docstring."""

    head_dim: int
    layout: str
    learned: ClassVar[bool] = False
    known: ClassVar[list[type[Family]]] = []

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        Family.known.append(cls)

    @property
    @abstractmethod
    def columns(self) -> int:
        """Number of position columns."""

    @property
    @abstractmethod
    def split(self) -> tuple[int, ...]:
        """Pairs of each axis, in the order in which they stand in the head."""

    @abstractmethod
    def frequencies(self) -> Tensor:
        """The table, float32 on the CPU; for a learned family its initial value, drawn from the global generator."""

    @property
    def pairs(self) -> int:
        """Number of rotated pairs; the channels from ``2 * pairs`` on are left as they are."""
        return sum(self.split)

    @property
    def scale(self) -> float | tuple[float, ...]:
        """Factor on the rotated channels, one or one per pair (1 but for YaRN and LongRoPE)."""
        return 1.0

    def period_table(self) -> Tensor | None:
        """(axes, pairs): periods to divide positions by instead, infinite off a pair's axis; None where there are none."""
        return None

    def series(self) -> list[Series]:
        """The series of each axis, in the order in which they stand in the head.

        Raises
        ------
        TypeError
            If the frequencies are learned.
        """
        raise TypeError(f"family must have fixed frequencies: got {self}; scale the positions instead")

    def as_dict(self) -> dict[str, Any]:
        """The family as plain data, read back by `family_from_dict`."""
        return {"family": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Family:
        """The family with these constructor arguments, as `as_dict` wrote them."""
        return cls(**arguments)


def family_from_dict(data: dict[str, Any]) -> Family:
    """The family whose `as_dict` gave `data`.

    Raises
    ------
    ValueError
        If `data` names no family of this package, or an argument that it doesn't have.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> family_from_dict(Axial(64, base=100.0).as_dict())
    Axial(head_dim=64, axes='yx', base=100.0, pairs_per_axis=(16, 16), layout='interleaved', dealt=False)
    """
    arguments = dict(data)
    name = arguments.pop("family", None)
    families = {family.__name__: family for family in Family.known if not inspect.isabstract(family)}
    if name not in families:
        raise ValueError(f"family must be one of {sorted(families)}: got {name!r}")
    try:
        return families[name].from_arguments(arguments)
    except TypeError as error:
        raise ValueError(f"family must be given arguments of {name}: {error}") from None


def check_axes(axes: int | str) -> str:
    """The axes as a string of t, y and x, each once, in the order of their pairs in the head; 1 -> "x", 2 -> "yx"."""
    if isinstance(axes, int):
        if not 1 <= axes <= 3:
            raise ValueError(f"axes must be 1, 2 or 3, or a string such as 'yx': got {axes}")
        return COLUMNS[-axes:]
    if not axes or sorted(axes) != sorted(COLUMNS[-len(axes) :]):
        raise ValueError(f"axes must be an order of 'x', 'yx' or 'tyx': got {axes!r}")
    return axes


def check_positive(name: str, *values: float) -> None:
    """Raise unless all values are positive numbers."""
    wrong = [value for value in values if not 0 < value < math.inf]
    if wrong:
        raise ValueError(f"{name} must be positive: got {wrong[0]}")


def check_whole(name: str, *values: int) -> None:
    """Raise unless all values are whole numbers."""
    wrong = [value for value in values if not isinstance(value, int) or isinstance(value, bool)]
    if wrong:
        raise TypeError(f"{name} must be a whole number: got {wrong[0]!r}")


def check_split(head_dim: int, axes: int, split: Sequence[int] | None) -> tuple[int, ...]:
    """The pairs of each axis: `split` if it fits in the head, else equal shares of the whole head."""
    check_whole("head_dim", head_dim)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2: got head_dim={head_dim}")
    if split is None:
        if head_dim % (2 * axes):
            raise ValueError(
                f"head_dim must be divisible by 2 * axes = {2 * axes} for equal shares: got head_dim={head_dim}; "
                f"give pairs_per_axis for unequal shares or an unrotated tail"
            )
        return (head_dim // (2 * axes),) * axes
    split = tuple(split)
    check_whole("pairs_per_axis", *split)
    if len(split) != axes:
        raise ValueError(f"pairs_per_axis must have one number per axis: got {len(split)} numbers for {axes} axes")
    if any(pairs < 0 for pairs in split) or not 1 <= sum(split) <= head_dim // 2:
        raise ValueError(
            f"pairs_per_axis must hold between 1 and head_dim / 2 = {head_dim // 2} pairs: got {split}, {sum(split)} pairs"
        )
    return split


class AxialFamily(Family):
    """A family in which each pair turns along one axis, and each axis has a band of consecutive pairs."""

    axes: int | str
    pairs_per_axis: Sequence[int] | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", check_axes(self.axes))
        object.__setattr__(self, "pairs_per_axis", check_split(self.head_dim, self.columns, self.pairs_per_axis))
        check_layout(self.layout)

    @property
    def columns(self) -> int:
        return len(str(self.axes))

    @property
    def split(self) -> tuple[int, ...]:
        return tuple(self.pairs_per_axis or ())

    @abstractmethod
    def band(self, index: int) -> Tensor:
        """Frequencies of the axis ``axes[index]``, one for each of its pairs, float32."""

    def geometry(self, index: int) -> tuple[float, float | None]:
        """First frequency and base of the axis ``axes[index]``, see `Series`."""
        return 1.0, None

    def series(self) -> list[Series]:
        found, start = [], 0
        for index, (axis, pairs) in enumerate(zip(str(self.axes), self.split, strict=True)):
            row, own = COLUMNS[-self.columns :].index(axis), tuple(range(start, start + pairs))
            found.append(Series(row, own, tuple(range(pairs)), pairs, *self.geometry(index)))
            start += pairs
        return found

    def frequencies(self) -> Tensor:
        # axes="yx", split (2, 1):   pair    0   1   2
        #                            row y   f0  f1  0
        #                            row x   0   0   f0
        table = torch.zeros(self.columns, self.pairs, dtype=torch.float32, device="cpu")
        for index, series in enumerate(self.series()):
            table[series.row, list(series.pairs)] = self.band(index)
        return table
