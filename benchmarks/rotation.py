"""The rotation of q and k alone, the tables, and the cost against the number of tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from axial_rope import Axial, Mixed, RotaryEmbedding, Rotation, grid_positions, rotate, rotate_packed
from benchmarks.timing import Timing, compare

__all__ = ["against_tokens", "rotation_alone", "tables"]

HEADS, HEAD_DIM = 6, 64


def rotation_alone(grid: tuple[int, int], batch: int, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Timing]:
    """q and k of one layer, by us and by others; the copy of the same bytes is 1."""
    cases = rotation_cases(grid, batch, dtype, device)
    with torch.no_grad():
        return compare(cases, reference="copy of q and k", rounds=rounds, seconds=0.005)


def rotation_cases(grid: tuple[int, int], batch: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    tokens = grid[0] * grid[1] + 1
    family = Axial(HEAD_DIM, base=100.0)
    rotation = RotaryEmbedding(family).to(device)(grid_positions(*grid, device=device))
    mixed = RotaryEmbedding(Mixed(HEAD_DIM, heads=HEADS)).to(device)(grid_positions(*grid, device=device))
    half = RotaryEmbedding(Axial(HEAD_DIM, base=100.0, layout="half")).to(device)(grid_positions(*grid, device=device))
    mixed = Rotation(mixed.cos.detach(), mixed.sin.detach(), HEAD_DIM)
    qkv = torch.randn(batch, tokens, 3 * HEADS * HEAD_DIM, device=device).to(dtype)
    q, k = qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)[:2]
    copies = q.contiguous(), k.contiguous()
    cases: dict[str, Callable[[], object]] = {
        "copy of q and k": lambda: (copies[0].clone(), copies[1].clone()),
        "ours, packed": lambda: rotate_packed(qkv, rotation, HEADS, prefix_tokens=1, overwrite=True),
        "ours, packed, mixed": lambda: rotate_packed(qkv, mixed, HEADS, prefix_tokens=1, overwrite=True),
        "ours, packed, half layout": lambda: rotate_packed(qkv, half, HEADS, prefix_tokens=1, overwrite=True),
        "ours, separate": lambda: (rotate(q, rotation, prefix_tokens=1), rotate(k, rotation, prefix_tokens=1)),
    }
    for name, turn in others(rotation, device).items():
        cases[name] = lambda turn=turn: turn(q, k)
    return cases


Pair = Callable[[Tensor, Tensor], object]


def others(rotation: Rotation, device: str) -> dict[str, Pair]:
    """The rotations of q and k by other code that is installed, as models call them, the class token left out of them."""
    found: dict[str, Pair] = {}

    def with_prefix(turn: Callable[[Tensor], Tensor]) -> Pair:
        return lambda *pair: [torch.cat([x[:, :, :1], turn(x[:, :, 1:])], dim=2).type_as(x) for x in pair]

    from timm.layers import apply_rot_embed_cat

    embedding = torch.cat([part.repeat_interleave(2, dim=-1) for part in (rotation.sin, rotation.cos)], dim=-1)
    found["timm"] = with_prefix(lambda x: apply_rot_embed_cat(x, embedding))
    table = torch.complex(rotation.cos, rotation.sin)

    def by_complex(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table).flatten(3)

    found["complex (SAM 2's form)"] = with_prefix(by_complex)
    if importlib.util.find_spec("rotary_embedding_torch"):
        from rotary_embedding_torch import apply_rotary_emb

        angles = torch.atan2(rotation.sin, rotation.cos).repeat_interleave(2, dim=-1)
        found["rotary-embedding-torch"] = with_prefix(lambda x: apply_rotary_emb(angles, x))
    full = [torch.cat([part, part], dim=-1) for part in (rotation.cos, rotation.sin)]
    if importlib.util.find_spec("transformers"):
        from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

        found["transformers (DINOv3's, half layout)"] = lambda q, k: apply_rotary_pos_emb(q, k, *full)
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        from flash_attn.layers.rotary import apply_rotary_emb as flash

        parts = rotation.cos, rotation.sin
        found["flash-attn"] = with_prefix(lambda x: flash(x.transpose(1, 2), *parts, interleaved=True).transpose(1, 2))
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        batched = [part[None] for part in full]
        found["Liger (half layout, no prefix)"] = lambda q, k: LigerRopeFunction.apply(q[:, :, 1:], k[:, :, 1:], *batched)
    return found


def tables(device: str, rounds: int) -> dict[str, Timing]:
    """The tables of all 12 blocks of a ViT-S; the fixed one is 1."""
    positions = grid_positions(14, 14, device=device)
    fixed = RotaryEmbedding(Axial(HEAD_DIM, base=100.0)).to(device)
    learned = RotaryEmbedding(Mixed(HEAD_DIM, heads=HEADS, blocks=12)).to(device)
    from timm.layers import RotaryEmbeddingMixed

    theirs = RotaryEmbeddingMixed(HEADS * HEAD_DIM, depth=12, num_heads=HEADS, feat_shape=[14, 14]).to(device)
    cases = {
        "axial": lambda: fixed.per_block(positions, 12),
        "mixed": lambda: learned.per_block(positions, 12),
        "timm, mixed": lambda: theirs.get_embed([14, 14]),
    }
    with torch.no_grad():
        return compare(cases, reference="axial", rounds=rounds, seconds=0.002)


def against_tokens(
    grids: list[tuple[int, int]], dtype: torch.dtype, device: str, rounds: int
) -> dict[int, dict[str, Timing]]:
    """Rotation of one sample for growing grids, with attention as 1."""
    result = {}
    for grid in grids:
        cases = rotation_cases(grid, 1, dtype, device)
        tokens = grid[0] * grid[1] + 1
        q = torch.randn(1, HEADS, tokens, HEAD_DIM, device=device).to(dtype)
        kept = {name: cases[name] for name in ("ours, packed", "timm")}
        kept["attention"] = lambda q=q: torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with torch.no_grad():
            result[tokens] = compare(kept, reference="attention", rounds=rounds, seconds=0.002)
    return result
