"""Presets and M-RoPE."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import axial_rope
from axial_rope import (
    Axial,
    MRope,
    Periods,
    RotaryEmbedding,
    make_rotary,
    multimodal_positions,
    pixel_positions,
    presets,
    rotate,
)

ROOT = Path(__file__).parents[1]

# presets -------------------------------------------------------------------------------------------------------------

IMAGES = {
    "rope_vit_axial": presets.rope_vit_axial(64),
    "rope_vit_mixed": presets.rope_vit_mixed(64, heads=2, blocks=2),
    "dinov3": presets.dinov3(64),
    "eva02": presets.eva02(64),
    "perception_encoder": presets.perception_encoder(64),
    "sam2": presets.sam2(64),
    "qwen2_vl_vision": presets.qwen2_vl_vision(64, merge=1),
    "pixtral": presets.pixtral(64),
    "llama4_vision": presets.llama4_vision(64),
    "gemma4_vision": presets.gemma4_vision(64),
}
VIDEOS = {
    "wan": presets.wan(),
    "hunyuan_video": presets.hunyuan_video(),
    "cogvideox": presets.cogvideox(crop=((0, 2), (30, 43))),
    "vjepa2": presets.vjepa2(),
}


def small_vit():
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 128, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**sizes, dynamic_img_size=True).eval().requires_grad_(False)


@pytest.mark.parametrize("name", IMAGES)
def test_a_preset_makes_a_vit_rotary(name):
    """Family and positions come from the preset; a family and positions given apart make the same model."""
    family, positions, _ = IMAGES[name]
    x = torch.randn(1, 3, 32, 48)
    vits = [small_vit() for _ in range(3)]
    torch.manual_seed(1)
    make_rotary(vits[0], IMAGES[name])
    torch.manual_seed(1)
    make_rotary(vits[1], family, positions=positions)
    outs = [vit(x) for vit in vits]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert vits[0].rope.family == family and vits[0].rope_positions == positions


@pytest.mark.parametrize("name", IMAGES)
def test_a_preset_can_be_pickled_and_its_positions_overruled(name):
    again = pickle.loads(pickle.dumps(IMAGES[name]))
    assert again.family == IMAGES[name].family and torch.equal(again.positions(2, 3), IMAGES[name].positions(2, 3))
    vit = make_rotary(small_vit(), IMAGES[name], positions=pixel_positions)
    assert vit.rope_positions is pixel_positions


@pytest.mark.parametrize("name", VIDEOS)
def test_a_preset_of_videos_rotates(name):
    family, positions, turn = VIDEOS[name]
    x = torch.randn(1, 2, 3 * 4 * 5, family.head_dim)
    out = turn(x, RotaryEmbedding(family)(positions(3, 4, 5)))
    assert out.shape == x.shape and not torch.equal(out, x)
    tail = 2 * family.pairs
    assert torch.equal(out[..., tail:], x[..., tail:])


def test_splits_of_videos():
    """Channels of t, y and x, and the tail: Wan 44/42/42, Hunyuan 16/56/56, CogVideoX 16/24/24, V-JEPA 20/20/20/4."""
    splits = {name: [2 * pairs for pairs in scheme.family.split] for name, scheme in VIDEOS.items()}
    assert splits == {
        "wan": [44, 42, 42],
        "hunyuan_video": [16, 56, 56],
        "cogvideox": [16, 24, 24],
        "vjepa2": [20, 20, 20],
    }


def test_a_portrait_crop_is_the_transpose_of_a_landscape_one():
    """Pitfall D5."""
    landscape = presets.cogvideox(crop=((0, 2), (30, 43))).positions(1, 6, 9).unflatten(0, (6, 9))
    portrait = presets.cogvideox(crop=((2, 0), (43, 30))).positions(1, 9, 6).unflatten(0, (9, 6))
    assert torch.equal(portrait.transpose(0, 1)[..., [0, 2, 1]], landscape)


def test_text_presets_take_the_parts_of_a_sequence():
    parts = [axial_rope.Text(2), axial_rope.Image(4, 6), axial_rope.Video(2, 4, 4, 1.5)]
    for scheme, times in ((presets.qwen2_vl_text(), None), (presets.qwen2_vl_text(tokens_per_second=2), 2)):
        expected = multimodal_positions(parts, merge=2, tokens_per_second=times)
        found = scheme.positions(parts)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert presets.qwen2_vl_text().family == MRope(128, (16, 24, 24), 1e6)
    assert presets.qwen3_vl_text().family == MRope(128, (24, 20, 20), 5e6, "strided")


def test_a_preset_that_is_no_rotation_makes_no_vit_rotary():
    vit = small_vit()
    with pytest.raises(ValueError, match="rotate is rotate_vjepa2"):
        make_rotary(vit, presets.vjepa2(64))
    assert type(vit) is VisionTransformer


def test_the_module_prints_every_preset():
    code = [sys.executable, "-W", "error", "-m", "axial_rope.presets"]
    printed = subprocess.run(code, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    named = re.findall(r"^\| `(\w+)` \|", printed, flags=re.MULTILINE)
    assert sorted(named) == sorted(set(presets.__all__) - {"Scheme", "table"})
    assert printed.strip() in (ROOT / "README.md").read_text()
    assert "| `dinov3` | yx | 16, 16 | half | 100 | centres in (-1, 1) | facebookresearch/dinov3 |" in printed
    assert "| `qwen3_vl_text` | tyx | 24, 20, 20 strided | half | 5e6 |" in printed


# families ------------------------------------------------------------------------------------------------------------


def test_orders_of_sections():
    """Pitfall F6."""
    assert MRope(24, (4, 4, 4)).axis_of_pair == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert MRope(24, (4, 4, 4), order="strided").axis_of_pair == (0, 1, 2) * 4
    assert MRope(128, (24, 20, 20), order="strided").axis_of_pair == (0, 1, 2) * 20 + (0,) * 4


def test_mrope_keeps_one_series():
    for order in ("contiguous", "strided"):
        family = MRope(40, (4, 3, 3), 100.0, order, rotary_dim=20, layout="interleaved")
        table = family.frequencies()
        assert torch.equal(table.sum(dim=0), Axial(20, 1, 100.0).frequencies()[0])
        assert torch.equal(table.argmax(dim=0), torch.tensor(family.axis_of_pair))
        x = torch.randn(1, 1, 2, 40)
        out = rotate(x, RotaryEmbedding(family)(torch.ones(2, 3)))
        assert torch.equal(out[..., 20:], x[..., 20:]) and not torch.equal(out[..., :20], x[..., :20])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("order", ["contiguous", "strided"])
def test_mrope_moves_the_pairs_of_an_axis_alone(order, layout):
    family = MRope(24, (3, 4, 5) if order == "contiguous" else (5, 4, 3), 100.0, order, layout=layout)
    rope, x = RotaryEmbedding(family), torch.randn(1, 1, 1, 24)
    pairs = axial_rope.pair_channels(layout, family.split)
    for axis in range(3):
        step = torch.zeros(1, 3)
        step[0, axis] = 0.5
        changed = (rotate(x, rope(step)) != x).flatten()[pairs].any(dim=-1)
        assert changed.tolist() == [own == axis for own in family.axis_of_pair]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MRope(128, (16, 24, 25)), r"add up to 128 / 2 = 64: got \(16, 24, 25\), 65 pairs"),
        (lambda: MRope(128, (32, 32)), "three numbers"),
        (lambda: MRope(12, (0, 3, 3), order="strided"), r"strided order: got \(0, 3, 3\), dealt \(2, 2, 2\)"),
        (lambda: MRope(12, (2, 2, 2), order="mixed"), "got 'mixed'"),
        (lambda: MRope(12, (2, 2, 2), layout="half_per_axis"), "half_per_axis"),
        (lambda: MRope(12, (2, 2, 2), rotary_dim=16), "between 2 and head_dim=12: got rotary_dim=16"),
        (lambda: MRope(12, (1, 1, 1), rotary_dim=5), "rotary_dim must be even"),
        (lambda: MRope(12, (2, 2, 2), base=0.0), "base must be positive"),
        (lambda: Axial(32, dealt=True, pairs_per_axis=(4, 8)), "equal pairs_per_axis: got"),
        (lambda: Axial(32, dealt=True, base=(10.0, 20.0)), "one base"),
        (lambda: presets.hunyuan_video(128, (15, 56, 56)), r"even numbers of channels: got \(15, 56, 56\)"),
        (lambda: presets.hunyuan_video(64), "between 1 and head_dim / 2 = 32 pairs: got .* 64 pairs"),
        (lambda: presets.cogvideox(40), "multiple of 16 .* got head_dim=40"),
    ],
)
def test_wrong_families_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_options_raise():
    """Pitfalls A7, F1: no option of a scheme is swallowed, and none falls back to another scheme."""
    with pytest.raises(TypeError, match="dtype"):
        Periods(32, dtype="bf16")
    with pytest.raises(ValueError, match=r"family must be one of .*: got 'dinov3'"):
        axial_rope.family_from_dict({"family": "dinov3", "head_dim": 32})
    with pytest.raises(ValueError, match="rotate_half"):
        axial_rope.family_from_dict({"family": "Periods", "head_dim": 32, "rotate_half": True})
    with pytest.raises(AttributeError, match="rope_vit"):
        axial_rope.presets.rope_vit  # noqa: B018
