"""Other devices and other attentions than the usual ones."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axial_rope import (
    Axial,
    MemoryAttention,
    Mixed,
    MRope,
    Periods,
    RotaryEmbedding,
    centered_positions,
    grid_positions,
    memory_from_frames,
    rotate,
    rotate_packed,
)


class Watch(TorchDispatchMode):
    """Notes every tensor that isn't on the CPU, by what made it."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                self.seen.setdefault(tensor.dtype, set()).add(str(function))
        return result


def test_no_device_is_asked_for_float64_or_complex_numbers():
    """Pitfalls C4, C5, C6: MPS and HPU have neither. Every family and a memory of three frames, forward and backward."""
    with torch.device("meta"), Watch() as watch:
        for family in (Axial(24), Mixed(24, heads=3), Periods(24), MRope(24, sections=(4, 4, 4)), Axial(24, layout="half")):
            rope = RotaryEmbedding(family)
            grids = [grid_positions(2, 3, 4)[:, -family.columns :]]
            grids += [centered_positions(4, 6)] if family.columns == 2 else []
            for positions in grids:
                x = torch.randn(2, 3, 1 + 24, 24, requires_grad=True)
                rotate(x, rope(positions), prefix_tokens=1).sum().backward()
                qkv = torch.randn(2, 25, 3 * 3 * 24, requires_grad=True)
                sum(part.sum() for part in rotate_packed(qkv, rope(positions), 3, prefix_tokens=1)).backward()
        attend = MemoryAttention(dim=16, memory_dim=8, depth=2, heads=2)
        frames, pointers = [torch.randn(2, 12, 8) for _ in range(3)], torch.randn(2, 2, 16)
        memory = memory_from_frames(frames, grids=[(3, 4)] * 3, ages=[3, 2, 1], pointers=pointers, pointer_ages=[1, 2])
        attend(torch.randn(2, 12, 16), memory, grid=(3, 4)).sum().backward()
    assert torch.float32 in watch.seen
    assert not set(watch.seen) & {torch.float64, torch.complex64, torch.complex128}, watch.seen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_what_was_rotated():
    """Pitfall I12."""
    rotation = RotaryEmbedding(Axial(16))(grid_positions(3, 4))
    q, k, v = rotate_packed(torch.randn(2, 13, 144), rotation, 3, prefix_tokens=1, overwrite=True)
    out = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(j <= i, score, -float("inf")))
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_attention_takes_what_was_rotated(dtype):
    """Pitfall M9: it refuses other memory than heads of adjacent channels, and isn't replaced by a slower one."""
    rotation = RotaryEmbedding(Axial(16))(grid_positions(3, 4))
    packed = torch.randn(2, 13, 144, dtype=dtype)
    for overwrite in (False, True):
        q, k, v = rotate_packed(packed.clone(), rotation, 3, prefix_tokens=1, overwrite=overwrite)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v)
        exact = F.scaled_dot_product_attention(*(part.double() for part in (q, k, v)))
        assert (out - exact).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert out.transpose(1, 2).is_contiguous()  # heads are put side by side again without a copy
