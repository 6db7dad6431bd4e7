"""make_rotary: a timm VisionTransformer becomes rotary, under the same state-dict keys.

The model, its blocks and their attention layers get subclasses of their timm classes, so that everything else timm offers
(feature extraction, classifier reset, pickling, EMA, layer decay) goes on as before. The rotation is computed once per
forward pass and handed from the model to the blocks to the attention layers as an argument.
"""

from axial_rope.timm_vit.make import make_rotary
from axial_rope.timm_vit.model import RotaryVisionTransformer

__all__ = ["RotaryVisionTransformer", "make_rotary"]
