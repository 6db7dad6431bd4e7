# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Rotation of memory by Triton kernels: the backend of eager PyTorch on CUDA.

One kernel turns q and k of a packed projection together. It reads each of their elements once and writes it once, which is
4 bytes of traffic in bfloat16 and 8 in float32. A device copy of q and k takes the same, and its time is the floor. The
table, 8 bytes for each pair of a token, is read again for every head and sample, but from the cache.

The gradient of the angle reads 4 bytes of y and g for each element in bfloat16 and writes partial sums that PyTorch adds up:
no atomics, so that it gives the same bits in each run.

Offsets are 64-bit, strides are whatever they are, and head_dim may be any even number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axial_rope.kernels.layouts import Table

__all__ = ["angle_gradient", "in_place", "suits", "turn_into"]

BLOCK = 1024  # pairs of one program
PROGRAMS = 1024  # programs that keep a large device busy, for the sums


def in_place(x: Tensor, table: Table) -> bool:
    """Whether to turn a projection in its own memory: yes, attention on CUDA takes any strides of q and k."""
    return True


@triton.jit
def _load(base, rows, p, FIRST: tl.constexpr, SECOND: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr, stride, mask, WIDE: tl.constexpr):  # fmt: skip
    """The members a and b of pairs, (BLOCK_N, BLOCK_P)."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P).to(tl.int64)
        x = tl.load(base + rows[:, None] + c[None, :] * stride, mask=mask[:, None] & (c < 2 * P)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(x, (BLOCK_N, BLOCK_P, 2)))
    else:
        i, j = _members(p, FIRST, SECOND, P)
        inside = mask[:, None] & (p < P)[None, :]
        a = tl.load(base + rows[:, None] + i[None, :] * stride, mask=inside, other=0.0)
        b = tl.load(base + rows[:, None] + j[None, :] * stride, mask=inside, other=0.0)
    return a.to(WIDE), b.to(WIDE)


@triton.jit
def _members(p, FIRST: tl.constexpr, SECOND: tl.constexpr, P: tl.constexpr):
    """Channels of the members of pair p, for bands of FIRST, SECOND and the remaining pairs: a0 a1 b0 b1  a2 b2  a3 b3."""
    start = tl.where(p < FIRST, 0, tl.where(p < FIRST + SECOND, FIRST, FIRST + SECOND))
    band = tl.where(p < FIRST, FIRST, tl.where(p < FIRST + SECOND, SECOND, P - FIRST - SECOND))
    return p + start, p + start + band


@triton.jit
def _turn_kernel(
    target, source, cos, sin, N, prefix, suffix, L1, L2,
    t0, t1, t2, tn, tc, s0, s1, s2, sn, sc, c0, c1, c2, cn, cp, d0, d1, d2, dn, dp,
    FIRST: tl.constexpr, SECOND: tl.constexpr, P: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(0).to(tl.int64)
    i0, i1, i2 = lead // (L1 * L2), (lead // L2) % L1, lead % L2
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    inside = n < N
    turned = (n >= prefix) & (n < N - suffix)
    written = turned if SAME else inside
    x = source + i0 * s0 + i1 * s1 + i2 * s2
    y = target + i0 * t0 + i1 * t1 + i2 * t2
    a, b = _load(x, n * sn, p, FIRST, SECOND, P, BLOCK_N, BLOCK_P, INTERLEAVED, sc, inside, WIDE)
    known = turned[:, None] & (p < P)[None, :]
    row = (n - prefix)[:, None]
    w = tl.load(cos + i0 * c0 + i1 * c1 + i2 * c2 + row * cn + p[None, :] * cp, mask=known, other=1.0).to(WIDE)
    v = tl.load(sin + i0 * d0 + i1 * d1 + i2 * d2 + row * dn + p[None, :] * dp, mask=known, other=0.0).to(WIDE)
    new_a = tl.where(known, a * w - b * v, a).to(target.dtype.element_ty)
    new_b = tl.where(known, b * w + a * v, b).to(target.dtype.element_ty)
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P).to(tl.int64)
        both = tl.reshape(tl.join(new_a, new_b), (BLOCK_N, 2 * BLOCK_P))
        tl.store(y + (n * tn)[:, None] + c[None, :] * tc, both, mask=written[:, None] & (c < 2 * P)[None, :])
    else:
        i, j = _members(p, FIRST, SECOND, P)
        kept = written[:, None] & (p < P)[None, :]
        tl.store(y + (n * tn)[:, None] + i[None, :] * tc, new_a, mask=kept)
        tl.store(y + (n * tn)[:, None] + j[None, :] * tc, new_b, mask=kept)
    if TAIL > 0 and not SAME:
        c = tl.arange(0, BLOCK_TAIL).to(tl.int64)
        at = inside[:, None] & (c < TAIL)[None, :]
        tail = tl.load(x + (n * sn)[:, None] + (c + 2 * P)[None, :] * sc, mask=at)
        tl.store(y + (n * tn)[:, None] + (c + 2 * P)[None, :] * tc, tail, mask=at)


@triton.jit
def _angle_kernel(
    sums, left, right, N, prefix, M1, M2, R0, R1, R2, SHARE,
    y0, y1, y2, yn, yc, g0, g1, g2, gn, gc,
    FIRST: tl.constexpr, SECOND: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # The table has M0 x M1 x M2 leading entries, and each is the sum of R0 x R1 x R2 rows; program_id(2) sums a share.
    lead = tl.program_id(0).to(tl.int64)
    m0, m1, m2 = lead // (M1 * M2), (lead // M2) % M1, lead % M2
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    inside = n < N
    total = tl.zeros((BLOCK_N, BLOCK_P), dtype=WIDE)
    first = tl.program_id(2).to(tl.int64) * SHARE
    last = tl.minimum(first + SHARE, R0 * R1 * R2)
    for r in range(first, last):
        i0, i1, i2 = m0 + r // (R1 * R2), m1 + (r // R2) % R1, m2 + r % R2
        y = left + i0 * y0 + i1 * y1 + i2 * y2
        g = right + i0 * g0 + i1 * g1 + i2 * g2
        row = n + prefix
        y_a, y_b = _load(y, row * yn, p, FIRST, SECOND, P, BLOCK_N, BLOCK_P, INTERLEAVED, yc, inside, WIDE)
        g_a, g_b = _load(g, row * gn, p, FIRST, SECOND, P, BLOCK_N, BLOCK_P, INTERLEAVED, gc, inside, WIDE)
        total += y_a * g_b - y_b * g_a
    start = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + lead) * N
    at = (start + n)[:, None] * P + p[None, :]
    tl.store(sums + at, total, mask=inside[:, None] & (p < P)[None, :])


def suits(x: Tensor, table: Table) -> bool:
    """Whether the kernels can turn it: at most three leading dimensions, and three bands of pairs."""
    return x.dim() <= 4 and (table.layout != "half_per_axis" or len(table.split) <= 3)


def turn_into(target: Tensor, source: Tensor, table: Table) -> None:
    """Write `source`, turned, into `target`; both (..., N, head_dim) of one dtype, apart in memory or the same tensor."""
    if source.numel() == 0:
        return
    same = target is source
    goal, x = _five(target), _five(source)
    cos, sin = (_table_of(part, x) for part in (table.cos, table.sin))
    l0, l1, l2, tokens, channels = x.shape
    pairs, options = _options(table, x)
    tail = channels - 2 * pairs
    grid = (l0 * l1 * l2, triton.cdiv(tokens, options["BLOCK_N"]))
    with _device_of(x):
        _turn_kernel[grid](
            goal, x, cos, sin, tokens, table.prefix, table.suffix, l1, l2,
            *goal.stride(), *x.stride(), *cos.stride(), *sin.stride(),
            TAIL=tail, BLOCK_TAIL=triton.next_power_of_2(max(1, tail)), SAME=same, **options,
        )  # fmt: skip


def angle_gradient(y: Tensor, gradient: Tensor, table: Table) -> Tensor:
    """Sums of ``y_i g_j - y_j g_i`` for each entry of the table; see `eager.angle_gradient`."""
    shape, wide = table.cos.shape, table.wide(y)
    y, gradient = _five(y), _five(gradient)
    lead = (1,) * (5 - len(shape)) + tuple(shape[:-2])
    times = [n // m for n, m in zip(y.shape[:3], lead, strict=True)]
    _, options = _options(table, y)
    rows, entries = times[0] * times[1] * times[2], lead[0] * lead[1] * lead[2]
    blocks = triton.cdiv(shape[-2], options["BLOCK_N"])
    shares = max(1, min(rows, PROGRAMS // max(1, entries * blocks)))
    share = triton.cdiv(max(1, rows), shares)
    sums = y.new_zeros(shares, *shape, dtype=wide)
    if y.numel():
        # An entry of the table that isn't broadcast stands for itself, one that is for all rows of that dimension.
        with _device_of(y):
            _angle_kernel[(entries, blocks, shares)](
                sums, y, gradient, shape[-2], table.prefix, lead[1], lead[2], *times, share,
                *y.stride(), *gradient.stride(), **options,
            )  # fmt: skip
    return sums.sum(0)


def _five(x: Tensor) -> Tensor:
    """A view with three leading dimensions."""
    return x[(None,) * (5 - x.dim())]


def _table_of(part: Tensor, x: Tensor) -> Tensor:
    return part[(None,) * (5 - part.dim())].expand(*x.shape[:3], -1, -1)


def _options(table: Table, x: Tensor) -> tuple[int, dict[str, Any]]:
    pairs = table.width // 2
    first, second, *_ = (*table.split, 0, 0) if table.layout == "half_per_axis" else (pairs, 0)
    block = triton.next_power_of_2(pairs)
    return pairs, {
        "FIRST": first,
        "SECOND": second,
        "P": pairs,
        "BLOCK_P": block,
        "BLOCK_N": max(1, min(triton.next_power_of_2(x.shape[-2]), BLOCK // block)),
        "INTERLEAVED": table.layout == "interleaved",
        "WIDE": tl.float64 if table.wide(x) == torch.float64 else tl.float32,
    }


def _device_of(x: Tensor) -> Any:
    return torch.cuda.device_of(x)
