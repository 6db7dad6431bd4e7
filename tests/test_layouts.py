"""Dtypes and layouts of every kind of position, and the conversion of weights between layouts."""

import pytest
import torch
from torch.nn import functional as F

import axial_rope
from axial_rope import (
    Axial,
    Extended,
    Mixed,
    MRope,
    Periods,
    Pixels,
    RotaryAttention,
    RotaryEmbedding,
    grid_positions,
    layout_permutation,
    rotate,
)
from axial_rope.beyond_rotation import xpos
from axial_rope.conversion import convert_layout, convert_qkv_layout, convert_state_dict_layout, with_layout
from axial_rope.extension import yarn

LAYOUTS = ("interleaved", "half", "half_per_axis")

# dtypes, layouts, ranks ----------------------------------------------------------------------------------------------

ROTATIONS = {
    "image": (Axial(24, "xy"), grid_positions(3, 4)),
    "text": (Axial(24, 1), grid_positions(12)),
    "video": (Axial(24, 3), grid_positions(2, 2, 3)),
    "multimodal": (MRope(24, (4, 4, 4), 100.0, "strided"), grid_positions(2, 2, 3)),
    "periods": (Periods(24), grid_positions(3, 4) / 4),
    "yarn": (yarn(Axial(24, 1), 4.0, 20.0), grid_positions(12)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROTATIONS)
def test_dtypes_survive_with_and_without_a_scale(name, dtype):
    """Pitfalls A5, B1, B2, B3: queries and keys keep their dtype, and low precision is rounded once."""
    family, positions = ROTATIONS[name]
    rotation = RotaryEmbedding(family)(positions)
    for turned in (rotation, *(xpos(rotation, torch.arange(12), center=6, scale_base=8.0))):
        x = torch.randn(2, 3, 12, 24).to(dtype)
        out = rotate(x, turned)
        assert out.dtype == dtype
        if dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(out, rotate(x.float(), turned).to(dtype))
    x = torch.randn(1, 2, 12, 24).to(dtype)
    q, k = rotate(x, rotation), rotate(x, rotation)
    assert F.scaled_dot_product_attention(q, k, x).dtype == dtype


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_every_layout_at_every_number_of_axes(name, layout):
    """Pitfalls F3, F4: against complex numbers in float64, pair by pair."""
    family, positions = ROTATIONS[name]
    family = with_layout(family, layout)
    x = torch.randn(2, 3, 12, 24)
    pairs = axial_rope.pair_channels(layout, family.split)
    angles = positions.double() @ family.frequencies().double()
    expected = torch.view_as_complex(x[..., pairs].double()) * torch.polar(torch.ones_like(angles), angles)
    found = rotate(x, RotaryEmbedding(family)(positions))[..., pairs].double()
    torch.testing.assert_close(found, torch.view_as_real(expected) * family.scale, rtol=0, atol=2e-5)


def test_heads_commute_with_the_rotation_where_their_number_is_that_of_tokens():
    """Pitfall F8."""
    rotation = RotaryEmbedding(MRope(12, (2, 2, 2)))(torch.rand(4, 3) * 5)
    x, order = torch.randn(2, 4, 4, 12), torch.tensor([2, 0, 3, 1])
    assert torch.equal(rotate(x[:, order], rotation), rotate(x, rotation)[:, order])
    assert not torch.equal(rotate(x[:, :, order], rotation), rotate(x, rotation)[:, :, order])


def test_the_whole_width_may_be_rotated_before_heads_are_split():
    """Pitfall F9: a model that does so has head_dim = its inner width."""
    rotation = RotaryEmbedding(Axial(48))(grid_positions(2, 3))
    x = torch.randn(2, 6, 48)
    before = rotate(x, rotation)
    assert before.shape == x.shape and torch.equal(before, rotate(x[:, None], rotation)[:, 0])


# conversion ----------------------------------------------------------------------------------------------------------

CONVERTED = [
    Axial(16, "xy", 100.0, (3, 4)),
    Axial(24, "tyx", pairs_per_axis=(2, 5, 3)),
    Periods(16, layout="half"),
    Pixels(16, layout="half_per_axis"),
    yarn(Axial(16, layout="half"), (2.0, 4.0), 16.0),
]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("family", CONVERTED, ids=lambda family: type(family).__name__)
def test_scores_survive_a_change_of_layout(family, target):
    """Pitfalls F1, F5: with biases, query and key norms, and fewer key heads; v untouched; there and back is the same."""
    torch.manual_seed(0)
    heads, kv_heads = 4, 2
    attention = RotaryAttention(32, heads, kv_heads=kv_heads, head_dim=family.head_dim, qk_norm=True)
    attention.requires_grad_(False)
    for name, parameter in attention.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if "proj" in name else 1.0))
    state = {key: value.clone() for key, value in attention.state_dict().items()}
    converted = convert_state_dict_layout(state, family, target, heads=heads, kv_heads=kv_heads)
    other = with_layout(family, target)
    positions = grid_positions(2, 3) if family.columns == 2 else grid_positions(1, 2, 3)
    x = torch.randn(2, 6, 32)
    before = attention(x, rotation=RotaryEmbedding(family)(positions))
    attention.load_state_dict(converted)
    after = attention(x, rotation=RotaryEmbedding(other)(positions))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6 * before.abs().max().item())
    for key in state:
        same = torch.equal(state[key], converted[key])
        assert same if target == family.layout or key.startswith(("v_", "out_")) else not same or "norm" in key
    back = convert_state_dict_layout(converted, other, family.layout, heads=heads, kv_heads=kv_heads)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_joint_projections_keep_their_values():
    family = Axial(8, "yx", layout="half")
    weight, bias = torch.randn((3 + 2 * 1) * 8, 5), torch.randn((3 + 2 * 1) * 8)
    found = convert_qkv_layout(weight, family, "interleaved", heads=3, kv_heads=1)
    assert torch.equal(found[32:], weight[32:])
    order = layout_permutation("half", "interleaved", family.split, 8)
    for head in range(4):
        assert torch.equal(found[8 * head : 8 * head + 8], weight[8 * head : 8 * head + 8][order])
    state = {"blocks.0.attn.qkv.weight": weight, "blocks.0.attn.qkv.bias": bias, "head.weight": weight}
    converted = convert_state_dict_layout(state, family, "interleaved", heads=3, kv_heads=1)
    assert torch.equal(converted["blocks.0.attn.qkv.weight"], found) and converted["head.weight"] is weight
    assert torch.equal(
        converted["blocks.0.attn.qkv.bias"], convert_qkv_layout(bias, family, "interleaved", heads=3, kv_heads=1)
    )


def test_multihead_attention_of_torch():
    attention, family = torch.nn.MultiheadAttention(16, 2), Axial(8, layout="half")
    state = attention.state_dict()
    converted = convert_state_dict_layout(state, family, "interleaved", heads=2)
    for key in ("in_proj_weight", "in_proj_bias"):
        assert torch.equal(converted[key], convert_qkv_layout(state[key], family, "interleaved", heads=2))
        assert not torch.equal(converted[key], state[key]) or not state[key].any()
    assert converted["out_proj.weight"] is state["out_proj.weight"]


def test_a_family_in_another_layout():
    assert with_layout(Mixed(8, heads=2), "half") == Mixed(8, heads=2, layout="half")
    extended = with_layout(yarn(Axial(8), 2.0, 8.0), "half")
    assert isinstance(extended, Extended) and extended.layout == "half"
    with pytest.raises(ValueError, match="half_per_axis"):
        with_layout(Mixed(8, heads=2), "half_per_axis")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert_layout(torch.zeros(12), Axial(8), "half"), r"a multiple of 8: got shape \(12,\)"),
        (lambda: convert_layout(torch.zeros(8), Axial(8), "neox"), "got 'neox'"),
        (lambda: convert_qkv_layout(torch.zeros(40, 2), Axial(8), "half", heads=2), r"\(2 \+ 2 \* 2\) \* 8 = 48 rows"),
        (lambda: convert_state_dict_layout({"fc": torch.zeros(8)}, Axial(8), "half", heads=1), "got 1 entries without"),
        (
            lambda: convert_state_dict_layout({"q_proj.weight": torch.zeros(24, 2)}, Axial(8), "half", heads=2),
            r"q_proj.weight must have the 2 \* 8 rows of its heads, or those of one: got 24",
        ),
    ],
)
def test_wrong_conversions_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
