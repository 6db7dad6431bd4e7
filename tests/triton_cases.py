"""Run by test_kernels_triton.py in a process of its own: the Triton kernels against float64, interpreted or on a GPU."""

import argparse
import itertools

import torch

from axial_rope import Rotation, kernels, rotate, rotate_packed
from axial_rope.kernels import Table, plain, triton_backend

DEVICE = "cpu"
SIZES = list(itertools.product((8, 20, 64, 72, 80, 96, 128, 256), (1, 3, 12), (1, 7, 197)))
SHAPES = ("shared", "per head", "per sample", "per head and sample")


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


def a_table(shape, samples, heads, tokens, pairs, layout, ends):
    lead = {"shared": (), "per head": (heads,), "per sample": (samples, 1), "per head and sample": (samples, heads)}[shape]
    angle = random(*lead, tokens - sum(ends), pairs) * 3
    split = (pairs // 2, pairs - pairs // 2) if layout == "half_per_axis" else (pairs,)
    return Table(angle.cos(), angle.sin(), layout, split, *ends)


def close(got, want, eps=2e-6):
    error = (got.double() - want.double()).abs().max().item()
    assert error <= eps * max(1.0, want.double().abs().max().item()), error


def layouts_of_memory(samples, heads, tokens, channels):
    """The same shape in several strides: a part of a packed projection, contiguous, transposed, expanded, with gaps."""
    yield random(samples, tokens, 3, heads, channels)[:, :, 1].transpose(1, 2)
    yield random(samples, heads, tokens, channels)
    yield random(samples, heads, channels, tokens).mT
    yield random(1, 1, 1, channels).expand(samples, heads, tokens, channels)
    yield random(samples, heads, tokens + 1, 2 * channels + 1)[:, :, 1:, 1::2]


def check(index, head_dim, heads, tokens):
    """One size; layouts, table shapes and strides take turns, so that all sizes together meet all of them."""
    layout = ("interleaved", "half", "half_per_axis")[index % 3]
    shape, samples = SHAPES[index % 4], 3 if tokens < 100 else 2 if heads < 12 else 1
    ends = (min(tokens - 1, index % 3), 0) if tokens < 3 else (index % 3, index % 2)
    pairs = head_dim // 2 - (1 if index % 5 == 4 else 0)  # every fifth leaves channels unturned
    table = a_table(shape, samples, heads, tokens, pairs, layout, ends)
    memories = list(layouts_of_memory(samples, heads, tokens, head_dim))
    x, gradient = memories[index % 5], memories[(index // 5 + 1) % 5]
    wide = table._replace(cos=table.cos.double(), sin=table.sin.double())
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    triton_backend.turn_into(y, x, table)
    close(y, plain.turn(x.double(), wide))
    back = torch.empty_like(y)
    triton_backend.turn_into(back, gradient, table.inverse())
    close(back, plain.turn(gradient.double(), wide.inverse()))
    own = x.clone()
    triton_backend.turn_into(own, own, table)
    assert torch.equal(own, y)
    sums = triton_backend.angle_gradient(y, gradient, table)
    close(sums, plain.angle_gradient(*(table.members(part.double()) for part in (y, gradient)), wide), 1e-5)
    assert torch.equal(sums, triton_backend.angle_gradient(y, gradient, table))
    if index % 4 == 0:
        for dtype in (torch.float16, torch.bfloat16):
            low, exact = x.to(dtype).contiguous(), torch.empty_like(y)
            got = torch.empty_like(low)
            triton_backend.turn_into(got, low, table)
            triton_backend.turn_into(exact, low.float(), table)
            if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off where hardware rounds
                exact = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
            assert torch.equal(got, exact.to(dtype))


def check_the_doors():
    """Autograd, packed and separate, with the Triton backend in both."""
    kernels._memory_backend = lambda x, table: triton_backend
    for dtype in (torch.float64, torch.float32):
        table = a_table("per head", 2, 3, 5, 4, "interleaved", (1, 0))
        angle = torch.atan2(table.sin, table.cos).to(dtype).requires_grad_()
        rotation = Rotation.from_angles(angle, 8, split=(4,))
        layer = torch.nn.Linear(6, 72).to(DEVICE, dtype)
        x, weight = random(2, 5, 6, dtype=dtype), random(3, 2, 3, 5, 8, dtype=dtype)
        results = []
        for override in (None, plain.turn):
            qkv = layer(x)
            with kernels.use_rotation(override) if override else torch.enable_grad():
                packed = torch.stack(rotate_packed(qkv, rotation, 3, prefix_tokens=1, overwrite=True))
                single = rotate(weight[0], rotation, prefix_tokens=1)
            loss = (packed * weight).sum() + single.square().sin().sum()
            results.append([packed, single, *torch.autograd.grad(loss, [*layer.parameters(), angle])])
        for got, want in zip(*results, strict=True):
            close(got, want, 1e-13 if dtype == torch.float64 else 1e-5)
    inputs = random(2, 3, 5, 8).double().requires_grad_(), angle.detach().double().requires_grad_()

    def turn(x, angle):
        return rotate(x, Rotation.from_angles(angle, 8, split=(4,)), prefix_tokens=1)

    assert torch.autograd.gradcheck(turn, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(turn, inputs, fast_mode=True)


def check_huge_strides():
    """Strides whose offsets pass 2**31: of tokens, in a small storage into which int32 would wrap, and of channels."""
    table = a_table("shared", 1, 1, 2, 4, "interleaved", (0, 0))
    x = random(1, 1, 2, 8).as_strided((1, 1, 2, 8), (2**33, 2**33, 8, 1))
    y = torch.empty(1, 1, 2, 8, device=DEVICE)
    triton_backend.turn_into(y, x, table)
    close(y, plain.turn(x.double(), table))
    if DEVICE != "cpu":
        return
    try:
        memory = torch.empty(3 * 2**30 + 1, dtype=torch.bfloat16)  # 6 GB, of which four pages are touched
    except RuntimeError:
        return
    for layout in ("interleaved", "half"):
        table = a_table("shared", 1, 1, 1, 2, layout, (0, 0))
        x = memory.as_strided((1, 1, 1, 4), (4, 4, 4, 2**30))
        x.copy_(random(1, 1, 1, 4))
        y = torch.empty(1, 1, 1, 4, dtype=torch.bfloat16)
        triton_backend.turn_into(y, x, table)
        close(y.float(), plain.turn(x.double(), table), 1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("start", type=int)
    parser.add_argument("step", type=int)
    args = parser.parse_args()
    DEVICE = args.device
    if DEVICE == "cpu":  # fewer and larger programs, since the interpreter runs them one by one
        triton_backend.BLOCK, triton_backend.PROGRAMS = 1 << 13, 4
    torch.manual_seed(0)
    for index, size in list(enumerate(SIZES))[args.start :: args.step]:
        check(index, *size)
    check_the_doors()
    check_huge_strides()
    print(f"checked {len(SIZES[args.start :: args.step])} sizes")
