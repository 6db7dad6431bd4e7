"""Readers of the rotation files of tests/golden: each reference in our words."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from golden_files import based, by_column

from axial_rope import (
    Axial,
    MRope,
    Pixels,
    augment_positions,
    axis_positions,
    centered_positions,
    cropped_positions,
    grid_positions,
    merged_positions,
    pixel_positions,
    presets,
)
from axial_rope.extension import interpolate, ntk, yarn


@dataclass
class Rotated:
    """What a rotation file says, in our words."""

    family: Any
    positions: torch.Tensor
    prefix: int = 0
    suffix: int = 0
    frequencies: torch.Tensor | None = None  # learned ones
    keys: tuple | None = None  # positions and suffix of `k`
    axes: str | None = None  # the order of the file's columns, where its config doesn't state it


# one axis ------------------------------------------------------------------------------------------------------------


def one_axis(golden):
    """Llama, RoFormer, GPT-J and GPT-NeoX: the file holds the positions of its tokens."""
    rotary_dim = golden.get("rotary_dim", golden.head_dim)
    family = Axial(golden.head_dim, 1, golden["theta"], (rotary_dim // 2,), golden["layout"])
    positions = golden.array("positions").float()[:, None]
    assert positions[0, 0] == golden.get("position_offset", positions[0, 0])
    return Rotated(family, positions)


def lucidrains_1d(golden):
    family = Axial(golden.head_dim, 1, golden.get("theta", 10000.0), (golden["dim"] // 2,), golden["layout"])
    family = ntk(family, golden["theta_rescale_factor"])
    positions = grid_positions(golden.array("q").shape[-2], offset=golden["offset"]) / golden["interpolate_factor"]
    return Rotated(family, positions)


def yarn_1d(golden):
    family = Axial(golden.head_dim, 1, golden["theta"], layout=golden["layout"])
    family = yarn(family, golden["factor"], golden["original_max_position_embeddings"])
    assert abs(family.scale - golden["attention_factor"]) < 1e-9
    return Rotated(family, golden.array("positions").float()[:, None])


# images --------------------------------------------------------------------------------------------------------------


def rope_vit_axial(golden):
    return Rotated(based(presets.rope_vit_axial(golden.head_dim), golden), grid_positions(*golden["grid_hw"]))


def rope_vit_mixed(golden):
    """rope-vit's and timm's learned frequencies: the draw of the seed, then the file's own."""
    heads, depth, axes = golden["heads"], golden["depth"], golden.axes
    assert golden.get("grid_indexing", "xy") == "xy"
    family = based(presets.rope_vit_mixed(golden.head_dim, heads, depth), golden)
    table = by_column(golden.array("freqs").reshape(2, depth, heads, -1), axes)
    torch.manual_seed(golden["torch_manual_seed"])
    torch.testing.assert_close(family.frequencies(), table, rtol=0, atol=1e-7)
    return Rotated(family, grid_positions(*golden["grid_hw"]), frequencies=table)


def rope_vit_swin(golden):
    family = based(presets.rope_vit_mixed(golden.head_dim, golden["heads"]), golden)
    table = by_column(golden.array("rope_freqs"), "xy")
    if table[0, :, 0].abs().max() < 1e-6:  # the axial variant
        torch.testing.assert_close(replace(family, random_directions=False).frequencies(), table, rtol=0, atol=1e-7)
    return Rotated(family, grid_positions(*golden["window_hw"]), frequencies=table, axes="xy")


def timm_cat(golden):
    """timm's RotaryEmbeddingCat: every option of its grid."""
    if golden.get("in_pixels", True):
        return timm_pixels(golden)
    family = Axial(golden.head_dim, golden.axes, golden["temperature"], layout=golden["layout"])
    assert (golden.get("grid_indexing", "ij") == "xy") == (family.axes == "xy")
    assert golden.get("rotate_half", False) == (family.layout == "half")
    grid, offset = golden["grid_hw"], golden.get("grid_offset", 0.0)
    if golden.get("grid_type", "index") == "centered":
        positions = centered_positions(*grid, normalize=golden.get("normalize_coords", "separate"), offset=offset)
    else:
        assert golden.get("grid_type", "index") == "index"
        positions = grid_positions(*grid, offset=offset, reference=golden.get("ref_feat_shape", None))
    return Rotated(family, positions)


def timm_pixels(golden):
    assert golden.get("in_pixels", True)
    spacing = "linear" if golden.get("linear_bands", False) else "log"
    family = Pixels(golden.head_dim, golden.axes, golden["max_res"], spacing, layout=golden["layout"])
    return Rotated(family, pixel_positions(*golden["grid_hw"]))


def dinov3(golden):
    """DINOv3's and timm's port; periods from a base or a range, which the file's periods repeat."""
    scheme = presets.dinov3(golden.head_dim, normalize=golden["normalize_coords"])
    base, shortest, longest = golden["base|temperature"], golden.get("min_period", None), golden.get("max_period", None)
    period_range = None if shortest is None else (shortest, longest)
    family = replace(scheme.family, base=base, period_range=period_range)
    if "periods" in golden.arrays:
        torch.testing.assert_close(family.period_band(family.split[0]), golden.array("periods"), rtol=1e-6, atol=0)
        given = replace(family, base=None, period_range=None, periods=golden.array("periods").tolist())
        torch.testing.assert_close(given.frequencies(), family.frequencies(), rtol=1e-6, atol=0)
    return Rotated(family, scheme.positions(*golden["grid_hw"]))


def timm_dinov3(golden):
    """timm spells a range of periods ``min * (max / min) ** e``, which float32 rounds elsewhere than DINOv3's own."""
    said = dinov3(golden)
    if said.family.period_range is not None:
        shortest, longest = said.family.period_range
        periods = shortest * (longest / shortest) ** torch.linspace(0, 1, said.family.split[0])
        said.family = replace(said.family, base=None, period_range=None, periods=periods.tolist())
    return said


def dinov3_augmented(golden):
    scheme = presets.dinov3(golden.head_dim)
    torch.manual_seed(golden["torch_manual_seed"])
    positions = augment_positions(
        scheme.positions(*golden["grid_hw"]),
        shift=golden["shift_coords"],
        jitter=golden["jitter_coords"],
        rescale=golden["rescale_coords"],
    )
    plain = (scheme.positions(*golden["grid_hw"]) + golden.array("shift")) * golden.array("jitter")
    torch.testing.assert_close(positions, plain * golden.array("rescale"), rtol=0, atol=0)
    return Rotated(scheme.family, positions)


def eva02(golden):
    reference, side = golden["pt_seq_len"], golden["ft_seq_len"]
    scheme = presets.eva02(golden.head_dim, (reference, reference))
    return Rotated(based(scheme, golden), scheme.positions(side, side))


def perception_encoder(golden):
    scheme = presets.perception_encoder(golden.head_dim, class_token=golden["use_cls_token"])
    assert scheme.positions.keywords["offset"] == golden["offset"]
    return Rotated(based(scheme, golden), scheme.positions(*golden["grid_hw"]), prefix=int(golden["use_cls_token"]))


def sam2(golden):
    scheme = presets.sam2(golden.head_dim)
    positions = scheme.positions(*golden["grid_hw"])
    return Rotated(based(scheme, golden), positions, keys=(positions.repeat(golden["repeats"], 1), 0))


def edgetam_keys(golden):
    """Positions of EdgeTAM's keys: in each frame 1-D latents at the origin, then 2-D latents on a grid of their own."""
    width, height = golden["k_sizes_wh"]
    assert golden["latents_2d"] == width * height
    frame = torch.cat([torch.zeros(golden["latents_1d"], 2), grid_positions(height, width)])
    return frame.repeat(golden["memory_frames"], 1)


def edgetam(golden):
    width, height = golden["q_sizes_wh"]
    family = based(presets.sam2(golden.head_dim), golden)
    return Rotated(family, grid_positions(height, width), keys=(edgetam_keys(golden), golden["num_k_exclude_rope"]))


def sam3_vitdet(golden):
    grid = golden["grid_hw"]
    scale = golden["scale_pos"]
    assert abs(scale - golden["rope_pt_size"][0] / grid[1]) < 1e-6 or abs(scale - golden["rope_pt_size"][0] / grid[0]) < 1e-6
    return Rotated(based(presets.sam2(golden.head_dim), golden), grid_positions(*grid) * scale)


def sam3_ve(golden):
    side = golden["seq_len"]
    positions = grid_positions(side, side) * (golden["pt_seq_len"] / side) + golden["offset"]
    return Rotated(based(presets.sam2(golden.head_dim), golden), positions)


def qwen_vision(golden):
    scheme = presets.qwen2_vl_vision(golden.head_dim, merge=golden["spatial_merge_size"])
    positions = torch.cat(
        [merged_positions(h, w, merge=golden["spatial_merge_size"], frames=t) for t, h, w in golden["grid_thw"]]
    )
    assert torch.equal(positions, golden.array("position_ids").float())
    assert torch.equal(scheme.positions(*golden["grid_thw"][0][1:]), positions[: np.prod(golden["grid_thw"][0][1:])])
    return Rotated(based(scheme, golden), positions)


def pixtral(golden):
    scheme = presets.pixtral(golden.head_dim, golden["layout"])
    return Rotated(based(scheme, golden), scheme.positions(*golden["grid_hw"]))


def llama4(golden):
    scheme = presets.llama4_vision(golden.head_dim)
    assert scheme.positions.keywords["offset"] == golden["offset"]
    return Rotated(based(scheme, golden), scheme.positions(golden["grid"], golden["grid"]), suffix=1)


def torchtune(golden):
    """Tiles stand where the samples of a batch do."""
    scheme = presets.llama4_vision(golden.head_dim)
    assert scheme.positions.keywords["offset"] == golden["offset"]
    assert golden["dim"] == golden.head_dim and golden["num_tiles"] == golden.array("q").shape[0]
    last = int(golden["append_cls_token"])
    side = golden["patch_grid"]
    return Rotated(based(scheme, golden), scheme.positions(side, side), prefix=1 - last, suffix=last)


def gemma4(golden):
    scheme = presets.gemma4_vision(golden.head_dim)
    return Rotated(based(scheme, golden), scheme.positions(*golden["grid_hw"]))


def lucidrains_axial(golden):
    """get_axial_freqs: the same frequencies on each axis, `dim` channels each; the rest of the head isn't rotated."""
    grid, pairs = golden["grid"], golden["dim"] // 2
    axes = golden.axes if "axis_order" in golden.config else "tyx"[-len(grid) :]
    split, layout, head_dim = (pairs,) * len(grid), golden["layout"], golden.head_dim
    if golden.get("freqs_for", "lang") == "pixel":
        family = Pixels(head_dim, axes, golden["max_freq"], "linear", split, layout)
        return Rotated(family, pixel_positions(*grid), axes=axes)
    family = Axial(head_dim, axes, golden.get("theta", 10000.0), split, layout)
    return Rotated(family, grid_positions(*grid, offset=golden.get("offsets", 0.0)), axes=axes)


# text, images and videos ---------------------------------------------------------------------------------------------


def qwen2_text(golden):
    family = replace(presets.qwen2_vl_text().family, head_dim=golden.head_dim, sections=golden["mrope_section"])
    return Rotated(based(presets.Scheme(family, None), golden), golden.array("position_ids")[:, 0].T)


def qwen3_text(golden):
    family = replace(presets.qwen3_vl_text().family, head_dim=golden.head_dim, sections=golden["mrope_section"])
    return Rotated(based(presets.Scheme(family, None), golden), golden.array("position_ids")[:, 0].T)


def timm_mrope(golden):
    """timm counts y and x and leaves all else to t, whatever its section says."""
    pairs = golden.head_dim // 2
    y, x = (len(range(axis, min(3 * golden["mrope_section"][axis], pairs), 3)) for axis in (1, 2))
    family = MRope(golden.head_dim, (pairs - y - x, y, x), golden["temperature"], "strided", layout=golden["layout"])
    return Rotated(family, grid_positions(1, *golden["grid_hw"]))


def video_family(scheme, golden):
    """The preset's family with the file's split; Wan's and CogVideoX's own splits are the same."""
    split = [dim // 2 for dim in golden["axis_dims"]]
    return replace(based(scheme, golden), head_dim=golden.head_dim, pairs_per_axis=split)


def wan(golden):
    scheme = presets.wan(golden.head_dim)
    family = video_family(scheme, golden)
    assert family.split == scheme.family.split
    return Rotated(family, scheme.positions(*golden["grid_thw"]), suffix=golden.get("padding_tokens", 0))


def hunyuan(golden):
    scheme = presets.hunyuan_video()
    family, positions = video_family(scheme, golden), scheme.positions(*golden["grid_thw"])
    if "theta_rescale_factor" in golden.config:
        family = ntk(family, golden["theta_rescale_factor"])
    return Rotated(family, positions * torch.tensor(golden.get("interpolation_factor", [1.0] * 3)))


def cogvideox(golden):
    crop = golden.get("crops_coords", None)
    scheme = presets.cogvideox(crop=crop)
    family, grid = video_family(scheme, golden), golden["grid_thw"]
    positions = scheme.positions(*grid)
    if crop is not None:
        (top, left), (bottom, right) = crop
        again = cropped_positions(*grid, start=(0, top, left), stop=(grid[0], bottom, right))
        assert torch.equal(positions, again)
    return Rotated(family, positions)


def flux(golden):
    scheme = presets.flux()
    positions = torch.cat([torch.zeros(golden["text_tokens"], 3), scheme.positions(*golden["grid_hw"])])
    assert torch.equal(positions, golden.array("positions"))
    return Rotated(video_family(scheme, golden), positions)


def allegro(golden):
    split = [dim // 2 for dim in golden["axis_dims"]]
    family = Axial(golden.head_dim, golden.axes, golden["theta"], split, golden["layout"])
    scale = golden["interpolation_scale"]
    positions = axis_positions(*(torch.arange(n) / s for n, s in zip(golden["grid_thw"], scale, strict=True)))
    stretched = interpolate(family, scale).frequencies()
    torch.testing.assert_close(stretched * torch.tensor(scale)[:, None], family.frequencies())
    return Rotated(family, positions)


ROTATIONS = {
    "meta-llama/llama llama/model.py precompute_freqs_cis": one_axis,
    "transformers RoFormerSelfAttention": one_axis,
    "transformers gptj": one_axis,
    "transformers GPTNeoXRotaryEmbedding": one_axis,
    "rotary_embedding_torch RotaryEmbedding.rotate_queries_or_keys": lucidrains_1d,
    "transformers LlamaRotaryEmbedding rope_type=yarn": yarn_1d,
    "naver-ai/rope-vit models/vit_rope.py compute_axial_cis": rope_vit_axial,
    "naver-ai/rope-vit models/vit_rope.py init_random_2d_freqs": rope_vit_mixed,
    "naver-ai/rope-vit SwinTransformer RoPEWindowAttention": rope_vit_swin,
    "timm RotaryEmbeddingCat": timm_cat,
    "timm RotaryEmbedding (in_pixels": timm_pixels,
    "timm RotaryEmbeddingMixed": rope_vit_mixed,
    "timm RotaryEmbeddingDinoV3": timm_dinov3,
    "timm RotaryEmbeddingMRope": timm_mrope,
    "facebookresearch/dinov3 RopePositionEmbedding + rope_apply (eval)": dinov3,
    "facebookresearch/dinov3 RopePositionEmbedding (train)": dinov3_augmented,
    "baaivision/EVA EVA-02": eva02,
    "facebookresearch/perception_models core/vision_encoder/rope.py": perception_encoder,
    "sam2 compute_axial_cis + apply_rotary_enc": sam2,
    "EdgeTAM apply_rotary_enc_v2": edgetam,
    "facebookresearch/sam3 model/vitdet.py": sam3_vitdet,
    "facebookresearch/sam3 sam/rope.py VisionRotaryEmbeddingVE": sam3_ve,
    "transformers Qwen2VLVisionRotaryEmbedding": qwen_vision,
    "transformers PixtralVisionRotaryEmbedding": pixtral,
    "mistralai/mistral-inference precompute_freqs_cis_2d": pixtral,
    "transformers Llama4VisionRotaryEmbedding": llama4,
    "torchtune VisionRotaryPositionalEmbeddings": torchtune,
    "transformers Gemma4VisionRotaryEmbedding": gemma4,
    "rotary_embedding_torch get_axial_freqs": lucidrains_axial,
    "transformers Qwen2VLRotaryEmbedding (contiguous": qwen2_text,
    "transformers Qwen3VLTextRotaryEmbedding (interleaved": qwen3_text,
    "Wan-Video/Wan2.1": wan,
    "diffusers WanRotaryPosEmbed": wan,
    "Tencent-Hunyuan/HunyuanVideo get_nd_rotary_pos_embed": hunyuan,
    "diffusers HunyuanVideoRotaryPosEmbed": hunyuan,
    "same with theta_rescale_factor and interpolation_factor": hunyuan,
    "diffusers get_3d_rotary_pos_embed(grid_type=": cogvideox,
    "diffusers FluxPosEmbed": flux,
    "black-forest-labs/flux math.rope": flux,
    "diffusers get_3d_rotary_pos_embed_allegro": allegro,
}
