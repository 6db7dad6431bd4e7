"""Weights of other code, brought into the shapes and layouts of this package.

layouts      query and key weights from one layout of pairs into another
vit          RoPE-ViTs of rope-vit and timm, under the names of make_rotary's models
sam2         SAM 2's memory attention, from its own and from transformers' names
"""

from axial_rope.conversion.layouts import convert_layout, convert_qkv_layout, convert_state_dict_layout, with_layout
from axial_rope.conversion.sam2 import ConvertedMemory, memory_attention_from_sam2, pool_rotated, sam2_memory_weights
from axial_rope.conversion.vit import ConvertedViT, rope_vit_weights

__all__ = [
    "ConvertedMemory",
    "ConvertedViT",
    "convert_layout",
    "convert_qkv_layout",
    "convert_state_dict_layout",
    "memory_attention_from_sam2",
    "pool_rotated",
    "rope_vit_weights",
    "sam2_memory_weights",
    "with_layout",
]
