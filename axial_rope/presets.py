"""Schemes of the field by the names that people know, each a family and the rule for its positions.

    family, positions, rotate = presets.dinov3(head_dim=64)
    rotation = RotaryEmbedding(family)(positions(14, 14))
    q = rotate(q, rotation, prefix_tokens=5)

    vit = make_rotary(vit, presets.dinov3(head_dim=64))

``python -m axial_rope.presets`` prints them all in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from axial_rope.beyond_rotation import rotate_vjepa2
from axial_rope.frequencies import Axial, Family, Mixed, MRope, Periods
from axial_rope.positions import (
    centered_positions,
    cropped_positions,
    grid_positions,
    merged_positions,
    multimodal_positions,
)
from axial_rope.rotation import rotate

__all__ = [
    "Scheme",
    "cogvideox",
    "dinov3",
    "eva02",
    "flux",
    "gemma4_vision",
    "hunyuan_video",
    "llama4_vision",
    "perception_encoder",
    "pixtral",
    "qwen2_vl_text",
    "qwen2_vl_vision",
    "qwen3_vl_text",
    "rope_vit_axial",
    "rope_vit_mixed",
    "sam2",
    "table",
    "vjepa2",
    "wan",
]


class Scheme(NamedTuple):
    """All that a model needs to know of its position encoding.

    Attributes
    ----------
    family
        For `RotaryEmbedding`.
    positions
        From a grid to positions: ``positions(height, width)`` or ``positions(frames, height, width)``, with ``device=``.
    rotate
        What is done to queries and keys: `axial_rope.rotate`, but for V-JEPA 2.
    """

    family: Family
    positions: Callable[..., Any]
    rotate: Callable[..., Tensor] = rotate


def rope_vit_axial(head_dim: int, base: float = 100.0) -> Scheme:
    """RoPE-Axial of rope-vit (arXiv 2403.13298): x before y, positions 0, 1, 2, ...; class token first, unrotated."""
    return Scheme(Axial(head_dim, "xy", base), grid_positions)


def rope_vit_mixed(head_dim: int, heads: int, blocks: int | None = None, base: float = 10.0) -> Scheme:
    """RoPE-Mixed of rope-vit (arXiv 2403.13298): learned for each head and block, both axes in every pair."""
    return Scheme(Mixed(head_dim, heads, blocks, base=base), grid_positions)


def dinov3(
    head_dim: int, base: float = 100.0, periods: Sequence[float] | None = None, normalize: str = "separate"
) -> Scheme:
    """DINOv3 (arXiv 2508.10104): periods over cell centres in (-1, 1); class and four storage tokens first, unrotated.

    `periods` replaces the base by those of a checkpoint (``rope_embed.periods``), which were rounded to bfloat16. In
    training DINOv3 stretches the positions at random, see `axial_rope.augment_positions`.
    """
    family = Periods(head_dim, base=base) if periods is None else Periods(head_dim, periods=periods)
    return Scheme(family, partial(centered_positions, normalize=normalize))


def eva02(head_dim: int, reference: Sequence[int] = (16, 16)) -> Scheme:
    """EVA-02 (arXiv 2303.11331): y before x, positions interpolated to the grid of the pretraining; class token first."""
    return Scheme(Axial(head_dim, "yx"), partial(grid_positions, reference=tuple(reference)))


def perception_encoder(head_dim: int, class_token: bool = True) -> Scheme:
    """Perception Encoder (arXiv 2504.13181): x before y; counted from 1 where there is a class token, else from 0."""
    return Scheme(Axial(head_dim, "xy"), partial(grid_positions, offset=1.0 if class_token else 0.0))


def sam2(head_dim: int = 256, base: float = 10000.0) -> Scheme:
    """SAM 2's memory attention (arXiv 2408.00714): x before y; the keys of each frame have the positions of the queries.

    Also EfficientTAM and SAM 3's tracker, and EdgeTAM with a grid of its own for the keys. Object pointers are the last
    keys, unrotated.
    """
    return Scheme(Axial(head_dim, "xy", base), grid_positions)


def qwen2_vl_vision(head_dim: int = 80, merge: int = 2) -> Scheme:
    """The vision tower of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: y before x, halves, tokens in 2 x 2 blocks.

    Its positions are in the order of its tokens. Give ``merge=1`` for a model with row-major tokens, such as timm's.
    """
    return Scheme(Axial(head_dim, "yx", layout="half"), partial(merged_positions, merge=merge))


def qwen2_vl_text(
    head_dim: int = 128,
    sections: Sequence[int] = (16, 24, 24),
    base: float = 1000000.0,
    tokens_per_second: float | None = None,
) -> Scheme:
    """M-RoPE of Qwen2-VL (arXiv 2409.12191), and with ``tokens_per_second=2`` of Qwen2.5-VL: contiguous sections.

    Its positions are called with the parts of a sequence, see `axial_rope.multimodal_positions`.
    """
    positions = partial(multimodal_positions, merge=2, tokens_per_second=tokens_per_second)
    return Scheme(MRope(head_dim, sections, base), positions)


def qwen3_vl_text(head_dim: int = 128, sections: Sequence[int] = (24, 20, 20), base: float = 5000000.0) -> Scheme:
    """Interleaved M-RoPE of Qwen3-VL (arXiv 2511.21631): the pairs go to t, y, x in turn; each frame is an image.

    Its positions are called with the parts of a sequence, see `axial_rope.multimodal_positions`.
    """
    return Scheme(MRope(head_dim, sections, base, order="strided"), partial(multimodal_positions, merge=2))


def pixtral(head_dim: int, layout: str = "interleaved") -> Scheme:
    """Pixtral (arXiv 2410.07073): the even frequencies of one series to y, the odd ones to x.

    Mistral's weights are interleaved, those of transformers have ``layout="half"``.
    """
    return Scheme(Axial(head_dim, "yx", layout=layout, dealt=True), grid_positions)


def llama4_vision(head_dim: int = 88, base: float = 10000.0) -> Scheme:
    """Llama 4's vision tower, and torchtune's: x before y, counted from 1; class token last, unrotated."""
    return Scheme(Axial(head_dim, "xy", base), partial(grid_positions, offset=1.0))


def gemma4_vision(head_dim: int, base: float = 100.0) -> Scheme:
    """Gemma 4's vision tower: x before y, each axis a block of its own, split in halves."""
    return Scheme(Axial(head_dim, "xy", base, layout="half_per_axis"), grid_positions)


def wan(head_dim: int = 128) -> Scheme:
    """Wan 2.1 (arXiv 2503.20314): a third of the head to each of t, y and x, what is left over to t."""
    side = head_dim // 6
    return Scheme(Axial(head_dim, "tyx", pairs_per_axis=(head_dim // 2 - 2 * side, side, side)), grid_positions)


def hunyuan_video(head_dim: int = 128, dims: Sequence[int] = (16, 56, 56), base: float = 256.0) -> Scheme:
    """HunyuanVideo (arXiv 2412.03603): `dims` channels for t, y and x, base 256; text tokens last, unrotated."""
    return Scheme(Axial(head_dim, "tyx", base, _pairs(dims)), grid_positions)


def cogvideox(head_dim: int = 64, crop: Sequence[Sequence[float]] | None = None) -> Scheme:
    """CogVideoX (arXiv 2408.06072): a quarter of the head to t, the rest to y and x; text tokens first, unrotated.

    `crop` is the part ((top, left), (bottom, right)) of the base grid over which a video of another size is laid; without it
    positions are counted, as CogVideoX 1.5 does.
    """
    if head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16 for CogVideoX's split: got head_dim={head_dim}")
    split = (head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16)
    rule = grid_positions if crop is None else partial(_cropped_video, crop=crop)
    return Scheme(Axial(head_dim, "tyx", pairs_per_axis=split), rule)


def flux(head_dim: int = 128, dims: Sequence[int] = (16, 56, 56)) -> Scheme:
    """Flux 1: `dims` channels for an id, y and x, the id 0 in images; text tokens first, at the origin or unrotated."""
    return Scheme(Axial(head_dim, "tyx", pairs_per_axis=_pairs(dims)), partial(grid_positions, 1))


def vjepa2(head_dim: int = 64) -> Scheme:
    """V-JEPA 2 (arXiv 2506.09985): equal parts of the head to t, y and x, the rest unrotated.

    The scheme's `rotate` is that of the released checkpoints, which turns the members of a pair by different angles, see
    `axial_rope.beyond_rotation.rotate_vjepa2`. To train anew, use `axial_rope.rotate` with the same rotation.
    """
    return Scheme(Axial(head_dim, "tyx", pairs_per_axis=(head_dim // 3 // 2,) * 3), grid_positions, rotate_vjepa2)


def _pairs(dims: Sequence[int]) -> tuple[int, ...]:
    if any(dim % 2 for dim in dims):
        raise ValueError(f"dims must be even numbers of channels: got {tuple(dims)}")
    return tuple(dim // 2 for dim in dims)


def _cropped_video(frames: int, height: int, width: int, *, crop: Sequence[Sequence[float]], device: Any = None) -> Tensor:
    (top, left), (bottom, right) = crop
    start, stop = (0.0, top, left), (float(frames), bottom, right)
    return cropped_positions(frames, height, width, start=start, stop=stop, device=device)


# name, an example, coordinates, source
_ROWS: list[tuple[str, Scheme, str, str]] = [
    ("rope_vit_axial", rope_vit_axial(64), "0, 1, ...", "naver-ai/rope-vit"),
    ("rope_vit_mixed", rope_vit_mixed(64, 6, 12), "0, 1, ...", "naver-ai/rope-vit"),
    ("dinov3", dinov3(64), "centres in (-1, 1)", "facebookresearch/dinov3"),
    ("eva02", eva02(64), "k / n * reference", "baaivision/EVA"),
    ("perception_encoder", perception_encoder(64), "1, 2, ...", "facebookresearch/perception_models"),
    ("sam2", sam2(256), "0, 1, ...", "facebookresearch/sam2"),
    ("qwen2_vl_vision", qwen2_vl_vision(80), "0, 1, ..., 2 x 2 blocks", "transformers"),
    ("qwen2_vl_text", qwen2_vl_text(128), "text, image, video", "QwenLM/Qwen3-VL, transformers"),
    ("qwen3_vl_text", qwen3_vl_text(128), "text, image, video", "QwenLM/Qwen3-VL, transformers"),
    ("pixtral", pixtral(64), "0, 1, ...", "mistralai/mistral-inference"),
    ("llama4_vision", llama4_vision(88), "1, 2, ...", "transformers, torchtune"),
    ("gemma4_vision", gemma4_vision(64), "0, 1, ...", "transformers"),
    ("wan", wan(128), "0, 1, ...", "Wan-Video/Wan2.1"),
    ("hunyuan_video", hunyuan_video(128), "0, 1, ...", "Tencent-Hunyuan/HunyuanVideo"),
    ("cogvideox", cogvideox(64), "0, 1, ..., or a crop", "diffusers"),
    ("flux", flux(128), "0; 0, 1, ...", "black-forest-labs/flux"),
    ("vjepa2", vjepa2(64), "0, 1, ...", "facebookresearch/vjepa2"),
]


def table() -> str:
    """The presets as a Markdown table."""
    lines = ["| preset | axes | pairs per axis | layout | base | coordinates | source |", "|" + "---|" * 7]
    for name, scheme, coordinates, source in _ROWS:
        family = scheme.family
        axes, split = str(getattr(family, "axes", "tyx")), ", ".join(map(str, family.split))
        if isinstance(family, MRope):
            split = f"{', '.join(map(str, family.sections))} {family.order}"
        elif isinstance(family, Mixed):
            axes, split = "yx", f"{family.pairs}, learned"
        elif isinstance(family, Axial) and family.dealt:
            split += ", dealt in turn"
        tail = family.head_dim - 2 * family.pairs
        split += f" of {family.head_dim // 2}" if tail else ""
        layout = family.layout if scheme.rotate is rotate else "pairs of unequal angles"
        base = f"{getattr(family, 'base', 0):g}".replace("e+0", "e")
        lines.append(f"| `{name}` | {axes} | {split} | {layout} | {base} | {coordinates} | {source} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
