"""How fast each feature pair turns: families of frequency tables.

A family is plain data, a frozen dataclass that prints itself, compares, and goes into a checkpoint as a dict and back. Its
one product is a table of frequencies in radians per unit of position,

    frequencies()  ->  (axes, pairs)  |  (axes, heads, pairs)  |  (axes, blocks, heads, pairs)

whose rows stand in the order of the position columns, (t, y, x). Where the pairs of one axis stand in the head is said by
the string `axes`: "yx" gives the first pairs to y and the next to x, "xy" the other way round (rope-vit, SAM 2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from axial_rope.rotation import check_layout

__all__ = ["Axial", "Family", "Mixed", "Periods", "Pixels", "family_from_dict"]

COLUMNS = "tyx"  # the order of position columns


def geometric(base: float, pairs: int) -> Tensor:
    """``base ** (-i / pairs)`` for i = 0 .. pairs - 1: the schedule of RoFormer (arXiv 2104.09864), float32."""
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu") / (2 * pairs)
    return 1.0 / base**exponents


class Family(ABC):
    """What every family offers; see the module's docstring."""

    head_dim: int
    layout: str
    learned: ClassVar[bool] = False

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
    def scale(self) -> float:
        """Factor on the rotated channels (1 but for YaRN and LongRoPE)."""
        return 1.0

    def as_dict(self) -> dict[str, Any]:
        """The family as plain data, read back by `family_from_dict`."""
        return {"family": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


def family_from_dict(data: dict[str, Any]) -> Family:
    """The family whose `as_dict` gave `data`.

    Raises
    ------
    ValueError
        If `data` names no family of this package, or an argument that it doesn't have.

    Examples
    --------
    >>> family_from_dict(Axial(64, base=100.0).as_dict())
    Axial(head_dim=64, axes='yx', base=100.0, pairs_per_axis=(16, 16), layout='interleaved')
    """
    arguments = dict(data)
    name = arguments.pop("family", None)
    families = {family.__name__: family for family in (Axial, Mixed, Periods, Pixels)}
    if name not in families:
        raise ValueError(f"family must be one of {sorted(families)}: got {name!r}")
    try:
        return families[name](**arguments)
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


def check_split(head_dim: int, axes: int, split: Sequence[int] | None) -> tuple[int, ...]:
    """The pairs of each axis: `split` if it fits in the head, else equal shares of the whole head."""
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

    def frequencies(self) -> Tensor:
        # axes="yx", split (2, 1):   pair    0   1   2
        #                            row y   f0  f1  0
        #                            row x   0   0   f0
        table = torch.zeros(self.columns, self.pairs, dtype=torch.float32, device="cpu")
        start = 0
        for index, (axis, pairs) in enumerate(zip(str(self.axes), self.split, strict=True)):
            row = COLUMNS[-self.columns :].index(axis)
            table[row, start : start + pairs] = self.band(index)
            start += pairs
        return table


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

    Raises
    ------
    ValueError
        If the pairs don't fit in the head, or an argument is unknown.

    Examples
    --------
    >>> Axial(head_dim=8, axes=2, base=100.0).frequencies()
    tensor([[1.0000, 0.1000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.1000]])
    """

    head_dim: int
    axes: int | str = 2
    base: float | Sequence[float] = 10000.0
    pairs_per_axis: Sequence[int] | None = None
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.base, int | float):
            object.__setattr__(self, "base", tuple(self.base))
            if len(self.bases) != self.columns:
                raise ValueError(f"base must be one number or one per axis: got {len(self.bases)} for {self.columns} axes")
        if any(base <= 0 for base in self.bases):
            raise ValueError(f"base must be positive: got {self.base}")

    @property
    def bases(self) -> tuple[float, ...]:
        """The base of each axis, in the order of `axes`."""
        return (self.base,) * self.columns if isinstance(self.base, int | float) else tuple(self.base)

    def band(self, index: int) -> Tensor:
        return geometric(self.bases[index], self.split[index])


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
        if min([1.0 if self.base is None else self.base, *(self.period_range or ()), *(self.periods or ())]) <= 0:
            raise ValueError(f"periods must be positive: got {self}")

    def band(self, index: int) -> Tensor:
        return 2 * math.pi / self.period_band(self.split[index])

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


@dataclass(frozen=True)
class Pixels(AxialFamily):
    """One axis per pair, frequencies ``pi * b`` with bands b from 1 to ``max_frequency / 2``, for positions in [-1, 1].

    The pixel bands of timm's ``RotaryEmbedding`` (``in_pixels=True``) and of lucidrains' rotary-embedding-torch
    (``freqs_for="pixel"``), to be used with `pixel_positions`.

    Parameters
    ----------
    head_dim
        Channels of an attention head.
    axes
        1, 2 or 3 axes, or their order in the head as a string.
    max_frequency
        Twice the highest band; the image's resolution in timm (``max_res``).
    spacing
        "log" for bands in powers of two (timm's default), "linear" for evenly spaced ones.
    pairs_per_axis, layout
        As for `Axial`.

    Examples
    --------
    >>> Pixels(head_dim=6, axes=1, max_frequency=8, spacing="log").frequencies() / torch.pi
    tensor([[1., 2., 4.]])
    """

    head_dim: int
    axes: int | str = 2
    max_frequency: float = 224.0
    spacing: str = "log"
    pairs_per_axis: Sequence[int] | None = None
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spacing not in ("log", "linear"):
            raise ValueError(f'spacing must be "log" or "linear": got {self.spacing!r}')
        if self.max_frequency < 2:
            raise ValueError(f"max_frequency must be at least 2: got {self.max_frequency}")

    def band(self, index: int) -> Tensor:
        pairs = self.split[index]
        if self.spacing == "linear":
            return math.pi * torch.linspace(1.0, self.max_frequency / 2, pairs, dtype=torch.float32, device="cpu")
        octaves = math.log2(self.max_frequency) - 1
        return math.pi * 2 ** torch.linspace(0.0, octaves, pairs, dtype=torch.float32, device="cpu")


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
        if self.base <= 0:
            raise ValueError(f"base must be positive: got {self.base}")

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
            angle = (
                torch.rand(1, dtype=torch.float32, device="cpu") * 2 * torch.pi if self.random_directions else torch.zeros(1)
            )
            x = torch.cat([torch.cos(angle), torch.cos(torch.pi / 2 + angle)])
            y = torch.cat([torch.sin(angle), torch.sin(torch.pi / 2 + angle)])
            return torch.stack([y, x])
        if not self.random_directions:
            return torch.eye(3, dtype=torch.float32, device="cpu")
        frame: Tensor = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float32, device="cpu"))[0]
        return frame
