"""What one rotation per token can't hold: four schemes of the field that do something else than rotate, or something more.

rotate_vjepa2      the two members of a pair turn by different angles      V-JEPA 2
xpos               a decay beside the rotation, inverse on the keys        xPos
pool_keys          keys are averaged after they were rotated               EfficientTAM
linear_attention   only the numerator is rotated                           RoFormer, section 3.3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor
from torch.nn import functional as F

from axial_rope.rotation import Rotation, check_rotation, rotate

__all__ = ["linear_attention", "pool_keys", "rotate_vjepa2", "xpos"]


def rotate_vjepa2(x: Tensor, rotation: Rotation, *, prefix_tokens: int = 0, suffix_tokens: int = 0) -> Tensor:
    """V-JEPA 2's pairs: kept for its checkpoints, and for nothing else.

    Its code pairs adjacent channels but lists the angles as for halves. On an axis with angles a0 a1 a2 a3:

        channels   x0 x1   x2 x3   x4 x5   x6 x7
        angles     a0 a1   a2 a3   a0 a1   a2 a3       out0 = x0 cos a0 - x1 sin a0
                                                       out1 = x1 cos a1 + x0 sin a1

    The members of a pair turn by different angles, so lengths change (by 14 to 24 % in the released model) and scores
    don't depend on differences of positions alone. The authors call it a fault that the weights were trained with. To train
    anew, use `rotate` with the same rotation.

    Parameters
    ----------
    x
        (..., N, head_dim); any floating dtype. The arithmetic is float32, with one rounding at the end; the reference makes
        the angles in the dtype of `x`.
    rotation
        From the family and positions of `axial_rope.presets.vjepa2`: interleaved, a band of pairs for each of t, y and x.
    prefix_tokens, suffix_tokens
        Tokens at the start and the end that are returned as they are.

    Returns
    -------
    Tensor
        Of the shape and dtype of `x`.

    Raises
    ------
    ValueError
        If `x` doesn't fit the rotation, or the layout isn't "interleaved".

    Examples
    --------
    >>> from axial_rope import RotaryEmbedding, presets
    >>> family, positions, _ = presets.vjepa2(head_dim=64)
    >>> rotation = RotaryEmbedding(family)(positions(2, 5, 7))
    >>> rotate_vjepa2(torch.randn(1, 2, 70, 64), rotation).shape
    torch.Size([1, 2, 70, 64])
    """
    check_rotation(x, rotation, prefix_tokens, suffix_tokens)
    if rotation.layout != "interleaved":
        raise ValueError(f'layout must be "interleaved" for the pairs of V-JEPA 2: got {rotation.layout!r}')
    end, width = x.shape[-2] - suffix_tokens, 2 * rotation.pairs
    turned = x[..., prefix_tokens:end, :width].float()
    cos, sin = (
        torch.cat(
            [repeat(band, "... p -> ... (two p)", two=2) for band in torch.split(table, list(rotation.split), dim=-1)],
            dim=-1,
        )
        for table in (rotation.cos, rotation.sin)
    )  # (N, 2 P), one angle per channel
    a, b = turned[..., 0::2], turned[..., 1::2]
    across = torch.stack([-b, a], dim=-1).flatten(-2)  # (..., N, 2 P)
    out = x.clone()
    out[..., prefix_tokens:end, :width] = (turned * cos + across * sin).to(x.dtype)
    return out


def xpos(rotation: Rotation, positions: Tensor, *, center: float, scale_base: float = 512.0) -> tuple[Rotation, Rotation]:
    """xPos (arXiv 2212.10554): queries grow and keys shrink with their position, so that scores decay with distance.

    Pair i of P is scaled by ``zeta_i ** ((n - center) / scale_base)`` in queries and by the inverse in keys, with
    ``zeta_i = (i / P + 0.4) / 1.4``. The score of a query at m and a key at n then has the factor
    ``zeta_i ** ((m - n) / scale_base)``, whatever the centre; it only keeps the numbers small. Meant for causal attention.

    Parameters
    ----------
    rotation
        Of N tokens.
    positions
        (N,): the positions of these tokens in the sequence.
    center
        The same for queries and keys, also where keys come from a cache. lucidrains' rotary-embedding-torch takes
        ``length // 2``.
    scale_base
        Distance over which the scale changes by one power of zeta.

    Returns
    -------
    queries, keys : Rotation
        For `rotate` and `RotaryAttention`.

    Raises
    ------
    ValueError
        If there isn't one position per token of the rotation.

    Examples
    --------
    >>> from axial_rope import Axial, RotaryEmbedding, grid_positions
    >>> rotation = RotaryEmbedding(Axial(head_dim=4, axes=1))(grid_positions(3))
    >>> queries, keys = xpos(rotation, torch.arange(3), center=1, scale_base=2.0)
    >>> (queries.cos[2] * keys.cos[2]).equal(rotation.cos[2] ** 2)
    True
    """
    if positions.shape != (rotation.tokens,):
        raise ValueError(f"positions must be one per token, ({rotation.tokens},): got {tuple(positions.shape)}")
    share = torch.arange(rotation.pairs, dtype=torch.float32, device=rotation.cos.device) / rotation.pairs
    zeta = (share + 0.4) / 1.4
    power = (positions.to(zeta.device, torch.float32) - center) / scale_base
    scale = zeta ** power[:, None]  # (N, P)
    queries = replace(rotation, cos=rotation.cos * scale, sin=rotation.sin * scale)
    keys = replace(rotation, cos=rotation.cos / scale, sin=rotation.sin / scale)
    return queries, keys


def pool_keys(
    keys: Tensor, values: Tensor, grid: Sequence[int], *, pool: int = 2, suffix_tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """EfficientTAM's shorter memory: rotated keys, and values, averaged over blocks of ``pool x pool`` cells.

    An average of rotated keys is no rotation of anything, so this comes after `rotate`. A pooled key stands for
    ``pool ** 2`` keys; the logarithm of that is added to its scores (EfficientTAM's first variant, with ``log_size[None]``
    as the mask of the attention), or to every channel of it (the second: ``keys + log_size[:, None]``).

    Parameters
    ----------
    keys, values
        (..., M, head_dim): whole frames of the grid, then `suffix_tokens`.
    grid
        (height, width) of a frame, each a multiple of `pool`.
    pool
        Cells along each side of a block.
    suffix_tokens
        Tokens at the end (object pointers) that are left as they are.

    Returns
    -------
    keys, values : Tensor
        (..., M', head_dim).
    log_size : Tensor
        (M',): ``ln(pool ** 2)`` for pooled keys and 0 for the suffix.

    Raises
    ------
    ValueError
        If the grid isn't a multiple of `pool`, or the keys aren't whole frames.

    Examples
    --------
    >>> keys, values, log_size = pool_keys(torch.randn(1, 2, 35, 8), torch.randn(1, 2, 35, 8), (4, 4), suffix_tokens=3)
    >>> keys.shape, log_size.shape
    (torch.Size([1, 2, 11, 8]), torch.Size([11]))
    """
    height, width = grid
    if height % pool or width % pool:
        raise ValueError(f"grid must be a multiple of pool={pool} on both axes: got {(height, width)}")
    cells = keys.shape[-2] - suffix_tokens
    if cells < 0 or cells % (height * width) or values.shape[-2] != keys.shape[-2]:
        raise ValueError(
            f"keys and values must hold whole frames of grid {(height, width)} = {height * width} tokens followed by "
            f"suffix_tokens={suffix_tokens}: got {keys.shape[-2]} and {values.shape[-2]} tokens"
        )

    def pooled(x: Tensor) -> Tensor:
        blocks = reduce(
            x[..., :cells, :],
            "... (t h i w j) d -> ... (t h w) d",
            "mean",
            h=height // pool,
            w=width // pool,
            i=pool,
            j=pool,
        )
        return torch.cat([blocks, x[..., cells:, :]], dim=-2)

    shorter = pooled(keys)
    log_size = torch.zeros(shorter.shape[-2], dtype=keys.dtype, device=keys.device)
    log_size[: cells // pool**2] = math.log(pool**2)
    return shorter, pooled(values), log_size


def linear_attention(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, key_rotation: Rotation | None = None) -> Tensor:
    """Linear attention with rotary positions (RoFormer, arXiv 2104.09864, section 3.3).

        out_m = sum_n (R_m f(q_m)) . (R_n f(k_n)) v_n  /  sum_n f(q_m) . f(k_n)         f(x) = elu(x) + 1

    Only the numerator is rotated: rotated features can be negative, and a sum of them could come near zero. The weights
    therefore don't add up to 1.

    Parameters
    ----------
    q, k, v
        (B, H, N, head_dim), (B, H, M, head_dim) and (B, H, M, C).
    rotation, key_rotation
        Of the queries and of the keys, which have the queries' where theirs isn't given.

    Returns
    -------
    Tensor
        (B, H, N, C), in the dtype of `v` after float32 arithmetic; time and memory grow with N + M.

    Examples
    --------
    >>> from axial_rope import Axial, RotaryEmbedding, grid_positions
    >>> rotation = RotaryEmbedding(Axial(head_dim=8))(grid_positions(5, 7))
    >>> q, k, v = torch.randn(3, 1, 2, 35, 8)
    >>> linear_attention(q, k, v, rotation).shape
    torch.Size([1, 2, 35, 8])
    """
    dtype = v.dtype
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))  # sums over all keys leave float16
    q, k = F.elu(q) + 1, F.elu(k) + 1
    turned_q = rotate(q, rotation)
    turned_k = rotate(k, rotation if key_rotation is None else key_rotation)
    numerator = turned_q @ (rearrange(turned_k, "b h m d -> b h d m") @ v)  # (B, H, N, C)
    denominator = q @ reduce(k, "b h m d -> b h d 1", "sum")  # (B, H, N, 1)
    return (numerator / denominator).to(dtype)
