"""One autograd node for the rotation, so that the backward pass keeps nothing, or what attention keeps anyway.

The gradient of a rotation is the rotation by the negative angles: it needs no activation. The gradient of the table
w = cos + i sin, for the pairs z = x_i + i x_j and y = z w, is that of a product, and z is y / w:

    dw = sum of conj(z) g = w / |w|^2 * sum of conj(y) g

so that a learned table needs y alone, which attention keeps for its own backward pass. Along the circle this is the
derivative by the angle, g_j y_i - g_i y_j.

Tables that aren't learned are kept outside of the saved tensors, since they are no activations; that they haven't changed
in the meantime is checked here. A backward pass that is itself differentiated uses plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from axial_rope.kernels import plain
from axial_rope.kernels.layouts import Table
from axial_rope.kernels.watched import is_watched

__all__ = ["CosSin", "MemoryBackend", "Turn", "TurnPacked", "turn_apart", "turn_in_place"]


class MemoryBackend(Protocol):
    """Rotation of memory, without autograd: what `eager` and `triton` offer."""

    def turn_into(self, target: Tensor, source: Tensor, table: Table, *, inverse: bool = False) -> None: ...

    def correlate(self, y: Tensor, gradient: Tensor, table: Table) -> tuple[Tensor, Tensor]: ...

    def in_place(self, x: Tensor, table: Table) -> bool: ...


class CosSin(Function):
    """Angles -> cosines and sines, which lie by turns in memory, as complex numbers do. The angles aren't kept."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor) -> tuple[Tensor, Tensor]:
        memory = angle.new_empty(*angle.shape, 2)
        cos, sin = (_tensor_at(memory, part, memory.shape[:-1], memory.stride()[:-1]) for part in range(2))
        torch.cos(angle, out=cos)
        torch.sin(angle, out=sin)
        ctx.save_for_backward(cos, sin)
        return cos, sin

    @staticmethod
    def backward(ctx: Any, of_cos: Tensor, of_sin: Tensor) -> Tensor:
        cos, sin = ctx.saved_tensors
        gradient: Tensor = of_sin * cos - of_cos * sin
        return gradient


class Turn(Function):
    """x, cos, sin -> turned x in new memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, table: Table, backend: MemoryBackend) -> Tensor:
        y = torch.empty_like(x)
        backend.turn_into(y, x, table)
        _keep(ctx, table, backend, cos, sin, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        table, outputs = _kept(ctx)
        dx = None
        if ctx.needs_input_grad[0]:
            if _in_the_open(gradient):
                dx = plain.turn(gradient, table.inverse())
            else:
                dx = torch.empty_like(gradient)
                ctx.backend.turn_into(dx, gradient, table, inverse=True)
        dcos, dsin = _table_gradient(ctx, table, [(y, gradient) for y in outputs])
        return dx, dcos, dsin, None, None


class TurnPacked(Function):
    """A packed projection, (B, N, 3 heads head_dim), -> itself or None, and its q, k and v: (B, heads, N, head_dim).

    In place, q and k are turned in the projection's own memory. The projection is returned as well, marked as changed, so
    that autograd sees another use of it as what it is. q, k and v are tensors in their own right, in different parts of that
    memory. Else all three are new.
    """

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        cos: Tensor,
        sin: Tensor,
        shape: tuple[int, ...],
        table: Table,
        backend: MemoryBackend,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.base_shape = shape, base.shape
        if in_place:
            ctx.mark_dirty(base)
            q, k, v = turn_in_place(base, shape, table, backend)
        else:
            q, k, v = turn_apart(base, shape, table, backend, copy_values=True)
        _keep(ctx, table, backend, cos, sin, q, k)
        return base if in_place else None, q, k, v

    @staticmethod
    def backward(ctx: Any, of_base: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        table, outputs = _kept(ctx)
        if of_base is not None:  # the changed projection was used again: that gradient belongs to its parts q, k and v too
            again = of_base.reshape(ctx.shape).permute(2, 0, 3, 1, 4).unbind(0)
            gradients = tuple(b if g is None else g + b for g, b in zip(gradients, again, strict=True))
        dbase = None
        if ctx.needs_input_grad[0] and any(gradient is not None for gradient in gradients):
            packed = _plain_gradient if _in_the_open(*gradients) else _packed_gradient
            dbase = packed(ctx, table, gradients).reshape(ctx.base_shape)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=False) if g is not None]
        dcos, dsin = _table_gradient(ctx, table, pairs)
        return dbase, dcos, dsin, None, None, None, None


def _in_the_open(*gradients: Tensor | None) -> bool:
    """Whether a backward pass has to be plain arithmetic: it is differentiated itself, or its gradients are batches."""
    return torch.is_grad_enabled() or any(gradient is not None and is_watched(gradient) for gradient in gradients)


def turn_in_place(
    base: Tensor, shape: tuple[int, ...], table: Table, backend: MemoryBackend
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the memory of a contiguous tensor that holds (B, N, 3, heads, head_dim), q and k turned there.

    They aren't views for autograd, which would take a change of one for a change of all.
    """
    both = base.view(shape)[:, :, :2].permute(0, 2, 3, 1, 4)  # (B, 2, heads, N, head_dim)
    backend.turn_into(both, both, _for_both(table))
    samples, tokens, _, heads, channels = shape
    row = 3 * heads * channels
    stride, start = (tokens * row, channels, row, 1), base.storage_offset()
    q, k, v = (_tensor_at(base, start + part * row // 3, (samples, heads, tokens, channels), stride) for part in range(3))
    return q, k, v


def turn_apart(
    qkv: Tensor, shape: tuple[int, ...], table: Table, backend: MemoryBackend, *, copy_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v if it is to be copied, in new memory."""
    samples, tokens, _, heads, channels = shape
    parts = qkv.reshape(shape).permute(0, 2, 3, 1, 4)  # (B, 3, heads, N, head_dim)
    # Heads next to each other for each token: PyTorch's attention gives its output in the order of q, and there it is merged
    # without a copy.
    memory = qkv.new_empty(3 if copy_values else 2, samples, tokens, heads, channels).transpose(2, 3)
    backend.turn_into(memory[:2].transpose(0, 1), parts[:, :2], _for_both(table))
    if not copy_values:
        return memory[0], memory[1], parts[:, 2]
    memory[2].copy_(parts[:, 2])
    q, k, v = (_tensor_at(memory, part * memory[0].numel(), memory.shape[1:], memory.stride()[1:]) for part in range(3))
    return q, k, v


def _tensor_at(memory: Tensor, start: Any, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor in its own right in the storage of `memory`."""
    part: Tensor = memory.new_empty(0).set_(memory.untyped_storage(), start, size, stride)
    return part


def _for_both(table: Table) -> Table:
    if table.cos.dim() < 4:
        return table
    return table._replace(cos=table.cos.unsqueeze(1), sin=table.sin.unsqueeze(1))  # (B, 1, heads, N, P)


def _packed_gradient(ctx: Any, table: Table, gradients: tuple[Tensor | None, ...]) -> Tensor:
    """The gradient of the projection, written once: (B, N, 3, heads, head_dim)."""
    given = next(gradient for gradient in gradients if gradient is not None)
    packed = given.new_empty(ctx.shape)
    for index, gradient in enumerate(gradients):
        part = packed[:, :, index].transpose(1, 2)  # (B, heads, N, head_dim)
        if gradient is None:
            part.zero_()
        elif index == 2:
            part.copy_(gradient)
        else:
            ctx.backend.turn_into(part, gradient, table, inverse=True)
    return packed


def _plain_gradient(ctx: Any, table: Table, gradients: tuple[Tensor | None, ...]) -> Tensor:
    given = next(gradient for gradient in gradients if gradient is not None)
    q, k, v = (torch.zeros_like(given) if gradient is None else gradient for gradient in gradients)
    back = table.inverse()
    parts = [plain.turn(q, back), plain.turn(k, back), v]
    return torch.stack([part.transpose(1, 2) for part in parts], dim=2)


def _keep(ctx: Any, table: Table, backend: MemoryBackend, cos: Tensor, sin: Tensor, *outputs: Tensor) -> None:
    ctx.backend = backend
    ctx.learned = cos.requires_grad or sin.requires_grad
    if ctx.learned:
        ctx.save_for_backward(cos, sin, *outputs)
        ctx.table = table._replace(cos=None, sin=None)  # type: ignore[arg-type]
    else:
        ctx.table, ctx.versions = table, _versions(table)


def _kept(ctx: Any) -> tuple[Table, tuple[Tensor, ...]]:
    if ctx.learned:
        cos, sin, *outputs = ctx.saved_tensors
        return ctx.table._replace(cos=cos, sin=sin), tuple(outputs)
    if _versions(ctx.table) != ctx.versions:
        raise RuntimeError("cos and sin must stay as they are until the backward pass: they were changed in place")
    return ctx.table, ()


def _versions(table: Table) -> tuple[int, ...]:
    return tuple(0 if part.is_inference() else part._version for part in (table.cos, table.sin))


def _table_gradient(ctx: Any, table: Table, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of cos and sin from the outputs and their gradients; see the head of this file."""
    if not pairs or not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
        return None, None
    sums = []
    for y, gradient in pairs:
        if _in_the_open(gradient):
            wide = table.wide(y)
            y, gradient = (table.members(t).to(wide) for t in (y, gradient))
            sums.append(plain.correlate(y, gradient, table))
        else:
            sums.append(ctx.backend.correlate(y, gradient, table))
    along = sum(real for real, _ in sums)
    across = sum(imaginary for _, imaginary in sums)
    cos, sin = table.cos, table.sin
    norm = cos * cos + sin * sin
    dcos, dsin = (cos * along - sin * across) / norm, (sin * along + cos * across) / norm
    return dcos.to(cos.dtype), dsin.to(sin.dtype)
