"""make_rotary, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from timm.layers.attention import Attention
from timm.layers.format import Format
from timm.layers.patch_embed import PatchEmbed
from timm.models._features import FeatureGetterNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from axial_rope.embedding import RotaryEmbedding
from axial_rope.frequencies import Family, Mixed
from axial_rope.positions import grid_positions
from axial_rope.presets import Scheme
from axial_rope.rotation import rotate
from axial_rope.timm_vit.blocks import ROTARY_BLOCKS, RotaryTimmAttention
from axial_rope.timm_vit.model import Positions, RotaryVisionTransformer, check_strength

__all__ = ["make_rotary"]

Model = TypeVar("Model", bound=nn.Module)


def make_rotary(
    vit: Model,
    family: Family | Scheme,
    *,
    positions: Positions | None = None,
    keep_pos_embed: bool = True,
    strength: float = 1.0,
) -> Model:
    """Give a timm VisionTransformer rotary position embeddings, in place.

    Class and register tokens aren't rotated. The model takes images of any number of patches from then on, square or not
    (``dynamic_img_size`` is switched on; for sides that aren't whole patches make it with ``dynamic_img_pad=True``). Its
    state-dict keys stay those of the timm model, with ``rope.frequencies`` added where the family is learned, so that
    weights can be loaded before or after.

    Parameters
    ----------
    vit
        A model of ``timm.create_model`` whose class is `VisionTransformer` (vit_*, deit3_*, DINOv2's, CLIP's towers, ...),
        with any of timm's `Block` or `ResPostBlock` blocks, or such a model under ``features_only=True``.
    family
        Frequencies for the head width of the model and two axes, or one of `axial_rope.presets`, which has positions too.
    positions
        From a grid of patches to their positions; `grid_positions`, or those of the preset, by default. Called as
        ``positions(height, width, device=...)``, it returns (height * width, 2), or that for each sample.
        ``functools.partial(grid_positions, reference=(14, 14))`` interpolates every grid to that of a pretraining. Kept as
        ``vit.rope_positions``, and may be replaced there.
    keep_pos_embed
        Whether the absolute position embedding stays. A checkpoint that has one can be loaded either way.
    strength
        Factor on all angles, from 0 (the model computes what it did before) to 1. Kept as ``vit.rope_strength``, and may be
        raised there during fine-tuning, so that a pretrained model is made rotary without a jump.

    Returns
    -------
    VisionTransformer
        The same object, whose class is now `RotaryVisionTransformer`.

    Raises
    ------
    TypeError
        If the model, its blocks or its attention layers are of another class, it is rotary already, or `positions` can't be
        called.
    ValueError
        If the family doesn't fit the model's heads or blocks, or `strength` isn't in [0, 1].

    Examples
    --------
    >>> import timm, torch
    >>> from axial_rope import Axial, make_rotary
    >>> vit = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> vit = make_rotary(vit, Axial(head_dim=64, base=100.0))
    >>> vit(torch.randn(1, 3, 160, 320)).shape
    torch.Size([1, 1000])
    """
    model = vit.model if isinstance(vit, FeatureGetterNet) else vit
    family, positions = _scheme(family, positions)
    if not callable(positions):
        raise TypeError(f"positions must be a function of (height, width, device=...): got {type(positions).__name__}")
    rope = RotaryEmbedding(family)
    _check_model(model, family)
    check_strength(strength)
    _make_rotary(model, rope, positions, keep_pos_embed, strength)
    return vit


def _make_rotary(vit: Any, rope: RotaryEmbedding, positions: Positions, keep_pos_embed: bool, strength: float) -> None:
    """Turn the checked model's classes into the rotary ones."""
    if not vit.dynamic_img_size:
        vit.dynamic_img_size = True
        vit.patch_embed.strict_img_size, vit.patch_embed.flatten = False, False
        vit.patch_embed.output_fmt = Format.NHWC
    if not keep_pos_embed:
        vit.pos_embed = None
    for block in vit.blocks:
        block.__class__ = ROTARY_BLOCKS[type(block)]
        block.attn.__class__ = RotaryTimmAttention
        block.attn.prefix_tokens = vit.num_prefix_tokens
    vit.__class__ = RotaryVisionTransformer
    vit.rope, vit.rope_positions, vit.rope_strength = rope.to(next(vit.parameters()).device), positions, strength


def _scheme(family: Family | Scheme, positions: Positions | None) -> tuple[Family, Positions]:
    """The family and the positions of what `make_rotary` was given."""
    if not isinstance(family, Scheme):
        return family, grid_positions if positions is None else positions
    if family.rotate is not rotate:
        raise ValueError(f"family must be a rotation: got a preset whose rotate is {family.rotate.__name__}")
    merge = getattr(family.positions, "keywords", {}).get("merge", 1)
    if positions is None and merge != 1:
        raise ValueError(
            f"family must have positions of tokens row by row: got a preset with merge={merge}, give it merge=1"
        )
    return family.family, family.positions if positions is None else positions


def _check_model(vit: Any, family: Family) -> None:
    """Raise unless `vit` can be made rotary with `family`; nothing has been changed by then."""
    if isinstance(vit, RotaryVisionTransformer):
        raise TypeError("vit must not be rotary already: make the model anew, or set vit.rope, whose family is "
                        f"{vit.rope.family}")  # fmt: skip
    if type(vit) is not VisionTransformer:
        raise TypeError(f"vit must be a timm VisionTransformer: got {type(vit).__module__}.{type(vit).__qualname__}")
    if not vit.dynamic_img_size and type(vit.patch_embed) is not PatchEmbed:
        raise TypeError(
            f"vit must be created with dynamic_img_size=True, since its patch_embed is a {type(vit.patch_embed).__name__}: "
            f"got dynamic_img_size=False"
        )
    blocks: Any = vit.blocks
    for block in blocks:
        _check_class("blocks", block, tuple(ROTARY_BLOCKS))
        _check_class("attention layers", block.attn, (Attention,))
    if family.columns != 2:
        raise ValueError(f"family must have 2 axes (y, x) for images: got {family.columns} in {family}")
    attention = blocks[0].attn
    if family.head_dim != attention.head_dim:
        raise ValueError(f"family must have the model's head_dim={attention.head_dim}: got head_dim={family.head_dim}")
    if isinstance(family, Mixed):
        depth = len(blocks) if family.blocks is None else family.blocks
        if (family.heads, depth) != (attention.num_heads, len(blocks)):
            raise ValueError(
                f"family must have the model's heads={attention.num_heads} and blocks={len(blocks)}: "
                f"got heads={family.heads} and blocks={family.blocks}"
            )


def _check_class(name: str, module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    if type(module) not in classes:
        wanted = " or ".join(cls.__name__ for cls in classes)
        raise TypeError(f"{name} must be timm's {wanted}: got {type(module).__module__}.{type(module).__qualname__}")
