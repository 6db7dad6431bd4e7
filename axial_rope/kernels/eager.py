"""Rotation of memory, without autograd: the backend of eager PyTorch.

On the CPU an interleaved head is multiplied as complex numbers, through a view of its own memory: the view lives for one
multiplication and is never stored or handed on. Low precision goes through a float32 buffer that stays in the cache. Other
devices, and the other layouts, have real arithmetic.

How a CPU kernel rounds the last bit may depend on where it finds its operands: in the body of its vector loop it multiplies
and adds, in the tail it may fuse the two. Here float32 and low precision do the same operation on the same chunks in the same
memory order, so that they agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from axial_rope.kernels import plain
from axial_rope.kernels.layouts import Table, pair_views

__all__ = ["correlate", "turn_into"]

CHUNK_BYTES = 1 << 20  # of the wide dtype, per thread: half of a small L2 cache, and enough work for one call


def turn_into(target: Tensor, source: Tensor, table: Table, *, inverse: bool = False) -> None:
    """Write `source`, turned, into `target`; both (..., N, head_dim) of one dtype, apart in memory or the same memory."""
    if target.data_ptr() != source.data_ptr():
        for goal, x in zip(table.kept(target), table.kept(source), strict=True):
            goal.copy_(x)
    target, source = table.turned(target), table.turned(source)
    if source.device.type != "cpu":
        target.copy_(plain.turn_tokens(source, table.inverse() if inverse else table))
        return
    wide = table.wide(source)
    factors = _factors(table, wide, inverse)
    complex_memory = table.layout == "interleaved"
    for goal, x, *part in _chunks(target, source, factors, wide):
        if x.dtype != wide or (complex_memory and not (_has_complex_view(x) and _has_complex_view(goal))):
            buffer = x.to(wide, copy=True)
            if complex_memory and not _has_complex_view(buffer):
                buffer = buffer.clone(memory_format=torch.contiguous_format)
            _turn_chunk(buffer, buffer, part, table)
            goal.copy_(buffer)
        else:
            _turn_chunk(goal, x, part, table)


def _factors(table: Table, wide: torch.dtype, inverse: bool) -> tuple[Tensor, ...]:
    if table.layout == "interleaved":
        return (complex_table(table.cos, table.sin, wide, inverse),)
    return table.cos.to(wide), -table.sin.to(wide) if inverse else table.sin.to(wide)


def _turn_chunk(goal: Tensor, x: Tensor, factors: Sequence[Tensor], table: Table) -> None:
    """`x` turned into `goal`, in the wide dtype."""
    width = table.width
    if table.layout == "interleaved":
        torch.mul(complex_view(x[..., :width]), factors[0], out=complex_view(goal[..., :width]))
    else:
        cos, sin = factors
        goals = pair_views(goal[..., :width], table.layout, table.split)
        members = pair_views(x[..., :width], table.layout, table.split)
        for (goal_a, goal_b, pairs), (a, b, _) in zip(goals, members, strict=True):
            across_a, across_b = b * sin[..., pairs], a * sin[..., pairs]
            torch.mul(a, cos[..., pairs], out=goal_a).sub_(across_a)
            torch.mul(b, cos[..., pairs], out=goal_b).add_(across_b)
    if width < x.shape[-1] and goal.data_ptr() != x.data_ptr():
        goal[..., width:].copy_(x[..., width:])


def correlate(y: Tensor, gradient: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Sums of ``y_i g_i + y_j g_j`` and of ``y_i g_j - y_j g_i`` for each entry of the table, in the wide dtype.

    `y` and its `gradient` are (..., N, head_dim); the sums run over what the table broadcasts over. The second is the
    gradient of the angle.
    """
    y, gradient = table.turned(y)[..., : table.width], table.turned(gradient)[..., : table.width]
    wide, shape = table.wide(y), table.cos.shape
    if y.device.type != "cpu" or table.layout != "interleaved":
        return plain.correlate(y.to(wide), gradient.to(wide), table)
    total = torch.zeros(shape, dtype=wide.to_complex(), device=y.device)
    for part_y, part_g, part in _chunks(y, gradient, (total,), wide):
        # The conjugate is a pass over a chunk in the cache; PyTorch's lazy conjugate would make one of its own.
        product = complex_view(_viewable(part_y, wide)).conj_physical()
        product.mul_(complex_view(_viewable(part_g, wide)))
        part.add_(product.sum_to_size(part.shape))
    return total.real, total.imag


def complex_table(cos: Tensor, sin: Tensor, wide: torch.dtype, inverse: bool = False) -> Tensor:
    """``cos + i sin``, of which `cos` and `sin` may already be the real and imaginary parts in memory."""
    interleaved = (
        not inverse
        and cos.dtype == sin.dtype == wide
        and cos.stride() == sin.stride()
        and cos.stride(-1) == 2
        and sin.data_ptr() == cos.data_ptr() + cos.element_size()
        and sin.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()
    )
    if interleaved:
        pairs = torch.as_strided(cos, (*cos.shape, 2), (*cos.stride(), 1))
        if _has_complex_view(pairs):
            return torch.view_as_complex(pairs)
    return torch.complex(cos.to(wide), -sin.to(wide) if inverse else sin.to(wide))


def complex_view(x: Tensor) -> Tensor:
    """(..., 2 P) real -> (..., P) complex, the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _has_complex_view(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


def _viewable(x: Tensor, wide: torch.dtype) -> Tensor:
    x = x.to(wide)
    return x if _has_complex_view(x) else x.clone(memory_format=torch.contiguous_format)


def _chunks(target: Tensor, source: Tensor, tables: Sequence[Tensor], wide: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """Parts of both tensors and of the tables that fit in the cache: some samples, or some tokens of one sample."""
    limit = CHUNK_BYTES * torch.get_num_threads()
    total = source.numel() * wide.itemsize
    if total <= limit:
        yield target, source, *tables
    elif source.dim() > 2 and source.shape[0] > 1:
        step = max(1, limit * source.shape[0] // total)
        for start in range(0, source.shape[0], step):
            samples = slice(start, start + step)
            parts = [
                table[samples] if table.dim() == source.dim() and table.shape[0] > 1 else table for table in tables
            ]
            yield from _chunks(target[samples], source[samples], parts, wide)
    else:
        step = max(1, limit * source.shape[-2] // total)
        for start in range(0, source.shape[-2], step):
            tokens = slice(start, start + step)
            yield (
                target[..., tokens, :],
                source[..., tokens, :],
                *(table[..., tokens, :] for table in tables),
            )
