"""The rotation behind the doors of `axial_rope.rotation`: one contract, several backends.

    plain       real arithmetic in new tensors, for compilers, exporters, tracers, torch.func and forward-mode autograd
    eager       in memory, on the CPU and on any other device
    triton      in memory, one kernel, on CUDA

Which one runs follows from what is going on and where the tensors are; results agree to a unit in the last place of the
dtype. For float16 and bfloat16 every backend gives what it gives for float32, rounded once.

`use_rotation` puts a function of one's own in the place of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from axial_rope.kernels import eager, plain
from axial_rope.kernels.autograd import CosSin, MemoryBackend, Turn, TurnPacked, turn_apart, turn_in_place
from axial_rope.kernels.layouts import Table
from axial_rope.kernels.watched import is_watched

__all__ = ["Table", "cos_sin", "turn", "turn_packed", "use_rotation"]

Override = Callable[[Tensor, Table], Tensor]
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_override: Override | None = None


@contextmanager
def use_rotation(function: Override) -> Iterator[None]:
    """Rotate by a function of one's own inside of a ``with``: for a device that the backends here don't suit.

    Every rotation of the package goes through it, in all threads, packed projections too. Models that are compiled or
    exported inside of it contain it.

    Parameters
    ----------
    function
        Called as ``function(x, table)``, with `x` of (..., tokens, head_dim) and a `Table`; returns a new tensor of the
        shape and dtype of `x`. Autograd records what it does. `axial_rope.kernels.plain.turn` is one, in real arithmetic.

    Examples
    --------
    >>> from axial_rope import Axial, RotaryEmbedding, grid_positions, rotate
    >>> from axial_rope.kernels import plain, use_rotation
    >>> rotation = RotaryEmbedding(Axial(head_dim=8))(grid_positions(2, 3))
    >>> with use_rotation(plain.turn):
    ...     rotate(torch.zeros(1, 6, 8), rotation).shape
    torch.Size([1, 6, 8])
    """
    global _override
    before, _override = _override, function
    try:
        yield
    finally:
        _override = before


def cos_sin(angle: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles, in memory that suits the backends for that layout of the pairs."""
    if is_watched(angle):
        return angle.cos(), angle.sin()
    cos, sin = CosSin.apply(angle, layout)
    return cos, sin


def turn(x: Tensor, table: Table) -> Tensor:
    """`x`, (..., prefix + N + suffix, head_dim), turned in a new tensor."""
    if _override is not None:
        return _override(x, table)
    if _wants_plain(x, table):
        return plain.turn(x, table)
    backend = _memory_backend(x, table)
    if _is_recorded(x, table):
        y: Tensor = Turn.apply(x, table.angle, table, backend)
        return y
    y = torch.empty_like(x)
    backend.turn_into(y, x, table)
    return y


def turn_packed(qkv: Tensor, table: Table, heads: int, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A packed projection, (B, N, 3 heads head_dim), split into turned q and k, and v: each (B, heads, N, head_dim).

    With `overwrite` the result may lie in the memory of `qkv`.
    """
    if _override is not None:
        q, k, v = (part.transpose(1, 2) for part in torch.unflatten(qkv, -1, (3, heads, -1)).unbind(2))
        return _override(q, table), _override(k, table), v
    if _wants_plain(qkv, table):
        return plain.turn_packed(qkv, table, heads)
    samples, tokens, channels = qkv.shape
    shape = (samples, tokens, 3, heads, channels // (3 * heads))
    backend = _memory_backend(qkv, table)
    recorded = _is_recorded(qkv, table)
    base = _whole(qkv) if overwrite and (recorded or backend.in_place(qkv, table)) else None
    if recorded:
        of = qkv if base is None else base
        _, q, k, v = TurnPacked.apply(of, table.angle, shape, table, backend, base is not None)
        return q, k, v
    if base is None:
        return turn_apart(qkv, shape, table, backend, copy_values=False)
    return turn_in_place(base, shape, table, backend)


def _whole(qkv: Tensor) -> Tensor | None:
    """The tensor whose memory `qkv` is, if it may be overwritten and is nothing but `qkv`.

    The output of a linear layer is a view of that of a matrix product. To mark a view as changed makes autograd copy it; so
    its base is taken, unless something else than the view looks at the gradient on its way there.
    """
    base = qkv if qkv._base is None else qkv._base
    same = base.numel() == qkv.numel() and base.dtype == qkv.dtype
    wanted = base.retains_grad or qkv.retains_grad or (base.is_leaf and base.requires_grad)
    free = not wanted and not (base.is_inference() and not torch.is_inference_mode_enabled())
    whole = base.is_contiguous() and qkv.is_contiguous()
    return base if same and free and whole and (base is qkv or _is_mere_view(qkv, base)) else None


def _is_mere_view(x: Tensor, base: Tensor) -> bool:
    """Whether the gradient of `x` goes to `base` through nothing but the view, with no hook on the way."""
    if x._backward_hooks or base._backward_hooks:
        return False
    node = x.grad_fn
    if node is None or node is base.grad_fn:
        return True
    return type(node).__name__ in VIEWS and [function for function, _ in node.next_functions] == [base.grad_fn]


def _memory_backend(x: Tensor, table: Table) -> MemoryBackend:
    triton_backend = _triton_backend() if x.is_cuda else None
    return triton_backend if triton_backend is not None and triton_backend.suits(x, table) else eager


@cache
def _triton_backend() -> Any:
    """The Triton kernels, or None where Triton isn't installed or the device is too old for it."""
    if torch.version.hip is None and torch.cuda.get_device_capability() < (7, 0):
        return None
    try:
        from axial_rope.kernels import triton_backend
    except ImportError:
        return None
    return triton_backend


def _is_recorded(x: Tensor, table: Table) -> bool:
    """Whether autograd has to know of it; of learned tables only those with an angle come this far."""
    return torch.is_grad_enabled() and (x.requires_grad or table.angle is not None)


def _wants_plain(x: Tensor, table: Table) -> bool:
    """Whether it has to be plain arithmetic: something looks on, or cosines and sines are learned without an angle."""
    parts = (table.cos, table.sin)
    # A part of a lazily conjugated table isn't what its memory says; asked last, since compilers can't.
    if is_watched(x) or any(type(part) not in (Tensor, torch.nn.Parameter) or part.is_neg() for part in parts):
        return True
    return table.angle is None and torch.is_grad_enabled() and any(part.requires_grad for part in parts)
