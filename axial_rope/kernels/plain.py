"""Plain real arithmetic: what compilers, exporters, tracers and transforms see, and any device can do."""

from __future__ import annotations

import torch
from torch import Tensor

from axial_rope.kernels.layouts import Table, channels, join_pairs, split_pairs

__all__ = ["angle_gradient", "turn", "turn_packed", "turn_tokens"]


def turn(x: Tensor, table: Table) -> Tensor:
    """`x`, (..., prefix + N + suffix, head_dim), turned by a table that broadcasts against (..., N, P), in a new tensor."""
    turned = turn_tokens(table.turned(x), table)
    if not table.prefix and not table.suffix:
        return turned
    kept = table.kept(x)
    return torch.cat([kept[0], turned, kept[-1]][0 if table.prefix else 1 : 3 if table.suffix else 2], dim=-2)


def turn_tokens(x: Tensor, table: Table) -> Tensor:
    """Every token of `x` turned.

    The cast to the wide dtype comes before the pairs are taken apart, and the rounding before they are put together: so
    Inductor makes one kernel of it.
    """
    wide, width = table.wide(x), table.width
    cos, sin = table.cos.to(wide), table.sin.to(wide)
    members = channels(x, 0, width).to(wide)
    a, b = split_pairs(members, table.layout, table.split)
    turned = join_pairs((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), table.layout, table.split)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def turn_packed(qkv: Tensor, table: Table, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, 3 heads head_dim) -> q and k turned, and v: (B, heads, N, head_dim)."""
    # Inductor likes this order better than a permute followed by unbind(0).
    q, k, v = (part.transpose(1, 2) for part in torch.unflatten(qkv, -1, (3, heads, -1)).unbind(2))
    return turn(q, table), turn(k, table), v


def angle_gradient(y: Tensor, gradient: Tensor, table: Table) -> Tensor:
    """Sums of ``y_i g_j - y_j g_i`` for each entry of the table, from all pairs, (..., N, 2 P); see `autograd`."""
    y_a, y_b = split_pairs(y, table.layout, table.split)
    g_a, g_b = split_pairs(gradient, table.layout, table.split)
    return (y_a * g_b - y_b * g_a).sum_to_size(table.cos.shape)
