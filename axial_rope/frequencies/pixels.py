"""Pixels: the pixel bands of timm and of lucidrains, for positions in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axial_rope.frequencies.base import AxialFamily


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
