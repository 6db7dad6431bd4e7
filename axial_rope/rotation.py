"""The rotation itself: pairs of channels turned by angles, and the layouts that say which channels are pairs.

    angle[n, (head,) p] = sum over axes a of  position[n, a] * frequency[a, (head,) p]
    (x_i, x_j) -> (x_i cos - x_j sin,  x_j cos + x_i sin)         for the pair p = (i, j)

Layouts, drawn for a head of 8 channels with pairs 0 1 on y and 2 3 on x (a, b are the two members of a pair):

    interleaved     a0 b0  a1 b1  a2 b2  a3 b3      GPT-J, Llama, rope-vit, SAM 2, EVA-02
    half            a0 a1  a2 a3  b0 b1  b2 b3      GPT-NeoX, DINOv3, Qwen-VL, transformers
    half_per_axis   a0 a1  b0 b1  a2 a3  b2 b3      Gemma-4, Allegro
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from axial_rope import kernels
from axial_rope.kernels.layouts import split_pairs
from axial_rope.kernels.watched import is_watched

__all__ = ["Rotation", "angles", "layout_permutation", "pair_channels", "rotate", "rotate_packed"]

LAYOUTS = ("interleaved", "half", "half_per_axis")


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}: got {layout!r}")


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """The angle by which each pair of each token turns, in radians.

    Parameters
    ----------
    positions
        (N, A) or (B, N, A): N tokens on A axes, in B samples.
    frequencies
        (A, P), (A, H, P) or (A, L, H, P): P pairs, H heads, L blocks.

    Returns
    -------
    Tensor
        (N, P), (H, N, P) or (L, H, N, P) for positions without a batch; (B, 1, N, P), (B, H, N, P) or (L, B, H, N, P)
        with one. They broadcast against queries of shape (B, H, N, head_dim).

    Raises
    ------
    ValueError
        If the shapes aren't those, or `frequencies` have no row for each axis of `positions`.

    Notes
    -----
    Elementwise products: autocast leaves them in float32, which a matrix product would not be.

    Examples
    --------
    >>> angles(torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.5]])).tolist()
    [[2.0, 1.5]]
    """
    if positions.dim() not in (2, 3) or frequencies.dim() not in (2, 3, 4) or len(frequencies) != positions.shape[-1]:
        raise ValueError(
            f"frequencies must be (axes, [[blocks,] heads,] pairs), for positions (..., tokens, axes): "
            f"got {tuple(frequencies.shape)} for {tuple(positions.shape)}"
        )
    has_heads = frequencies.dim() > 2
    rows = (frequencies if has_heads else frequencies[:, None]).unsqueeze(-3)  # (A, 1, H, P) or (A, L, 1, H, P)
    if positions.dim() == 3 and rows.dim() == 5:
        rows = rows[:, :, None]  # (A, L, 1, 1, H, P)
    columns = positions.unbind(-1)  # A x (N,) or (B, N)
    total = columns[0][..., None, None] * rows[0]
    for column, row in zip(columns[1:], rows[1:], strict=True):
        total = total + column[..., None, None] * row
    # The heads of a token lie together in memory, as in q and k.
    return total.transpose(-3, -2) if has_heads or positions.dim() == 3 else total[:, 0]


def period_angles(positions: Tensor, periods: Tensor) -> Tensor:
    """The angle ``2 pi * position / period`` of each pair and token, in DINOv3's order of operations.

    Float32 rounds ``position * (2 pi / period)`` elsewhere, by up to 1e-5 at an angle of 100.

    Parameters
    ----------
    positions
        (N, A) or (B, N, A).
    periods
        (A, P), infinite where a pair doesn't turn along an axis.

    Returns
    -------
    Tensor
        (N, P) or (B, 1, N, P).

    Examples
    --------
    >>> period_angles(torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, torch.inf], [torch.inf, 2.0]])) / torch.pi
    tensor([[1.0000, 0.2500]])
    """
    around = 2 * math.pi * (positions if positions.dim() == 2 else positions[:, None])  # (N, A) or (B, 1, N, A)
    return torch.stack([around[..., axis, None] / row for axis, row in enumerate(periods)]).sum(dim=0)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines of the angles of every pair and token, ready to rotate queries and keys.

    Attributes
    ----------
    cos, sin
        float32, (N, P), (H, N, P), (B, 1, N, P) or (B, H, N, P): they broadcast against (B, H, N, head_dim). Made by a
        family with one table per block they have L in front, and `block` gives the rotation of one.
    head_dim
        Channels of the heads that it rotates; those from 2 P on are left as they are.
    layout
        Which channels are pairs, see `axial_rope.rotation`.
    split
        Pairs of each axis in the order in which they stand in the head (only "half_per_axis" depends on it).
    blocks
        Number of blocks whose tables stand in front, or None; `block` gives the rotation of one, which can rotate.

    Raises
    ------
    ValueError
        If `cos` and `sin` have different shapes, or don't fit `head_dim`, `split` and `blocks`, or `layout` is unknown.
    """

    cos: Tensor
    sin: Tensor
    head_dim: int
    layout: str = "interleaved"
    split: tuple[int, ...] = ()
    blocks: int | None = None
    # The angles, cos and sin, and how often each had been changed in place.
    _learned: tuple[tuple[Tensor, int], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if self.cos.shape != self.sin.shape or self.cos.dim() < 2:
            raise ValueError(
                f"cos and sin must have one shape, (..., tokens, pairs): got {tuple(self.cos.shape)} and "
                f"{tuple(self.sin.shape)}"
            )
        if self.head_dim % 2 or 2 * self.pairs > self.head_dim:
            raise ValueError(f"head_dim must be even and at least 2 * {self.pairs} pairs: got {self.head_dim}")
        if self.layout == "half_per_axis" and sum(self.split) != self.pairs:
            raise ValueError(f"split must hold the {self.pairs} pairs of cos and sin: got {self.split}")
        if self.blocks is not None and (self.cos.dim() < 3 or self.cos.shape[0] != self.blocks):
            raise ValueError(f"blocks must be the first size of cos and sin, {tuple(self.cos.shape)}: got {self.blocks}")

    @property
    def pairs(self) -> int:
        """Number of rotated pairs P."""
        return self.cos.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of rotated tokens N."""
        return self.cos.shape[-2]

    @property
    def angle(self) -> Tensor | None:
        """The angles, where they are learned and `from_angles` made the tables; else None.

        Gradients go to them directly, past `cos` and `sin`, at a fraction of the time and memory. ``dataclasses.replace``
        leaves them away, and so does a change of the angles, `cos` or `sin` in place. Compilers see `cos` and `sin` alone.
        """
        if not self._learned or torch.compiler.is_compiling():
            return None
        return self._learned[0][0] if all(part._version == version for part, version in self._learned) else None

    @classmethod
    def from_angles(
        cls,
        angle: Tensor,
        head_dim: int,
        layout: str = "interleaved",
        split: Sequence[int] = (),
        blocks: int | None = None,
    ) -> Rotation:
        """The rotation by given angles.

        Parameters
        ----------
        angle
            In radians, float32 or float64, in the shape of `cos` and `sin`: (N, P), (H, N, P), ... for N tokens, P pairs,
            H heads.
        head_dim, layout, split, blocks
            As for `Rotation`, which raises the other errors.

        Raises
        ------
        TypeError
            If `angle` is no tensor, or has another dtype: half precision can't tell large angles apart.

        Examples
        --------
        >>> Rotation.from_angles(torch.tensor([[0.0]]), head_dim=2).cos
        tensor([[1.]])
        """
        _check_tensor("angle", angle)
        if angle.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"angle must be float32 or float64: got {angle.dtype}")
        rotation = cls(*kernels.cos_sin(angle, layout), head_dim, layout, tuple(split), blocks)
        return rotation if is_watched(angle) else rotation._with_angle(angle)

    def inverse(self) -> Rotation:
        """The rotation by the negative angles."""
        angle = None if self.angle is None else -self.angle
        return replace(self, sin=-self.sin)._with_angle(angle)

    def block(self, index: int) -> Rotation:
        """The rotation of one block, from a table with blocks in front.

        Raises
        ------
        ValueError
            If it has no blocks.
        """
        self._check_blocks()
        return self._map(lambda table: table[index], blocks=None)

    def unbind(self) -> list[Rotation]:
        """The rotations of all blocks: one backward step for all, where `block` would add up gradients of the size of all.

        Raises
        ------
        ValueError
            If it has no blocks.
        """
        blocks, angle = self._check_blocks(), self.angle
        of_blocks = (None,) * blocks if angle is None else angle.unbind(0)
        tables = zip(self.cos.unbind(0), self.sin.unbind(0), of_blocks, strict=True)
        return [replace(self, cos=cos, sin=sin, blocks=None)._with_angle(angle) for cos, sin, angle in tables]

    def slice(self, start: int, stop: int) -> Rotation:
        """The rotation of the tokens start .. stop - 1, for a sequence that is cut over devices or in time."""
        return self._map(lambda table: table[..., start:stop, :])

    def _check_blocks(self) -> int:
        if self.blocks is None:
            raise ValueError("rotation must have blocks in front: got blocks=None")
        return self.blocks

    def _map(self, part: Callable[[Tensor], Tensor], **changes: Any) -> Rotation:
        mapped = replace(self, cos=part(self.cos), sin=part(self.sin), **changes)
        return mapped._with_angle(None if self.angle is None else part(self.angle))

    def _with_angle(self, angle: Tensor | None) -> Rotation:
        """Give the angle of its tables, if they are learned, to a rotation that nobody else has seen.

        It is no argument of the constructor, so that nobody replaces the tables alone.
        """
        if angle is not None and angle.requires_grad and self.cos.requires_grad:
            learned = tuple((tensor, tensor._version) for tensor in (angle, self.cos, self.sin))
            object.__setattr__(self, "_learned", learned)
        return self


def rotate(x: Tensor, rotation: Rotation, *, prefix_tokens: int = 0, suffix_tokens: int = 0) -> Tensor:
    """Queries or keys turned by a rotation.

    Parameters
    ----------
    x
        (..., N, head_dim), usually (B, H, N, head_dim): B samples, H heads, N tokens; any floating dtype.
    rotation
        Of ``N - prefix_tokens - suffix_tokens`` tokens.
    prefix_tokens, suffix_tokens
        Tokens at the start and the end (class, register, pointer tokens) that are returned as they are.

    Returns
    -------
    Tensor
        A new tensor of the shape, dtype and device of `x`. The arithmetic is float32 (or wider), with one rounding at the
        end: for float16 and bfloat16 the result is that of ``rotate(x.float(), ...).to(x.dtype)``, to the bit.

    Raises
    ------
    ValueError
        If `x` doesn't have the rotation's tokens, heads, samples and channels.
    TypeError
        If `x` isn't a real floating tensor.

    Examples
    --------
    >>> quarter = Rotation(cos=torch.tensor([[0.0]]), sin=torch.tensor([[1.0]]), head_dim=2, split=(1,))
    >>> rotate(torch.tensor([[1.0, 0.0]]), quarter)
    tensor([[0., 1.]])
    """
    check_rotation(x, rotation, prefix_tokens, suffix_tokens)
    return kernels.turn(x, _table(rotation, prefix_tokens, suffix_tokens))


def rotate_packed(
    qkv: Tensor,
    rotation: Rotation,
    heads: int,
    *,
    prefix_tokens: int = 0,
    suffix_tokens: int = 0,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, and values, from the projection that holds all three.

    Parameters
    ----------
    qkv
        (B, N, 3 * heads * head_dim): for each token the queries of all heads, the keys, the values, as ``nn.Linear``
        gives them in timm's and most ViTs.
    rotation
        Of ``N - prefix_tokens - suffix_tokens`` tokens.
    heads
        Attention heads H.
    prefix_tokens, suffix_tokens
        As for `rotate`.
    overwrite
        Give `qkv` up: the result may then be made in its memory, which is what makes the rotation nearly free. For a tensor
        that nothing else has seen, such as the output of a linear layer without hooks.

    Returns
    -------
    q, k, v
        (B, H, N, head_dim) each.

    Raises
    ------
    ValueError
        If `qkv` doesn't have the rotation's tokens, heads, samples and channels.
    TypeError
        If `qkv` isn't a real floating tensor.

    Examples
    --------
    >>> quarter = Rotation(cos=torch.tensor([[0.0]]), sin=torch.tensor([[1.0]]), head_dim=2, split=(1,))
    >>> q, k, v = rotate_packed(torch.arange(1.0, 7.0).view(1, 1, 6), quarter, heads=1)
    >>> q.tolist(), k.tolist(), v.tolist()
    ([[[[-2.0, 1.0]]]], [[[[-4.0, 3.0]]]], [[[[5.0, 6.0]]]])
    """
    _check_tensor("qkv", qkv)
    channels = 3 * heads * rotation.head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != channels:
        raise ValueError(
            f"qkv must have shape (batch, tokens, 3 * heads * head_dim = 3 * {heads} * {rotation.head_dim} = {channels}): "
            f"got {tuple(qkv.shape)}"
        )
    _check_fit("qkv", qkv, (qkv.shape[0], heads, qkv.shape[1]), rotation, prefix_tokens, suffix_tokens)
    return kernels.turn_packed(qkv, _table(rotation, prefix_tokens, suffix_tokens), heads, overwrite=overwrite)


def _table(rotation: Rotation, prefix_tokens: int, suffix_tokens: int) -> kernels.Table:
    split = tuple(rotation.split)
    return kernels.Table(rotation.cos, rotation.sin, rotation.layout, split, prefix_tokens, suffix_tokens, rotation.angle)


def check_rotation(x: Tensor, rotation: Rotation, prefix_tokens: int, suffix_tokens: int) -> None:
    """Raise unless `rotation` fits `x` of shape (..., N, head_dim)."""
    _check_tensor("x", x)
    if x.dim() < 2 or x.shape[-1] != rotation.head_dim:
        raise ValueError(f"x must have shape (..., tokens, head_dim={rotation.head_dim}): got {tuple(x.shape)}")
    _check_fit("x", x, tuple(x.shape[:-1]), rotation, prefix_tokens, suffix_tokens)


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor: got {type(x).__name__}")


def _check_fit(
    name: str, x: Tensor, size: tuple[int, ...], rotation: Rotation, prefix_tokens: int, suffix_tokens: int
) -> None:
    """Raise unless `x` is a real floating tensor and `rotation` fits the samples, heads and tokens ``size = (..., N)``."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a real floating tensor: got {x.dtype}")
    if rotation.blocks is not None:
        raise ValueError(f"rotation must be that of one block: got those of {rotation.blocks}, take rotation.block(index)")
    if prefix_tokens < 0 or suffix_tokens < 0:
        raise ValueError(f"prefix_tokens and suffix_tokens must not be negative: got {prefix_tokens} and {suffix_tokens}")
    tokens = size[-1] - prefix_tokens - suffix_tokens
    if tokens != rotation.tokens:
        raise ValueError(
            f"{name} must have prefix_tokens + {rotation.tokens} rotated + suffix_tokens tokens = "
            f"{prefix_tokens} + {rotation.tokens} + {suffix_tokens}: got {size[-1]} tokens"
        )
    lead, table = size[:-1], rotation.cos.shape[:-2]
    fits = len(table) <= len(lead) and all(t in (1, n) for t, n in zip(reversed(table), reversed(lead), strict=False))
    if not fits:
        raise ValueError(
            f"{name} must have the samples and heads of the rotation, {tuple(table)}: "
            f"got {tuple(lead)} from {tuple(x.shape)}"
        )


def pair_channels(layout: str, split: Sequence[int]) -> Tensor:
    """The channels (i, j) of each pair: int64, (P, 2).

    Examples
    --------
    >>> pair_channels("half_per_axis", (2, 2)).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    check_layout(layout)
    a, b = split_pairs(torch.arange(2 * sum(split), device="cpu"), layout, split)
    return torch.stack([a, b], dim=-1)


def layout_permutation(source: str, target: str, split: Sequence[int], head_dim: int) -> Tensor:
    """The order that turns channels of one layout into another: int64, (head_dim,).

    ``x[..., layout_permutation("half", "interleaved", split, head_dim)]`` has the pairs of `x` in interleaved order. The
    rows of a query or key projection, its bias and the weights of a query or key norm are permuted in the same way inside
    each head; scores then stay what they were. Values must not be permuted.

    Examples
    --------
    >>> layout_permutation("half", "interleaved", (2,), 6).tolist()
    [0, 2, 1, 3, 4, 5]
    """
    order = torch.arange(head_dim, device="cpu")
    order[pair_channels(target, split)] = pair_channels(source, split)
    return order
