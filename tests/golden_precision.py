"""Readers of the bfloat16 files of tests/golden, all compared to the bit.

Ours rotates in float32 and rounds once. So do the references named `exact` below. The others round more often; what they do
is written out here, so that the difference is known to be theirs, and ours is held to the distance that it explains.
"""

import torch

from axial_rope import Axial, Periods, RotaryEmbedding, grid_positions, pair_channels, presets, rotate

BF16 = torch.bfloat16


def round_once(q, scheme, positions, prefix=0):
    rotation = RotaryEmbedding(scheme.family)(positions)
    return rotate(q.to(BF16), rotation, prefix_tokens=prefix).float()


def in_low_precision(x, rotation):
    """cos and sin rounded to bfloat16, and every product and sum rounded too: transformers' language models, and others."""
    first, second = pair_channels(rotation.layout, rotation.split).T
    cos, sin, out = rotation.cos.to(BF16), rotation.sin.to(BF16), x.to(BF16).clone()
    a, b = out[..., first], out[..., second]
    out[..., first], out[..., second] = a * cos + -b * sin, b * cos + a * sin
    return out.float()


def one_axis(golden):
    q, positions = golden.array("q"), golden.array("positions")[:, None]
    family = Axial(golden["head_dim"], 1, golden["theta"])
    exact = round_once(q, presets.Scheme(family, grid_positions), positions)
    yield exact, golden.array("q_rot_llama"), 0.0
    half = presets.Scheme(Axial(golden["head_dim"], 1, golden["theta"], layout="half"), grid_positions)
    expected = golden.array("q_rot_hf")
    yield in_low_precision(q, RotaryEmbedding(half.family)(positions)), expected, 0.0
    yield round_once(q, half, positions), expected, 4 * 2**-8 * q.abs().max().item()


def two_axes(golden):
    """timm, SAM 2, Qwen's vision and Flux round once; timm with a bfloat16 table and V-JEPA 2 don't."""
    q, grid, head_dim = golden.array("q"), golden["grid_hw"], golden["head_dim"]
    timm = presets.Scheme(Axial(head_dim, "yx"), grid_positions)
    schemes = {
        "timm": timm,
        "sam2": presets.sam2(head_dim),
        "qwen2_vision": presets.qwen2_vl_vision(head_dim, merge=1),
        "flux": presets.flux(head_dim, golden["flux_axis_dims"]),
    }
    for name, scheme in schemes.items():
        yield round_once(q, scheme, scheme.positions(*grid)), golden.array(name), 0.0
    rotation = RotaryEmbedding(timm.family)(grid_positions(*grid))
    yield in_low_precision(q, rotation), golden.array("timm_emb_bf16"), 0.0
    yield vjepa2_in_low_precision(q[..., :8]), golden.array("vjepa2_first8"), 0.0


def vjepa2_in_low_precision(x):
    """V-JEPA 2 makes even its angles in bfloat16: at position 34 they are off by up to 0.06 radians."""
    x, pairs = x.to(BF16), x.shape[-1] // 2
    omega = 1.0 / 10000 ** (torch.arange(pairs, dtype=BF16) / pairs)
    angles = torch.arange(x.shape[-2], dtype=BF16)[:, None] * omega
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    across = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return (x * cos + across * sin).float()


def dinov3(golden):
    """DINOv3 rotates in the dtype of its table, prefix tokens' rounding included; with a float32 table it rounds once."""
    q, prefix = golden.array("q"), golden["num_prefix_tokens"]
    scheme = presets.dinov3(golden["head_dim"])
    positions = scheme.positions(*golden["grid_hw"])
    yield round_once(q, scheme, positions, prefix), golden.array("q_rot_bf16_rope32"), 0.0

    # the bfloat16 table: coordinates, periods, angles, cosines and sines all rounded
    family = Periods(golden["head_dim"], periods=scheme.family.period_band(golden["head_dim"] // 4).to(BF16).tolist())
    yield torch.tensor(family.periods), golden.array("periods_bf16"), 0.0
    angles = 2 * torch.pi * dinov3_coordinates(*golden["grid_hw"])[:, :, None] / torch.tensor(family.periods, dtype=BF16)
    angles = angles.flatten(1).tile(2)
    cos, sin = angles.cos(), angles.sin()
    yield cos.float(), golden.array("cos_bf16"), 0.0
    yield sin.float(), golden.array("sin_bf16"), 0.0
    low = q.to(BF16)
    x = low[..., prefix:, :]
    a, b = x.chunk(2, dim=-1)
    expected = torch.cat([low[..., :prefix, :], x * cos + torch.cat([-b, a], dim=-1) * sin], dim=-2).float()
    yield expected, golden.array("q_rot_f32_in"), 0.0
    yield expected, golden.array("q_rot_bf16_in"), 0.0


def dinov3_coordinates(height, width):
    rows, columns = (torch.arange(0.5, n, dtype=BF16) / n for n in (height, width))
    return 2.0 * torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1) - 1.0


def qwen3_text(golden):
    family = presets.qwen3_vl_text(golden["head_dim"], golden["mrope_section"], golden["theta"]).family
    assert family.layout == golden["layout"]
    rotation, q = RotaryEmbedding(family)(golden.array("position_ids")[:, 0].T), golden.array("q")
    yield in_low_precision(q, rotation), golden.array("q_rot"), 0.0
    yield rotate(q.to(BF16), rotation).float(), golden.array("q_rot"), 4 * 2**-8 * q.abs().max().item()


PRECISION = {
    "HF Llama (cos/sin cast to bf16": one_axis,
    "bf16 q (stored as float32) through several references": two_axes,
    "facebookresearch/dinov3 apply_rope: q,k cast to the dtype of sin/cos": dinov3,
    "same, bf16 hidden states": qwen3_text,
}
