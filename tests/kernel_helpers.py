"""What the tests of the kernels share: rotations and tensors of any shape, a reference in float64, and bytes kept."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from axial_rope import Rotation, pair_channels

LAYOUTS = {"interleaved": (8,), "half": (8,), "half_per_axis": (3, 5)}
SHAPES = {"shared": (5,), "per head": (3, 5), "per sample": (2, 1, 5), "per head and sample": (2, 3, 5)}


def an_angle(shape=(5,), pairs=8, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def a_rotation(shape=(5,), split=(8,), layout="interleaved", head_dim=None, dtype=torch.float32, seed=0):
    angle = an_angle(shape, sum(split), torch.float64, seed)
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype), head_dim or 2 * sum(split), layout, split)


def a_tensor(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(x, rotation, prefix=0, suffix=0):
    """By two-by-two matrices, one pair at a time, in float64."""
    y = x.double().clone()
    end = x.shape[-2] - suffix
    for pair, (i, j) in enumerate(pair_channels(rotation.layout, rotation.split).tolist()):
        cos, sin = rotation.cos[..., pair].double(), rotation.sin[..., pair].double()
        a, b = x[..., prefix:end, i].double(), x[..., prefix:end, j].double()
        y[..., prefix:end, i], y[..., prefix:end, j] = a * cos - b * sin, b * cos + a * sin
    return y


def split_packed(qkv, heads):
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def saved_bytes(function):
    """Bytes of distinct memory that autograd keeps."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(kept.values()), result
