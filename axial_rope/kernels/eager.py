"""Rotation of memory, without autograd: the backend of eager PyTorch.

On the CPU an interleaved head is multiplied as complex numbers, through a view of its own memory: the view lives for one
multiplication and is never stored or handed on. Low precision goes through a float32 buffer that stays in the cache. Other
devices, and the other layouts, have real arithmetic.

To the bit: PyTorch's complex product multiplies and adds in the body of its vector loop, and may fuse the two in the tail.
Rows of a multiple of 16 pairs have no tail; what is over is left to real arithmetic, which rounds after each operation. So
all results are those of plain arithmetic, however the memory is cut; but for the few rows that are cut where the work is
dealt to several threads. Then low precision does on a buffer what float32 does in one go, on the same strides, so that the
cuts fall on the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from axial_rope.kernels import plain
from axial_rope.kernels.layouts import Table, pair_views

__all__ = ["correlate", "in_place", "turn_into"]

BUFFER_BYTES = 1 << 20  # half of a small L2 cache


def in_place(x: Tensor, table: Table) -> bool:
    """Whether to turn a projection in its own memory, rather than into memory of its own.

    Attention in low precision on the CPU gains more from q and k without gaps than their way there costs.
    """
    return x.device.type == "cpu" and x.dtype == table.wide(x)


def turn_into(target: Tensor, source: Tensor, table: Table, *, inverse: bool = False) -> None:
    """Write `source`, turned, into `target`; both (..., N, head_dim) of one dtype, apart in memory or the same tensor."""
    if target is not source:
        for goal, x in zip(table.kept(target), table.kept(source), strict=True):
            goal.copy_(x)
    goal = table.turned(target)
    x = goal if target is source else table.turned(source)
    if x.device.type != "cpu":
        goal.copy_(plain.turn_tokens(x, table.inverse() if inverse else table))
        return
    wide = table.wide(x)
    factors = _factors(table, wide, inverse)
    as_complex = table.layout == "interleaved"
    if x.dtype == wide and not (as_complex and not (has_complex_view(x) and has_complex_view(goal))):
        _turn_wide(goal, x, factors, table)
        return
    for part, of_x, *of_factors in _chunks(goal, x, factors, table, wide):
        buffer = of_x.to(wide, copy=True)
        if as_complex and not has_complex_view(buffer):
            buffer = buffer.clone(memory_format=torch.contiguous_format)
        _turn_wide(buffer, buffer, of_factors, table)
        part.copy_(buffer)


def _factors(table: Table, wide: torch.dtype, inverse: bool) -> tuple[Tensor, ...]:
    if table.layout == "interleaved":
        return (complex_table(table.cos, table.sin, wide, inverse),)
    return table.cos.to(wide), -table.sin.to(wide) if inverse else table.sin.to(wide)


def _turn_wide(goal: Tensor, x: Tensor, factors: Sequence[Tensor], table: Table) -> None:
    """`x` turned into `goal`, both in the wide dtype."""
    start, width = 0, table.width
    if table.layout == "interleaved":
        table_pairs, start = factors[0], width - width % 32
        if start:
            pairs = complex_view(x, start)
            goal_pairs = pairs if goal is x else complex_view(goal, start)
            torch.mul(pairs, table_pairs[..., : start // 2], out=goal_pairs)
        cos, sin = torch.view_as_real(table_pairs[..., start // 2 :]).unbind(-1) if start < width else (None, None)
    else:
        cos, sin = factors
    if cos is not None and sin is not None:
        _turn_real(goal[..., start:width], x[..., start:width], cos, sin, table)
    if width < x.shape[-1] and goal is not x:
        goal[..., width:].copy_(x[..., width:])


def _turn_real(goal: Tensor, x: Tensor, cos: Tensor, sin: Tensor, table: Table) -> None:
    goals, members = (pair_views(tensor, table.layout, table.split) for tensor in (goal, x))
    for (goal_a, goal_b, pairs), (a, b, _) in zip(goals, members, strict=True):
        across_a, across_b = b * sin[..., pairs], a * sin[..., pairs]
        torch.mul(a, cos[..., pairs], out=goal_a).sub_(across_a)
        torch.mul(b, cos[..., pairs], out=goal_b).add_(across_b)


def correlate(y: Tensor, gradient: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Sums of ``y_i g_i + y_j g_j`` and of ``y_i g_j - y_j g_i`` for each entry of the table, in the wide dtype.

    `y` and its `gradient` are (..., N, head_dim); the sums run over what the table broadcasts over. The second is the
    gradient of the angle.
    """
    y, gradient = table.turned(y)[..., : table.width], table.turned(gradient)[..., : table.width]
    wide = table.wide(y)
    if y.device.type != "cpu" or table.layout != "interleaved":
        return plain.correlate(y.to(wide), gradient.to(wide), table)
    total = torch.zeros(table.cos.shape, dtype=wide.to_complex(), device=y.device)
    for of_y, of_gradient, part in _chunks(y, gradient, (total,), table, wide):
        # The conjugate is a pass over a chunk in the cache; PyTorch's lazy conjugate would make one of its own.
        product = complex_view(_viewable(of_y, wide)).conj_physical()
        product.mul_(complex_view(_viewable(of_gradient, wide)))
        part.add_(product.sum_to_size(part.shape))
    return total.real, total.imag


def complex_table(cos: Tensor, sin: Tensor, wide: torch.dtype, inverse: bool = False) -> Tensor:
    """``cos + i sin``, or its conjugate; the table's own memory where that holds both by turns."""
    if not inverse and cos.dtype == sin.dtype == wide and _by_turns(cos, sin):
        return torch.view_as_complex(torch.as_strided(cos, (*cos.shape, 2), (*cos.stride(), 1)))
    return torch.complex(cos.to(wide), -sin.to(wide) if inverse else sin.to(wide))


def _by_turns(cos: Tensor, sin: Tensor) -> bool:
    """Whether the memory is cos, sin, cos, sin, ..., as in a complex table."""
    return bool(
        sin.data_ptr() == cos.data_ptr() + cos.element_size()
        and cos.stride() == sin.stride()
        and cos.stride(-1) == 2
        and cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
        and cos.storage_offset() % 2 == 0
        and all(stride % 2 == 0 for stride in cos.stride())
    )


def complex_view(x: Tensor, width: int | None = None) -> Tensor:
    """The first `width` channels of (..., D) as complex numbers, (..., width / 2), in the same memory."""
    if width is not None and width < x.shape[-1]:
        x = x[..., :width]
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))


def has_complex_view(x: Tensor) -> bool:
    even = all(stride % 2 == 0 for stride in x.stride()[:-1])
    return bool(even and x.stride(-1) == 1 and x.storage_offset() % 2 == 0)


def _viewable(x: Tensor, wide: torch.dtype) -> Tensor:
    x = x.to(wide)
    return x if has_complex_view(x) else x.clone(memory_format=torch.contiguous_format)


def _chunks(
    target: Tensor, source: Tensor, factors: Sequence[Tensor], table: Table, wide: torch.dtype
) -> Iterator[tuple[Tensor, ...]]:
    """Parts of both tensors and of the factors that fit in the cache: some samples, or some tokens of one sample."""
    total = source.numel() * wide.itemsize
    is_cut = table.layout == "interleaved" and torch.get_num_threads() > 1
    if total <= BUFFER_BYTES or is_cut:
        yield target, source, *factors
    elif source.dim() > 2 and source.shape[0] > 1:
        step = max(1, BUFFER_BYTES * source.shape[0] // total)
        for start in range(0, source.shape[0], step):
            samples = slice(start, start + step)
            own = [part[samples] if part.dim() == source.dim() and part.shape[0] > 1 else part for part in factors]
            yield from _chunks(target[samples], source[samples], own, table, wide)
    else:
        step = max(1, BUFFER_BYTES * source.shape[-2] // total)
        for start in range(0, source.shape[-2], step):
            tokens = slice(start, start + step)
            yield target[..., tokens, :], source[..., tokens, :], *(part[..., tokens, :] for part in factors)
