"""One autograd node for the rotation, so that the backward pass keeps nothing, or what attention keeps anyway.

The gradient of a rotation is the rotation by the negative angles: it needs no activation. The gradient of the angle, for
the pairs z = x_i + i x_j and y = z e^(i angle), is

    d angle = Im(conj(y) g) = y_i g_j - y_j g_i        summed over what the angle broadcasts over

so that a learned table needs y, which attention keeps for its own backward pass, and the angle, from which cosines and
sines are made anew. In low precision y has been rounded, and the gradient of the angle is as exact as that.

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
    """Rotation of memory, without autograd: what `eager` and `triton_backend` offer."""

    def turn_into(self, target: Tensor, source: Tensor, table: Table) -> None: ...

    def angle_gradient(self, y: Tensor, gradient: Tensor, table: Table) -> Tensor: ...

    def in_place(self, x: Tensor, table: Table) -> bool: ...


class CosSin(Function):
    """Angles -> cosines and sines, in memory that suits the backends. They aren't kept, the angles are."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor, layout: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(angle)
        return _cos_sin(angle, layout)

    @staticmethod
    def backward(ctx: Any, of_cos: Tensor, of_sin: Tensor) -> tuple[Tensor, None]:
        (angle,) = ctx.saved_tensors
        return of_sin * angle.cos() - of_cos * angle.sin(), None


def _cos_sin(angle: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """In the order of the angles in memory, pairs innermost; by turns where pairs are interleaved, as in complex numbers."""
    angle = angle if angle.stride(-1) == 1 else angle.contiguous()
    cos, sin = angle.cos(), angle.sin()
    if layout == "interleaved":
        cos, sin = _own_tensors(torch.view_as_real(torch.complex(cos, sin)).unbind(-1))
    return cos, sin


class Turn(Function):
    """x -> turned x in new memory; `angle` is that of the table if it is learned, else None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor | None, table: Table, backend: MemoryBackend) -> Tensor:
        y = torch.empty_like(x)
        backend.turn_into(y, x, table)
        _keep(ctx, angle, table, backend, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        is_open = _in_the_open(gradient)
        back, outputs = _kept(ctx, is_open)
        dx = None
        if ctx.needs_input_grad[0]:
            if is_open:
                dx = plain.turn(gradient, back)
            else:
                dx = torch.empty_like(gradient)
                ctx.backend.turn_into(dx, gradient, back)
        return dx, _angle_gradient(ctx, back, is_open, outputs, (gradient,)), None, None


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
        angle: Tensor | None,
        shape: tuple[int, ...],
        table: Table,
        backend: MemoryBackend,
        in_place: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.base_shape = shape, base.shape
        if in_place:
            ctx.mark_dirty(base)
            parts = turn_in_place(base, shape, table, backend)
        else:
            parts = turn_apart(base, shape, table, backend, copy_values=True)
        q, k, v = _own_tensors(parts)
        _keep(ctx, angle, table, backend, q, k)
        return base if in_place else None, q, k, v

    @staticmethod
    def backward(ctx: Any, of_base: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_base is not None:  # the changed projection was used again: that gradient belongs to its parts q, k and v too
            again = of_base.reshape(ctx.shape).permute(2, 0, 3, 1, 4).unbind(0)
            gradients = tuple(b if g is None else g + b for g, b in zip(gradients, again, strict=True))
        is_open = _in_the_open(*gradients)
        back, outputs = _kept(ctx, is_open)
        dbase = None
        if ctx.needs_input_grad[0] and any(gradient is not None for gradient in gradients):
            packed = _plain_gradient if is_open else _packed_gradient
            dbase = packed(ctx, back, gradients).reshape(ctx.base_shape)
        return dbase, _angle_gradient(ctx, back, is_open, outputs, gradients[:2]), None, None, None, None


def _in_the_open(*gradients: Tensor | None) -> bool:
    """Whether a backward pass has to be plain arithmetic: it is differentiated itself, or its gradients are batches."""
    return torch.is_grad_enabled() or any(gradient is not None and is_watched(gradient) for gradient in gradients)


def turn_in_place(
    base: Tensor, shape: tuple[int, ...], table: Table, backend: MemoryBackend
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of a contiguous tensor that holds (B, N, 3, heads, head_dim), q and k turned there."""
    parts = base.view(shape).permute(2, 0, 3, 1, 4)  # (3, B, heads, N, head_dim)
    both = parts[:2]
    backend.turn_into(both, both, table)
    q, k, v = parts.unbind(0)
    return q, k, v


def turn_apart(
    qkv: Tensor, shape: tuple[int, ...], table: Table, backend: MemoryBackend, *, copy_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v if it is to be copied, as views of new memory."""
    samples, tokens, _, heads, channels = shape
    parts = qkv.reshape(shape).permute(2, 0, 3, 1, 4)  # (3, B, heads, N, head_dim)
    # Heads next to each other for each token: PyTorch's attention gives its output in the order of q, and there it is merged
    # without a copy.
    memory = qkv.new_empty(3 if copy_values else 2, samples, tokens, heads, channels).transpose(2, 3)
    backend.turn_into(memory[:2] if copy_values else memory, parts[:2], table)
    if not copy_values:
        return memory[0], memory[1], parts[2]
    memory[2].copy_(parts[2])
    q, k, v = memory.unbind(0)
    return q, k, v


def _own_tensors(views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same memory in tensors that aren't views for autograd, which would take a change of one for a change of all."""
    return tuple(
        view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride()) for view in views
    )


def _packed_gradient(ctx: Any, back: Table, gradients: tuple[Tensor | None, ...]) -> Tensor:
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
            ctx.backend.turn_into(part, gradient, back)
    return packed


def _plain_gradient(ctx: Any, back: Table, gradients: tuple[Tensor | None, ...]) -> Tensor:
    given = next(gradient for gradient in gradients if gradient is not None)
    q, k, v = (torch.zeros_like(given) if gradient is None else gradient for gradient in gradients)
    parts = [plain.turn(q, back), plain.turn(k, back), v]
    return torch.stack([part.transpose(1, 2) for part in parts], dim=2)


def _keep(ctx: Any, angle: Tensor | None, table: Table, backend: MemoryBackend, *outputs: Tensor) -> None:
    ctx.backend, ctx.learned = backend, angle is not None
    if angle is not None:
        ctx.save_for_backward(angle, *outputs)
        ctx.table = table._replace(cos=None, sin=None, angle=None)  # type: ignore[arg-type]
    else:
        ctx.table, ctx.versions = table, _versions(table)


def _kept(ctx: Any, is_open: bool) -> tuple[Table, tuple[Tensor, ...]]:
    """The table of the negative angles, and the outputs if their angle is learned."""
    if ctx.learned:
        angle, *outputs = ctx.saved_tensors
        cos, sin = ((-angle).cos(), (-angle).sin()) if is_open else _cos_sin(-angle, ctx.table.layout)
        return ctx.table._replace(cos=cos, sin=sin), tuple(outputs)
    if _versions(ctx.table) != ctx.versions:
        raise RuntimeError("cos and sin must stay as they are until the backward pass: they were changed in place")
    return ctx.table.inverse(), ()


def _versions(table: Table) -> tuple[int, ...]:
    return tuple(0 if part.is_inference() else part._version for part in (table.cos, table.sin))


def _angle_gradient(
    ctx: Any, table: Table, is_open: bool, outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
) -> Tensor | None:
    """The gradient of the angle from the outputs and their gradients; see the head of this file."""
    if not ctx.needs_input_grad[1]:
        return None
    total: Tensor | None = None
    for y, gradient in zip(outputs, gradients, strict=True):
        if gradient is None:
            continue
        if is_open:
            wide = table.wide(y)
            part = plain.angle_gradient(table.members(y).to(wide), table.members(gradient).to(wide), table)
        else:
            part = ctx.backend.angle_gradient(y, gradient, table)
        total = part if total is None else total + part
    return None if total is None else total.to(table.cos.dtype)
