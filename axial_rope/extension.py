"""Longer sequences, larger grids, longer videos: functions that stretch the frequencies of a family.

    interpolate      f / factor                     Position Interpolation (arXiv 2306.15595), `reference_grid`
    ntk, dynamic_ntk base * factor ** (n / (n - 1)) NTK-aware scaling
    yarn             f / factor for slow pairs      YaRN (arXiv 2309.00071)
    llama3           f / factor for long waves      Llama 3.1
    longrope         f[i] / factors[i]              LongRoPE (arXiv 2402.13753)
    proportional     0 for the slow pairs           Gemma 4's text layers

Each takes a family with fixed frequencies and returns another, for one axis as for two or three: `factor` is one number, or
one per position column in the order (t, y, x), where 1 leaves an axis exactly as it is. They are pure functions: what was
seen before changes nothing, and a length on which the result depends is an argument. They can be applied one after another.
Learned frequencies aren't stretched; scale the positions instead (``positions / factor``).

`turns` tells what a grid asks of each pair, and `unseen` which pairs it takes where the training never was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axial_rope.frequencies.base import Family, check_positive
from axial_rope.frequencies.extended import Extended, Interpolation, Llama3, LongRope, Ntk, Proportional, Rule, Yarn

__all__ = [
    "dynamic_ntk",
    "interpolate",
    "llama3",
    "longrope",
    "ntk",
    "proportional",
    "reference_grid",
    "turns",
    "unseen",
    "yarn",
]

PerAxis = float | Sequence[float]


def interpolate(family: Family, factor: PerAxis) -> Extended:
    """Position Interpolation (arXiv 2306.15595): every frequency of an axis divided by its factor.

    Parameters
    ----------
    family
        Any family with fixed frequencies.
    factor
        How many times longer the axis has become; one number, or one per column (t, y, x).

    Raises
    ------
    TypeError
        If the frequencies are learned.
    ValueError
        If a factor isn't positive, or there isn't one per axis.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> interpolate(Axial(head_dim=8, base=16.0), factor=(2.0, 1.0)).frequencies()
    tensor([[0.5000, 0.1250, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.2500]])
    """
    return _extend(family, _factors(family, factor), lambda f, row: Interpolation(f))


def reference_grid(family: Family, grid: Sequence[int], reference: Sequence[int]) -> Extended:
    """The reference-grid rule of vision models: a grid is stretched over the one of the pretraining.

    The same as ``grid_positions(*grid, reference=reference)`` with the family as it is (EVA-02, timm's
    ``ref_feat_shape``), up to rounding; it is for positions that are made elsewhere.

    Parameters
    ----------
    family
        Any family with fixed frequencies.
    grid, reference
        The grid of the positions and that of the pretraining, (height, width) or (frames, height, width).

    Examples
    --------
    >>> from axial_rope import Axial
    >>> reference_grid(Axial(head_dim=4, base=16.0), grid=(28, 7), reference=(14, 14)).frequencies()
    tensor([[0.5000, 0.0000],
            [0.0000, 2.0000]])
    """
    if len(grid) != family.columns or len(reference) != family.columns:
        raise ValueError(
            f"grid and reference must have the family's {family.columns} axes: got {tuple(grid)} and {tuple(reference)}"
        )
    if min(*grid, *reference) < 1:
        raise ValueError(
            f"grid and reference must have at least one cell on every axis: got {tuple(grid)} and {tuple(reference)}"
        )
    return interpolate(family, [n / r for n, r in zip(grid, reference, strict=True)])


def ntk(family: Family, factor: PerAxis) -> Extended:
    """NTK-aware scaling: the base is raised so that the slowest frequency of an axis is divided by its factor.

    The fastest stays as it is, those between are stretched progressively: ``base * factor ** (d / (d - 2))`` for d = 2 n
    channels, as in lucidrains' ``theta_rescale_factor`` and HunyuanVideo.

    Parameters
    ----------
    family
        With geometric series: `Axial`, `MRope`, `Periods` with a base or a range.
    factor
        One number, or one per column (t, y, x).

    Raises
    ------
    TypeError
        If the frequencies are learned.
    ValueError
        If the series of an axis isn't geometric or has less than two frequencies, or a factor isn't positive.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> ntk(Axial(head_dim=4, axes=1, base=16.0), factor=2.0).frequencies()
    tensor([[1.0000, 0.1250]])
    """
    return _extend(family, _factors(family, factor), lambda f, row: Ntk(f))


def dynamic_ntk(family: Family, factor: PerAxis, *, length: PerAxis, original_length: PerAxis) -> Extended:
    """NTK-aware scaling by as much as a length asks for: ``factor * length / original_length - (factor - 1)``.

    Up to the original length nothing changes. The length is an argument: unlike in the references, where the table grows
    with the longest sequence seen, the result doesn't depend on earlier calls.

    Parameters
    ----------
    family
        As for `ntk`.
    factor
        One number, or one per column (t, y, x).
    length, original_length
        Of the present input and of the training, in units of position; one number each, or one per column.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> family = Axial(head_dim=4, axes=1, base=16.0)
    >>> dynamic_ntk(family, 2.0, length=100, original_length=100).frequencies()
    tensor([[1.0000, 0.2500]])
    >>> dynamic_ntk(family, 2.0, length=150, original_length=100).frequencies()
    tensor([[1.0000, 0.1250]])
    """
    lengths, originals = _factors(family, length, "length"), _factors(family, original_length, "original_length")
    triples = zip(_factors(family, factor), lengths, originals, strict=True)
    return _extend(family, [f * max(n / o, 1.0) - (f - 1) for f, n, o in triples], lambda f, row: Ntk(f))


def yarn(
    family: Family,
    factor: PerAxis,
    original_length: PerAxis,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> Extended:
    """YaRN (arXiv 2309.00071): slow pairs are interpolated, fast ones left, and the scores sharpened.

    Pairs that make less than `beta_slow` turns over the original length have their frequency divided by `factor`, those
    with more than `beta_fast` turns keep it, and a linear ramp over the pairs lies in between. Cosines and sines are
    multiplied by ``s = 0.1 ln(factor) + 1``, and scores thereby by its square.

    Parameters
    ----------
    family
        With geometric series: `Axial`, `MRope`, `Periods` with a base or a range.
    factor
        One number, or one per column (t, y, x). With several, the pairs of each axis have the scale of their own factor.
    original_length
        Extent of the positions in training; one number, or one per column.
    beta_fast, beta_slow
        Turns over the original length that bound the ramp. As in the references, nothing is slowed over lengths below 2 pi
        units, on which not even the first pair makes a turn: interpolate there.
    truncate
        Whether the ends of the ramp are rounded outwards to whole pairs.
    attention_factor
        The scale s itself.
    mscale, mscale_all_dim
        DeepSeek's: with both, s is ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)``.

    Raises
    ------
    TypeError
        If the frequencies are learned.
    ValueError
        If the series of an axis isn't geometric, or a factor or length isn't positive.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> longer = yarn(Axial(head_dim=8, axes=1), factor=4.0, original_length=2048)
    >>> longer.frequencies()
    tensor([[1.0000e+00, 1.0000e-01, 6.2500e-03, 2.5000e-04]])
    >>> round(longer.scale, 4)
    1.1386
    """
    originals = _factors(family, original_length, "original_length")

    def rule(f: float, row: int) -> Yarn:
        scale = attention_factor
        if scale is None and mscale and mscale_all_dim:
            scale = _sharpening(f, mscale) / _sharpening(f, mscale_all_dim)
        scale = _sharpening(f, 1.0) if scale is None else scale
        return Yarn(f, originals[row], beta_fast, beta_slow, truncate, scale)

    return _extend(family, _factors(family, factor), rule)


def llama3(
    family: Family,
    factor: PerAxis = 8.0,
    original_length: PerAxis = 8192.0,
    *,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Extended:
    """Llama 3.1's scaling: waves longer than the training are interpolated, short ones left, and a blend in between.

    With the wave ``w = 2 pi / f`` and the original length L: ``f / factor`` where ``w > L / low_freq_factor``, ``f`` where
    ``w < L / high_freq_factor``, else ``(1 - k) f / factor + k f`` with
    ``k = (L / w - low_freq_factor) / (high_freq_factor - low_freq_factor)``.

    Parameters
    ----------
    family
        Any family with fixed frequencies.
    factor, original_length
        One number each, or one per column (t, y, x).
    low_freq_factor, high_freq_factor
        Bounds of the blend, in turns over the original length; equal ones (Llama 4) leave none.

    Raises
    ------
    ValueError
        If a number isn't positive, or the bounds are in the wrong order.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> llama3(Axial(head_dim=8, axes=1), factor=2.0, original_length=1000.0).frequencies()
    tensor([[1.0000e+00, 1.0000e-01, 5.9859e-03, 5.0000e-04]])
    """
    if not 0 < low_freq_factor <= high_freq_factor:
        raise ValueError(
            f"low_freq_factor must be positive and at most high_freq_factor={high_freq_factor}: got {low_freq_factor}"
        )
    originals = _factors(family, original_length, "original_length")
    return _extend(
        family, _factors(family, factor), lambda f, row: Llama3(f, originals[row], low_freq_factor, high_freq_factor)
    )


def longrope(
    family: Family,
    short_factors: Sequence[float] | Sequence[Sequence[float] | None],
    long_factors: Sequence[float] | Sequence[Sequence[float] | None],
    *,
    length: float,
    original_length: float,
    factor: float,
    attention_factor: float | None = None,
) -> Extended:
    """LongRoPE (arXiv 2402.13753): every frequency has a factor of its own, from a search over a trained model.

    The cosines and sines are multiplied by ``s = sqrt(1 + ln(factor) / ln(original_length))``.

    Parameters
    ----------
    family
        Any family with fixed frequencies.
    short_factors, long_factors
        One number per frequency of the series, the same for every axis; or one list (or None) per column (t, y, x).
    length
        Of the present input. The long factors serve where it is greater than `original_length`, for all positions.
    original_length
        Of the training.
    factor
        Longest length of the stretched model over `original_length`.
    attention_factor
        The scale s itself.

    Raises
    ------
    ValueError
        If there isn't a positive factor for each frequency.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> family = Axial(head_dim=4, axes=1)
    >>> longrope(family, [1.0, 1.0], [2.0, 8.0], length=5000, original_length=4096, factor=32).frequencies()
    tensor([[0.5000, 0.0012]])
    """
    chosen = long_factors if length > original_length else short_factors
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))
    per_axis = any(entry is None or isinstance(entry, Sequence) for entry in chosen)
    lists = list(chosen) if per_axis else [chosen] * family.columns
    if len(lists) != family.columns:
        raise ValueError(f"factors must be one list per axis: got {len(lists)} lists for {family.columns} axes")
    return Extended(family, [None if entry is None else LongRope(entry, attention_factor) for entry in lists])  # type: ignore[arg-type]


def proportional(family: Family, part: float, factor: PerAxis = 1.0) -> Extended:
    """Only the first `part` of the frequencies of each axis turns (Gemma 4's text layers); the others are 0.

    Unlike a partial rotation, whose series ends at its last rotated pair, the series and the layout are those of the whole.

    Parameters
    ----------
    family
        Any family with fixed frequencies.
    part
        Between 0 and 1; ``int(part * n)`` frequencies of n are kept.
    factor
        They are divided by this; one number, or one per column (t, y, x).

    Examples
    --------
    >>> from axial_rope import Axial
    >>> proportional(Axial(head_dim=8, axes=1, base=16.0), part=0.5).frequencies()
    tensor([[1.0000, 0.5000, 0.0000, 0.0000]])
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part must be between 0 and 1: got {part}")
    return Extended(family, [Proportional(part, f) for f in _factors(family, factor)])


def turns(family: Family, positions: Tensor) -> Tensor:
    """Full turns that each pair makes between the first and the last of the positions on each axis.

    Parameters
    ----------
    family
        Any family.
    positions
        (tokens, axes) or (batch, tokens, axes), for example ``grid_positions(14, 14)``.

    Returns
    -------
    Tensor
        Of the shape of the family's table, (axes, pairs) for fixed frequencies; 0 where a pair doesn't belong to an axis.

    Examples
    --------
    >>> from axial_rope import Periods, centered_positions
    >>> turns(Periods(head_dim=8, base=100.0), centered_positions(16, 16))
    tensor([[1.8750, 0.1875, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.8750, 0.1875]])
    """
    if positions.shape[-1] != family.columns:
        raise ValueError(f"positions must have the family's {family.columns} columns: got {positions.shape[-1]}")
    flat = positions.detach().reshape(-1, family.columns).to("cpu", torch.float32)
    extent = flat.amax(dim=0) - flat.amin(dim=0)  # (axes,)
    table = family.frequencies()
    return table.abs() * extent.reshape(-1, *[1] * (table.dim() - 1)) / (2 * math.pi)


def unseen(family: Family, trained: Tensor, positions: Tensor) -> Tensor:
    """Pairs that `positions` take to angles between tokens that `trained` never showed.

    A pair that made a full turn in training has shown every angle. One that didn't is taken out of range by any longer
    extent: those are the pairs that `yarn` interpolates.

    Parameters
    ----------
    family
        Any family; the same for both, or wrap `positions` in the rule that stretches them.
    trained, positions
        Positions of the training grid and of the new one.

    Returns
    -------
    Tensor
        bool, of the shape of the family's table.

    Examples
    --------
    >>> from axial_rope import Axial, grid_positions
    >>> unseen(Axial(head_dim=8, base=100.0), grid_positions(14, 14), grid_positions(14, 28))
    tensor([[False, False, False, False],
            [False, False, False,  True]])
    """
    before, now = turns(family, trained), turns(family, positions)
    return (before < 1) & (now > before * (1 + 1e-6))


def _sharpening(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _factors(family: Family, value: PerAxis, name: str = "factor") -> list[float]:
    """One positive number per column."""
    values = [float(value)] * family.columns if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) != family.columns:
        raise ValueError(f"{name} must be one number or one per axis: got {len(values)} for {family.columns} axes")
    check_positive(name, *values)
    return values


def _extend(family: Family, factors: Sequence[float], rule: Callable[[float, int], Rule]) -> Extended:
    """`family` with the rule of each column, none where its factor is 1 and another column's isn't."""
    alone = len(set(factors)) == 1
    return Extended(family, [rule(f, row) if alone or f != 1 else None for row, f in enumerate(factors)])
