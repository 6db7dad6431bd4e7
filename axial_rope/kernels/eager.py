"""Rotation of memory, without autograd: the backend of eager PyTorch.

On the CPU an interleaved head is multiplied as complex numbers, through a view of its own memory: the view lives for one
multiplication and is never stored or handed on. Low precision goes through a float32 buffer that stays in the cache. Other
devices, and the other layouts, have real arithmetic.

To the bit: PyTorch's complex product multiplies and adds in the body of its vector loop, and may fuse the two in the tail.
Rows of a multiple of 16 pairs without gaps have no tail; what is over is left to real arithmetic, which rounds after each
operation. So all results are those of plain arithmetic, however the memory is cut, except in the few rows that are cut where
the work is dealt to several threads. Then low precision does on a buffer what float32 does in one go, on the same strides,
so that the cuts fall on the same elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axial_rope.kernels import plain
from axial_rope.kernels.layouts import Table, channels, pair_views

__all__ = ["angle_gradient", "in_place", "turn_into"]

Factors = tuple[Tensor, ...]  # a complex table, or cosines and sines
Parts = list[tuple[Tensor, Tensor, Factors]]  # see `_parts`
BUFFER_BYTES = 1 << 20  # half of a small L2 cache


def in_place(x: Tensor, table: Table) -> bool:
    """Whether to turn a projection that autograd doesn't record in its own memory, rather than into memory of its own.

    Attention in low precision on the CPU gains more from q and k without gaps than their way there costs. Where autograd
    records that way would be longer, since v has to be copied as well: then nobody asks.
    """
    return x.device.type == "cpu" and x.dtype == table.wide(x)


def turn_into(target: Tensor, source: Tensor, table: Table) -> None:
    """Write `source`, turned, into `target`; both (..., N, head_dim) of one dtype, apart in memory or the same tensor."""
    if target is not source:
        for goal, x in zip(table.kept(target), table.kept(source), strict=True):
            goal.copy_(x)
    goal = table.turned(target)
    x = goal if target is source else table.turned(source)
    if x.device.type != "cpu":
        goal.copy_(plain.turn_tokens(x, table))
        return
    wide = table.wide(x)
    factors = _factors(table, wide)
    if x.dtype == wide and table.layout != "interleaved":
        for part, of_x, own_factors in _parts(goal, x, factors, BUFFER_BYTES // wide.itemsize):
            _wide_turn(part, of_x, own_factors, table)()  # several passes over memory, which stays in the cache
    elif x.dtype == wide and has_complex_view(x) and (goal is x or has_complex_view(goal)):
        _wide_turn(goal, x, factors, table)()
    else:
        _turn_in_buffer(goal, x, factors, table)


def _turn_in_buffer(goal: Tensor, x: Tensor, factors: Factors, table: Table) -> None:
    """`x` turned into `goal`, part by part, through a buffer in the wide dtype.

    New memory, and views of it, for each part would take as long as the rotation.
    """
    is_cut_by_threads = table.layout == "interleaved" and torch.get_num_threads() > 1
    wide = table.wide(x)
    limit = sys.maxsize if is_cut_by_threads else BUFFER_BYTES // wide.itemsize
    parts = list(_parts(goal, x, factors, limit))
    buffer = own = _viewable(torch.empty_like(parts[0][1], dtype=wide))  # the first part is the largest
    own_factors = parts[0][2]
    turn = _wide_turn(own, own, own_factors, table)
    for part, of_x, of_factors in parts:
        if own.shape != of_x.shape or own_factors is not of_factors:
            own, own_factors = _corner(buffer, of_x), of_factors
            turn = _wide_turn(own, own, own_factors, table)
        own.copy_(of_x)
        turn()
        part.copy_(own)


def _factors(table: Table, wide: torch.dtype) -> Factors:
    if table.layout == "interleaved":
        return (complex_table(table.cos, table.sin, wide),)
    return table.cos.to(wide), table.sin.to(wide)


def _wide_turn(goal: Tensor, x: Tensor, factors: Factors, table: Table) -> Callable[[], Any]:
    """What turns the memory of `x` into that of `goal`, both in the wide dtype."""
    start, width = 0, table.width
    steps: list[Callable[[], Any]] = []
    if table.layout == "interleaved":
        start = width - width % 32
        if start:
            pairs = complex_view(x, start)
            goal_pairs = pairs if goal is x else complex_view(goal, start)
            steps.append(partial(torch.mul, pairs, channels(factors[0], 0, start // 2), out=goal_pairs))
        if start < width:
            factors = torch.view_as_real(factors[0][..., start // 2 :]).unbind(-1)
    if start < width:
        steps.append(partial(_turn_real, channels(goal, start, width), channels(x, start, width), factors, table))
    if width < x.shape[-1] and goal is not x:
        steps.append(partial(goal[..., width:].copy_, x[..., width:]))
    return steps[0] if len(steps) == 1 else lambda: [step() for step in steps]


def _turn_real(goal: Tensor, x: Tensor, factors: Factors, table: Table) -> None:
    goals, members = (pair_views(tensor, table.layout, table.split) for tensor in (goal, x))
    for (goal_a, goal_b, pairs), (a, b, _) in zip(goals, members, strict=True):
        cos, sin = (channels(factor, pairs.start, pairs.stop) for factor in factors)
        across_a, across_b = b * sin, a * sin
        torch.mul(a, cos, out=goal_a).sub_(across_a)
        torch.mul(b, cos, out=goal_b).add_(across_b)


def angle_gradient(y: Tensor, gradient: Tensor, table: Table) -> Tensor:
    """Sums of ``y_i g_j - y_j g_i`` for each entry of the table, in the wide dtype: the imaginary part of ``conj(y) g``.

    `y` and its `gradient` are (..., N, head_dim); the sums run over what the table broadcasts over.
    """
    y, gradient = table.members(y), table.members(gradient)
    wide = table.wide(y)
    if y.device.type != "cpu" or table.layout != "interleaved" or not table.width:
        return plain.angle_gradient(y.to(wide), gradient.to(wide), table)
    total = torch.zeros_like(table.cos, dtype=wide.to_complex())  # in the table's order of memory
    whole = total[(None,) * (y.dim() - total.dim())]
    as_it_lies = y.dtype == gradient.dtype == wide and has_complex_view(y) and has_complex_view(gradient)
    if as_it_lies:
        y, gradient = complex_view(y), complex_view(gradient)
    sample = y[0].numel() if y.dim() > 2 and len(y) else y.numel()  # no sum over samples
    limit = min(BUFFER_BYTES // (total.itemsize if as_it_lies else wide.itemsize), sample)
    parts = list(_parts(y, gradient, (whole,), limit))
    factors = _conjugates(parts) if as_it_lies else _copied_conjugates(parts, wide)
    for (conjugate, factor), (_, _, (part,)) in zip(factors, parts, strict=True):
        if part.shape == conjugate.shape:
            part.addcmul_(conjugate, factor)
        else:
            part.add_(conjugate.mul_(factor).sum_to_size(part.shape))
    return total.imag


def _conjugates(parts: Parts) -> Iterator[tuple[Tensor, Tensor]]:
    """conj(y) in a buffer, and the gradient where it lies, of complex parts (y, gradient, ...)."""
    buffer = torch.empty_like(parts[0][0])  # the first part is the largest
    for y, gradient, _ in parts:
        # PyTorch's lazy conjugate would take new memory each time.
        yield torch.conj_physical(y, out=_corner(buffer, y)), gradient


def _copied_conjugates(parts: Parts, wide: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """conj(y) and the gradient, as complex numbers in buffers, of real parts (y, gradient, ...)."""
    buffers = [_viewable(torch.empty_like(tensor, dtype=wide)) for tensor in parts[0][:2]]
    own: list[Tensor] = []
    for y, gradient, _ in parts:
        if not own or own[0].shape != y.shape:  # views take as long as the arithmetic: once for all parts of a shape
            own = [_corner(buffer, y) for buffer in buffers]
            conjugate, factor = (complex_view(buffer) for buffer in own)
        own[0].copy_(y)
        own[1].copy_(gradient)
        yield conjugate.conj_physical_(), factor


def _corner(buffer: Tensor, x: Tensor) -> Tensor:
    """The part of a buffer that has the shape of `x`, which is nowhere larger."""
    return torch.as_strided(buffer, x.shape, buffer.stride())


def complex_table(cos: Tensor, sin: Tensor, wide: torch.dtype) -> Tensor:
    """``cos + i sin``; the table's own memory where that holds both by turns.

    Pairs are innermost, since products with factors in another order are rounded otherwise.
    """
    if cos.dtype == sin.dtype == wide and _by_turns(cos, sin):
        return torch.view_as_complex(torch.as_strided(cos, (*cos.shape, 2), (*cos.stride(), 1)))
    table = torch.complex(cos.to(wide), sin.to(wide))
    return table if table.stride(-1) == 1 else table.contiguous()


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
    return (x if width is None else channels(x, 0, width)).view(x.dtype.to_complex())


def has_complex_view(x: Tensor) -> bool:
    even = all(stride % 2 == 0 for stride in x.stride()[:-1])
    return bool(even and x.stride(-1) == 1 and x.storage_offset() % 2 == 0)


def _viewable(x: Tensor) -> Tensor:
    return x if has_complex_view(x) else x.clone(memory_format=torch.contiguous_format)


def _parts(target: Tensor, source: Tensor, factors: Factors, limit: int) -> Iterator[tuple[Tensor, Tensor, Factors]]:
    """Both tensors and the factors, in parts of at most `limit` elements that lie together in the memory of `source`."""
    if source.numel() <= limit:
        yield target, source, factors
        return
    # Most often that of samples, or of the tokens of one sample.
    sizes, strides = source.shape, source.stride()
    dim = max(range(-len(sizes), -1), key=lambda dim: (sizes[dim] > 1, strides[dim]))
    step = max(1, limit * sizes[dim] // source.numel())
    shared = all(factor.dim() < -dim or factor.shape[dim] == 1 for factor in factors)
    sources = torch.split(source, step, dim)
    targets = sources if target is source else torch.split(target, step, dim)
    for index, (goal, x) in enumerate(zip(targets, sources, strict=True)):
        own = factors if shared else tuple(factor.narrow(dim, index * step, x.shape[dim]) for factor in factors)
        if step > 1 or x.numel() == source.numel():
            yield goal, x, own
        else:
            yield from _parts(goal, x, own, limit)
