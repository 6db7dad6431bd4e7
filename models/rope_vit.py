"""RoPE-ViT: timm's VisionTransformer with the position encoding of your choice, by a short name such as "S/16"."""

from __future__ import annotations

from typing import NamedTuple

from timm.models.vision_transformer import VisionTransformer

from axial_rope import Axial, Mixed, make_rotary

__all__ = ["ROPES", "SIZES", "patch_size", "rope_vit"]


class Size(NamedTuple):
    """Width in channels, depth in blocks, attention heads."""

    width: int
    depth: int
    heads: int


SIZES = {
    "N": Size(64, 4, 2),  # our own, for the 8x8 digits
    "Ti": Size(192, 12, 3),  # DeiT, arXiv 2012.12877, table 1
    "S": Size(384, 12, 6),  # DeiT, arXiv 2012.12877, table 1
    "B": Size(768, 12, 12),  # ViT, arXiv 2010.11929, table 1
    "L": Size(1024, 24, 16),  # ViT, arXiv 2010.11929, table 1
}
ROPES = ("axial", "mixed", "learned", "none")


def patch_size(size: str) -> int:
    """Patch of a size such as "S/16", in pixels; ValueError for a size that is none."""
    name, _, patch = size.partition("/")
    if name not in SIZES or not patch.isdecimal() or int(patch) < 1:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, a slash and the patch such as 'S/16': got {size!r}")
    return int(patch)


def rope_vit(
    size: str,
    rope: str = "axial",
    *,
    num_classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    class_token: bool = False,
    drop_path: float = 0.0,
) -> VisionTransformer:
    """Build a vision transformer: images (B, channels, height, width) -> logits (B, num_classes).

    Height and width may differ from `image_size` and from each other, as long as they are multiples of the patch.

    Parameters
    ----------
    size
        Name of the size, a slash and the patch in pixels: "Ti/16", "S/16", "B/16", "L/16" or "N/2".
    rope
        "axial" (base 100) or "mixed" (base 10, frequencies learned for each block and head), both after Heo et al.,
        arXiv 2403.13298; "learned" (absolute embedding, resampled to other grids); or "none" (no positions).
    num_classes
        Width of the head; 0 leaves the pooled features.
    image_size
        Size of the training images in pixels, one number or (height, width).
    channels
        Channels of the images.
    class_token
        Whether to classify from a class token rather than from the mean of the patch tokens.
    drop_path
        Stochastic depth of the last block; earlier blocks get proportionally less.

    Returns
    -------
    VisionTransformer
        timm's model, rotary where `rope` is "axial" or "mixed".

    Raises
    ------
    ValueError
        If the size or the rope is unknown, or the image doesn't consist of whole patches.

    Examples
    --------
    >>> import torch
    >>> vit = rope_vit("N/2", "axial", num_classes=10, image_size=8, channels=1)
    >>> vit(torch.zeros(1, 1, 8, 12)).shape
    torch.Size([1, 10])
    """
    patch = patch_size(size)
    if rope not in ROPES:
        raise ValueError(f"rope must be one of {', '.join(ROPES)}: got {rope!r}")
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    if any(side < patch or side % patch for side in sides):
        raise ValueError(f"image_size must be a multiple of the patch = {patch}: got image_size={image_size}")
    width, depth, heads = SIZES[size.partition("/")[0]]
    vit = VisionTransformer(
        img_size=image_size,
        patch_size=patch,
        in_chans=channels,
        num_classes=num_classes,
        global_pool="token" if class_token else "avg",
        class_token=class_token,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        pos_embed="learn" if rope == "learned" else "none",
        dynamic_img_size=True,
        drop_path_rate=drop_path,
    )
    if rope == "axial":
        return make_rotary(vit, Axial(head_dim=width // heads, axes=2, base=100.0))
    if rope == "mixed":
        return make_rotary(vit, Mixed(head_dim=width // heads, heads=heads, blocks=depth, base=10.0))
    return vit
