"""Memory attention against the numbers of SAM 2, EdgeTAM and EfficientTAM, and against transformers."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from axial_rope import (
    Axial,
    Memory,
    MemoryAttention,
    MemoryCrossAttention,
    RotaryAttention,
    RotaryEmbedding,
    grid_positions,
    memory_from_frames,
    rotate,
    sine_positions,
)
from axial_rope.conversion.sam2 import memory_attention_from_sam2, pool_rotated, sam2_memory_weights
from tests.freeze_sam2 import FRAMES, GRID, POINTERS, make_inputs

GOLDEN = Path(__file__).parent / "golden"


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if file[key].dtype.kind == "f"}
        config = json.loads(str(file["config"])) if "config" in file.files else {}
    weights = {key.removeprefix("sd/"): arrays.pop(key) for key in list(arrays) if key.startswith("sd/")}
    return arrays, config, weights


def close(actual, expected, angle=0.0):
    """fp32 rounding of the computation and of angles up to `angle`."""
    tolerance = (2e-6 + 1e-7 * angle) * max(1.0, expected.abs().max().item() / 3)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def repeated(positions, frames):
    return positions.repeat(frames, 1)


# -- attention modules --


def cross_attention(config, weights):
    head_dim = weights["q_proj.weight"].shape[0] // config["num_heads"]
    attend = MemoryCrossAttention(
        config["embedding_dim"], config["num_heads"], context_dim=config["kv_in_dim"], head_dim=head_dim
    )
    attend.load_state_dict(weights)
    return attend.eval(), RotaryEmbedding(Axial(head_dim, "xy", config["rope_theta"]))


def test_sam2_self_attention():
    arrays, config, weights = golden("sam2_rope_attention_self")
    attend = RotaryAttention(config["embedding_dim"], config["num_heads"])
    attend.load_state_dict(weights)
    rotation = RotaryEmbedding(Axial(16, "xy", config["rope_theta"]))(grid_positions(5, 7))
    out = attend(arrays["q"], arrays["k"], arrays["v"], rotation=rotation, key_rotation=rotation)
    close(out, arrays["out"], angle=6)


@pytest.mark.parametrize("kind", ["cross", "cross_down2_noptr", "cross_only_ptr"])
def test_sam2_cross_attention(kind):
    arrays, config, weights = golden(f"sam2_rope_attention_{kind}")
    attend, rope = cross_attention(config, weights)
    keys = repeated(grid_positions(5, 7), config["memory_frames"])
    out = attend(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        rotation=rope(grid_positions(5, 7)),
        key_rotation=rope(keys),
        key_suffix_tokens=config["num_k_exclude_rope"],
    )
    close(out, arrays["out"], angle=6)


def test_sam2_rotation_of_repeated_frames():
    arrays, config, _ = golden("sam2_apply_rotary_enc")
    rope = RotaryEmbedding(Axial(32, "xy", config["theta"]))
    close(rotate(arrays["q"], rope(grid_positions(5, 7))), arrays["q_rot"], angle=6)
    close(rotate(arrays["k"], rope(repeated(grid_positions(5, 7), 3))), arrays["k_rot"], angle=6)


def edgetam_memory(tokens, config):
    """Per frame latents without a place, then latents on a grid of their own, whose cells are counted as they are."""
    per_frame = config["latents_1d"] + config["latents_2d"]
    frames = tokens[:, : config["memory_frames"] * per_frame].split(per_frame, dim=1)
    width, height = config["k_sizes_wh"]
    memory = memory_from_frames(frames, grids=[(height, width)] * len(frames), latents=config["latents_1d"])
    return replace(memory, grid=None)


def test_edgetam_rotation():
    arrays, config, _ = golden("edgetam_apply_rotary_v2")
    rope = RotaryEmbedding(Axial(16, "xy"))
    close(rotate(arrays["q"], rope(grid_positions(5, 7))), arrays["q_rot"], angle=6)
    keys = edgetam_memory(arrays["k"][0], config).positions_on((5, 7))
    turned = rotate(arrays["k"], rope(keys), suffix_tokens=config["num_k_exclude_rope"])
    close(turned, arrays["k_rot"], angle=6)
    for unplaced in (slice(0, 4), slice(10, 14), slice(20, 23)):  # pitfall I3: bit by bit
        assert torch.equal(turned[:, :, unplaced], arrays["k"][:, :, unplaced])


def test_edgetam_cross_attention():
    arrays, config, weights = golden("edgetam_rope_attention_v2")
    attend, rope = cross_attention(config, weights)
    keys = edgetam_memory(arrays["k"], config).positions_on((5, 7))
    options = {"rotation": rope(grid_positions(5, 7)), "key_suffix_tokens": config["num_k_exclude_rope"]}
    out = attend(arrays["q"], arrays["k"], arrays["v"], key_rotation=rope(keys), **options)
    close(out, arrays["out"], angle=6)


@pytest.mark.parametrize(("number", "bias"), [(1, "scores"), (2, "keys")])
def test_efficienttam_cross_attention(number, bias):
    arrays, config, weights = golden(f"efficienttam_attention{number}")
    attend, rope = cross_attention(config, weights)
    out = attend(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        rotation=rope(grid_positions(4, 4)),
        key_rotation=rope(repeated(grid_positions(4, 4), config["memory_frames"])),
        key_suffix_tokens=config["num_k_exclude_rope"],
        pooling=pool_rotated((4, 4), 2, bias=bias),
    )
    close(out, arrays["out"], angle=6)


# -- the whole block --


def test_sam2_memory_attention():
    arrays, config, weights = golden("sam2_memory_attention")
    attend = memory_attention_from_sam2(weights, heads=config["num_heads"]).eval()
    memory, memory_pos = arrays["memory"].transpose(0, 1), arrays["memory_pos"].transpose(0, 1)
    out = attend(
        arrays["curr"].transpose(0, 1),
        Memory(memory[:, :70], pointers=memory[:, 70:], key_position=memory_pos),
        grid=(5, 7),
        position=arrays["curr_pos"].transpose(0, 1),
    )
    close(out, arrays["out"].transpose(0, 1), angle=6)


@pytest.fixture(scope="module")
def frozen():
    arrays, _, weights = golden("../frozen/sam2_memory")
    return arrays, weights


def as_ours(inputs, pointers):
    x, position, memory, memory_position = (tensor.transpose(0, 1) for tensor in inputs)
    end = memory.shape[1] - pointers
    return x, Memory(memory[:, :end], pointers=memory[:, end:], key_position=memory_position), position


@pytest.mark.parametrize("pointers", POINTERS)
@pytest.mark.parametrize("frames", FRAMES)
def test_equal_to_sam2(frozen, frames, pointers):
    arrays, weights = frozen
    attend = memory_attention_from_sam2(weights).eval()
    x, memory, position = as_ours(make_inputs(frames, pointers), pointers)
    out = attend(x, memory, grid=GRID, position=position)
    with torch.no_grad():  # another order of the same sums
        torch.testing.assert_close(attend(x, memory, grid=GRID, position=position), out, rtol=0, atol=5e-6)
    if frames or pointers:
        torch.testing.assert_close(out, arrays[f"out/{frames}_{pointers}"].transpose(0, 1), rtol=0, atol=1e-5)
    else:  # sam2's tracker then passes its memory attention by
        assert torch.equal(out, x + attend.no_memory)


def transformers_attention(weights):
    from transformers import Sam2VideoConfig
    from transformers.models.sam2_video import modeling_sam2_video as modeling

    config = Sam2VideoConfig(
        memory_attention_hidden_size=32,
        memory_attention_num_layers=2,
        memory_attention_feed_forward_hidden_size=48,
        memory_attention_rope_feat_sizes=list(GRID[::-1]),
    )
    theirs = modeling.Sam2VideoMemoryAttention(config)
    for layer in theirs.layers:  # the width of its memory is written in the code
        layer.cross_attn_image.k_proj = torch.nn.Linear(16, 32)
        layer.cross_attn_image.v_proj = torch.nn.Linear(16, 32)
    renamed = {
        key.replace(".out_proj.", ".o_proj.").replace("norm", "layer_norm"): tensor for key, tensor in weights.items()
    }
    theirs.load_state_dict(renamed)
    return theirs.eval(), renamed


@pytest.mark.parametrize(("frames", "pointers"), list(product(FRAMES, POINTERS))[1:])
def test_equal_to_transformers(frozen, frames, pointers):
    """But for no frames and no pointers: its tracker, like sam2's, then passes its memory attention by."""
    theirs, renamed = transformers_attention(frozen[1])
    attend = memory_attention_from_sam2(renamed).eval()
    inputs = make_inputs(frames, pointers, batch=1)
    curr, curr_pos, memory, memory_pos = inputs
    with torch.no_grad():
        expected = theirs(curr, memory, curr_pos, memory_pos, pointers)  # (N, 1, 1, dim)
        x, memory, position = as_ours(inputs, pointers)
        out = attend(x, memory, grid=GRID, position=position)
    torch.testing.assert_close(out[0], expected.reshape(out[0].shape), rtol=0, atol=1e-5)


def test_equal_to_the_installed_sam2():
    """The frozen numbers are those of the package, where it is installed."""
    pytest.importorskip("sam2", reason="sam2 comes as source only and builds against a second torch", exc_type=ImportError)
    from tests.freeze_sam2 import make_attention

    theirs = make_attention()
    attend = memory_attention_from_sam2(theirs.state_dict()).eval()
    inputs = make_inputs(7, 4)
    with torch.no_grad():
        expected = theirs(inputs[0], inputs[2], inputs[1], inputs[3], num_obj_ptr_tokens=4)
        x, memory, position = as_ours(inputs, 4)
        torch.testing.assert_close(attend(x, memory, grid=GRID, position=position), expected.transpose(0, 1))


# -- weights --


def test_conversion_names_every_key(frozen):
    _, weights = frozen
    whole = {f"memory_attention.{key}": tensor for key, tensor in weights.items()}
    age, none = torch.randn(7, 1, 1, 16), torch.randn(1, 1, 32)
    pointer = {"obj_ptr_tpos_proj.weight": torch.randn(16, 32), "obj_ptr_tpos_proj.bias": torch.randn(16)}
    other = {"image_encoder.neck.layers.0.norm1.weight": torch.ones(3), "sam_mask_decoder.norm.weight": torch.ones(3)}
    converted = sam2_memory_weights({**whole, "maskmem_tpos_enc": age, "no_mem_embed": none, **pointer, **other})
    assert converted.unused == tuple(other)
    assert len(converted.renamed) == len(whole) + 4
    attend = memory_attention_from_sam2({**whole, "maskmem_tpos_enc": age, "no_mem_embed": none, **pointer, **other})
    assert torch.equal(attend.age_embedding, age[:, 0, 0])
    assert torch.equal(attend.no_memory, none[0, 0])
    assert torch.equal(attend.pointer_age.weight, pointer["obj_ptr_tpos_proj.weight"])
    assert torch.equal(attend.layers[1].self_attention.q_proj.weight, weights["layers.1.self_attn.q_proj.weight"])


def test_conversion_refuses(frozen):
    _, weights = frozen
    with pytest.raises(ValueError, match="must hold a memory attention of sam2 or transformers: got 1 other keys"):
        sam2_memory_weights({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"lacks \['layers.1.linear2.bias'\]"):
        memory_attention_from_sam2({key: value for key, value in weights.items() if key != "layers.1.linear2.bias"})


def test_age_rows_and_pointer_ages_by_hand(frozen):
    """Slot 0 takes the last row, slot n row n - 1; the sine embedding and the projected pointer ages are SAM 2.1's."""
    _, weights = frozen
    age = torch.randn(7, 1, 1, 16)
    pointer = {"obj_ptr_tpos_proj.weight": torch.randn(16, 32), "obj_ptr_tpos_proj.bias": torch.randn(16)}
    attend = memory_attention_from_sam2({**weights, "maskmem_tpos_enc": age, **pointer}).eval()
    frames = [torch.randn(1, 15, 16) for _ in range(3)]
    pointers, ages = torch.randn(1, 2, 32), torch.tensor([9.0, 1.0])
    memory = memory_from_frames(frames, grids=[GRID] * 3, slots=[0, 6, 1], pointers=pointers, pointer_ages=ages)
    x = torch.randn(1, 15, 32)
    sine = sine_positions(grid_positions(*GRID), GRID, 16)
    rows = torch.cat([sine + age[row, 0, 0] for row in (6, 5, 0)])
    wave = ages[:, None] / 15 / 10000 ** (torch.arange(0, 16).div(2, rounding_mode="floor") * 2 / 16)
    projected = torch.cat([wave.sin(), wave.cos()], 1) @ pointer["obj_ptr_tpos_proj.weight"].T
    projected = projected + pointer["obj_ptr_tpos_proj.bias"]
    by_hand = Memory(
        torch.cat(frames, 1),
        pointers=pointers,
        pointer_ages=ages,
        key_position=torch.cat([rows, projected.repeat_interleave(2, 0)]),
    )
    bare = memory_attention_from_sam2(weights).eval()
    torch.testing.assert_close(attend(x, memory, grid=GRID), bare(x, by_hand, grid=GRID), rtol=0, atol=1e-5)


def test_sine_positions_are_sam2s():
    """Written once more from the formula, for a grid that isn't square."""
    h, w, dim = 3, 4, 16
    table = sine_positions(grid_positions(h, w), (h, w), dim)
    for y in range(h):
        for x in range(w):
            for channel in range(dim):
                place = (y + 1) / h if channel < dim // 2 else (x + 1) / w
                i = channel % (dim // 2)
                phase = place * 2 * np.pi / 10000 ** (2 * (i // 2) / (dim // 2))
                expected = np.sin(phase) if i % 2 == 0 else np.cos(phase)
                assert abs(table[y * w + x, channel].item() - expected) < 1e-5


def test_default_block_learns_with_default_arguments():
    attend = MemoryAttention(dim=32, memory_dim=8, depth=1, mlp_dim=64)
    memory = memory_from_frames([torch.randn(2, 6, 8)], grids=[(2, 3)], ages=[1.0])
    attend(torch.randn(2, 24, 32), memory, grid=(4, 6)).square().mean().backward()
    unused = [name for name, parameter in attend.named_parameters() if parameter.grad is None]
    assert unused == ["no_memory"]
