"""Rotary position embeddings for vision transformers, at any grid.

    positions -> frequencies -> rotation -> attention

Importing this package loads torch and einops; timm is loaded when `make_rotary` is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from axial_rope.attention import RotaryAttention
from axial_rope.embedding import RotaryEmbedding
from axial_rope.frequencies import Axial, Extended, Family, Mixed, MRope, Periods, Pixels, family_from_dict
from axial_rope.memory import (
    Memory,
    MemoryAttention,
    MemoryAttentionLayer,
    MemoryBank,
    MemoryCrossAttention,
    Selection,
    memory_from_frames,
    pool_frame,
    select_frames,
    sine_positions,
)
from axial_rope.positions import (
    Image,
    Text,
    Video,
    augment_positions,
    axis_positions,
    block_order,
    centered_positions,
    cropped_positions,
    frame_times,
    grid_positions,
    merge_order,
    merged_positions,
    multimodal_parts,
    multimodal_positions,
    packed_mask,
    packed_positions,
    pixel_positions,
    window_order,
)
from axial_rope.rotation import Rotation, angles, layout_permutation, pair_channels, rotate, rotate_packed

if TYPE_CHECKING:
    from axial_rope.timm_vit import RotaryVisionTransformer, make_rotary

__version__ = "0.1.0"

__all__ = [
    "Axial",
    "Extended",
    "Family",
    "Image",
    "MRope",
    "Memory",
    "MemoryAttention",
    "MemoryAttentionLayer",
    "MemoryBank",
    "MemoryCrossAttention",
    "Mixed",
    "Periods",
    "Pixels",
    "RotaryAttention",
    "RotaryEmbedding",
    "RotaryVisionTransformer",
    "Rotation",
    "Selection",
    "Text",
    "Video",
    "angles",
    "augment_positions",
    "axis_positions",
    "block_order",
    "centered_positions",
    "cropped_positions",
    "family_from_dict",
    "frame_times",
    "grid_positions",
    "layout_permutation",
    "make_rotary",
    "memory_from_frames",
    "merge_order",
    "merged_positions",
    "multimodal_parts",
    "multimodal_positions",
    "packed_mask",
    "packed_positions",
    "pair_channels",
    "pixel_positions",
    "pool_frame",
    "rotate",
    "rotate_packed",
    "select_frames",
    "sine_positions",
    "window_order",
]


def __getattr__(name: str) -> Any:
    if name in ("RotaryVisionTransformer", "make_rotary"):
        return getattr(import_module("axial_rope.timm_vit"), name)
    if name in ("beyond_rotation", "conversion", "extension", "presets"):
        return import_module(f"axial_rope.{name}")
    raise AttributeError(f"module 'axial_rope' has no attribute {name!r}")
