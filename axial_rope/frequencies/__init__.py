"""How fast each feature pair turns: families of frequency tables.

    Axial       one geometric series per axis         RoFormer, rope-vit, EVA-02, SAM 2, Qwen's vision, Wan, Flux, ...
    MRope       one series dealt to text, image and   Qwen2-VL, Qwen3-VL
                video axes in sections
    Periods     2 pi / period, positions in (-1, 1)   DINOv3
    Pixels      pixel bands, positions in [-1, 1]     timm, lucidrains
    Mixed       learned, all axes in every pair       rope-vit's RoPE-Mixed
    Extended    another family, stretched to longer   made by `axial_rope.extension`
                sequences or larger grids

What they share is described in `axial_rope.frequencies.base`.
"""

from axial_rope.frequencies.axial import Axial
from axial_rope.frequencies.base import Family, Series, family_from_dict
from axial_rope.frequencies.extended import Extended
from axial_rope.frequencies.mixed import Mixed
from axial_rope.frequencies.mrope import MRope
from axial_rope.frequencies.periods import Periods
from axial_rope.frequencies.pixels import Pixels

__all__ = ["Axial", "Extended", "Family", "MRope", "Mixed", "Periods", "Pixels", "Series", "family_from_dict"]
