"""Random positions for training."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def augment_positions(
    positions: Tensor,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Positions that are shifted and stretched at random: DINOv3's augmentation, for use in training alone.

    In this order, each only where it is given, and one draw for all tokens: a shift of each axis by ``U(-shift, shift)``,
    a factor for each axis of ``exp U(-ln jitter, ln jitter)``, and one factor for all axes of
    ``exp U(-ln rescale, ln rescale)``. The numbers are drawn in the order of the reference
    (facebookresearch/dinov3, layers/rope_position_encoding.py), on the device of the positions, so that one seed gives the
    same positions in both. DINOv3 was trained with ``rescale=2.0``.

    A rotary ViT asks for positions in every forward pass, so in training its rule is replaced and put back for evaluation::

        vit.rope_positions = lambda *grid, device: augment_positions(centered_positions(*grid, device=device), rescale=2.0)

    Parameters
    ----------
    positions
        float, (tokens, axes) or (batch, tokens, axes), usually from `centered_positions`.
    shift
        Largest shift, in units of position.
    jitter, rescale
        Largest factor, at least 1.
    generator
        Source of the random numbers; the global one of the device by default.

    Returns
    -------
    Tensor
        New positions of the same shape.

    Raises
    ------
    ValueError
        If `shift` is negative, or `jitter` or `rescale` is less than 1.

    Examples
    --------
    >>> from axial_rope import centered_positions
    >>> _ = torch.manual_seed(0)
    >>> augment_positions(centered_positions(1, 2), rescale=2.0)
    tensor([[ 0.0000, -0.4974],
            [ 0.0000,  0.4974]])
    """
    if shift is not None and shift < 0:
        raise ValueError(f"shift must not be negative: got {shift}")
    for name, factor in (("jitter", jitter), ("rescale", rescale)):
        if factor is not None and factor < 1:
            raise ValueError(f"{name} must be at least 1: got {factor}")

    def draw(count: int, bound: float) -> Tensor:
        empty = torch.empty(count, dtype=positions.dtype, device=positions.device)
        return empty.uniform_(-bound, bound, generator=generator)

    axes = positions.shape[-1]
    if shift is not None:
        positions = positions + draw(axes, shift)
    if jitter is not None:
        positions = positions * draw(axes, math.log(jitter)).exp()
    if rescale is not None:
        positions = positions * draw(1, math.log(rescale)).exp()
    return positions
