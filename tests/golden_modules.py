"""Readers of the module files of tests/golden: weights under the reference's names, an input and an output.

Each yields (found, expected, input) for every output of its file.
"""

import math

import torch
from golden_files import based, by_column
from golden_rotations import edgetam_keys
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

from axial_rope import Axial, RotaryAttention, RotaryEmbedding, grid_positions, make_rotary, presets
from axial_rope.beyond_rotation import pool_keys, rotate_vjepa2


def split_qkv(weights):
    """A joint projection's entries under the names of RotaryAttention; a missing key bias is 0, a masked one too."""
    named = {key.replace("proj.", "out_proj."): value for key, value in weights.items() if not key.startswith("qkv")}
    for part, rows in zip("qkv", weights["qkv.weight"].chunk(3), strict=True):
        named[f"{part}_proj.weight"] = rows
    if "q_bias" in weights:
        biases = [named.pop("q_bias"), torch.zeros_like(weights["v_bias"]), named.pop("v_bias")]
    else:
        biases = (weights["qkv.bias"] * weights.get("qkv.bias_mask", 1.0)).chunk(3)
    for part, bias in zip("qkv", biases, strict=True):
        named[f"{part}_proj.bias"] = bias
    return named


def rotary_attention(weights, dim, heads, **options):
    attention = RotaryAttention(dim, heads, **options).eval().requires_grad_(False)
    attention.load_state_dict(weights)
    return attention


def under(weights, prefix):
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def norm(x, weights, name, eps):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def linear(x, weights, name):
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def self_attention(golden, scheme, weights, x, prefix, **options):
    """RotaryAttention with a preset's rotation over the file's grid."""
    attention = rotary_attention(split_qkv(weights), golden["dim"], golden["heads"], **options)
    rotation = RotaryEmbedding(scheme.family)(scheme.positions(*golden["grid_hw"]))
    return attention(x, rotation=rotation, prefix_tokens=prefix)


def dinov3_attention(golden):
    scheme = presets.dinov3(golden["dim"] // golden["heads"], golden["base"], normalize=golden["normalize_coords"])
    x = golden.array("x")
    found = self_attention(golden, scheme, golden.weights, x, golden["num_prefix_tokens"])
    yield found, golden.array("out"), x


def rope_vit_block(golden):
    scheme = presets.rope_vit_axial(golden["dim"] // golden["heads"], golden["theta"])
    weights, eps, x = golden.weights, golden["norm_eps"], golden.array("x")
    attention, prefix = under(weights, "attn."), golden["num_prefix_tokens"]
    yield self_attention(golden, scheme, attention, x, prefix), golden.array("attn_out"), x  # of x as it comes
    x = x + weights["gamma_1"] * self_attention(golden, scheme, attention, norm(x, weights, "norm1", eps), prefix)
    hidden = F.gelu(linear(norm(x, weights, "norm2", eps), weights, "mlp.fc1"))
    yield x + weights["gamma_2"] * linear(hidden, weights, "mlp.fc2"), golden.array("block_out"), x


def rope_vit_self_attention(golden):
    """Learned frequencies of one attention module."""
    heads, weights, x = golden["heads"], golden.weights, golden.array("x")
    scheme = presets.rope_vit_mixed(golden["dim"] // heads, heads, base=golden["rope_theta"])
    rope = RotaryEmbedding(scheme.family).requires_grad_(False)
    rope.frequencies.copy_(by_column(weights.pop("freqs").reshape(2, heads, -1), "xy"))
    attention = rotary_attention(split_qkv(weights), golden["dim"], heads)
    rotation = rope(scheme.positions(*golden["grid_hw"]))
    yield attention(x, rotation=rotation, prefix_tokens=golden["num_prefix_tokens"]), golden.array("out"), x


def timm_rope(golden, head_dim, layout):
    stated = dict(golden["rope"])
    assert stated.pop("cls") == "RotaryEmbeddingCat" and not stated.pop("in_pixels") and stated.pop("dim") == head_dim
    positions = grid_positions(*golden["grid_hw"], reference=stated.pop("ref_feat_shape", None))
    family = Axial(head_dim, "yx", stated.pop("temperature", 10000.0), layout=layout)
    assert not stated, f"unknown options of timm's rope: {stated}"
    return RotaryEmbedding(family)(positions)


def timm_attention(golden):
    layout = "half" if golden["rotate_half"] else "interleaved"
    rotation = timm_rope(golden, golden["dim"] // golden["heads"], layout)
    weights = split_qkv(golden.weights)
    attention = rotary_attention(weights, golden["dim"], golden["heads"], qk_norm=golden["qk_norm"])
    x = golden.array("x")
    yield attention(x, rotation=rotation, prefix_tokens=golden["num_prefix_tokens"]), golden.array("out"), x


def timm_eva_block(golden):
    """EVA-02's block: attention, then a SwiGLU with a norm inside."""
    eps, weights, x = 1e-6, golden.weights, golden.array("x")
    rotation = timm_rope(golden, golden["dim"] // golden["heads"], "interleaved")
    attention = rotary_attention(split_qkv(under(weights, "attn.")), golden["dim"], golden["heads"])
    options = {"rotation": rotation, "prefix_tokens": golden["num_prefix_tokens"]}
    yield attention(x, **options), golden.array("attn_out"), x  # of x as it comes
    x = x + weights["gamma_1"] * attention(norm(x, weights, "norm1", eps), **options)
    inner = norm(x, weights, "norm2", eps)
    gated = F.silu(linear(inner, weights, "mlp.fc1_g")) * linear(inner, weights, "mlp.fc1_x")
    hidden = linear(norm(gated, weights, "mlp.norm", eps), weights, "mlp.fc2")
    yield x + weights["gamma_2"] * hidden, golden.array("block_out"), x


def timm_eva_model(golden):
    """timm's Eva, through make_rotary on a VisionTransformer that has its weights under its own names."""
    options, heads, depth, dim = dict(golden["kwargs"]), golden["heads"], golden["depth"], golden["embed_dim"]
    vit = VisionTransformer(
        img_size=tuple(golden["img_hw"]),
        patch_size=golden["patch"],
        in_chans=golden["in_chans"],
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=golden["mlp_ratio"],
        init_values=golden["init_values"],
        reg_tokens=options.pop("num_reg_tokens", 0),
        global_pool="avg",
        pos_embed="none",
        num_classes=0,
    )
    vit = make_rotary(vit, eva_scheme(options, dim // heads, heads, depth))
    vit.load_state_dict(eva_weights(golden.weights, depth))
    x = golden.array("x")
    yield vit.eval().requires_grad_(False).forward_features(x), golden.array("out"), x


def eva_scheme(options, head_dim, heads, depth):
    kind, indexing = options.pop("rope_type", "cat"), options.pop("rope_grid_indexing", "ij")
    layout = "half" if options.pop("rope_rotate_half", False) else "interleaved"
    axes = "xy" if indexing == "xy" else "yx"
    reference, offset = options.pop("ref_feat_shape", None), options.pop("rope_grid_offset", 0.0)
    base = options.pop("rope_temperature", 10000.0)
    options.pop("attn_type", None), options.pop("dynamic_img_size", None)  # the same sums in another order
    assert not options, f"unknown options of timm's Eva: {options}"
    if kind == "mixed":
        return presets.rope_vit_mixed(head_dim, heads, depth, base)
    if kind == "dinov3":
        return presets.dinov3(head_dim, base)
    assert kind == "cat"
    family = Axial(head_dim, axes, base, layout=layout)
    return presets.Scheme(
        family, lambda h, w, device: grid_positions(h, w, offset=offset, reference=reference, device=device)
    )


def eva_weights(weights, depth):
    for index in range(depth):
        for gamma in (1, 2):
            weights[f"blocks.{index}.ls{gamma}.gamma"] = weights.pop(f"blocks.{index}.gamma_{gamma}")
        q = weights.pop(f"blocks.{index}.attn.q_bias", None)
        if q is not None:
            v = weights.pop(f"blocks.{index}.attn.v_bias")
            weights[f"blocks.{index}.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if "rope.freqs" in weights:
        weights["rope.frequencies"] = by_column(weights.pop("rope.freqs"), "xy")
    return weights


def sam2_attention(golden):
    """RoPEAttention: self-attention, or memory frames with the queries' grid and object pointers at the end."""
    width, height = golden["feat_sizes_wh"]
    dim, heads = golden["embedding_dim"], golden["num_heads"]
    head_dim = dim // golden["downsample_rate"] // heads
    attention = rotary_attention(golden.weights, dim, heads, context_dim=golden.get("kv_in_dim", dim), head_dim=head_dim)
    scheme = presets.sam2(head_dim, golden["rope_theta"])
    rope, positions = RotaryEmbedding(scheme.family), scheme.positions(height, width)
    q, k, v = (golden.array(name) for name in "qkv")
    keys = rope(positions.repeat(golden.get("memory_frames", 1), 1))
    pointers = golden.get("num_k_exclude_rope", 0)
    found = attention(q, k, v, rotation=rope(positions), key_rotation=keys, key_suffix_tokens=pointers)
    yield found, golden.array("out"), q


def sam2_memory_attention(golden):
    """SAM 2's MemoryAttention: batch second, self-attention, cross-attention, MLP."""
    for name in ("pos_enc_at_attn", "pos_enc_at_cross_attn_queries"):
        assert not golden[name]
    assert golden["pos_enc_at_cross_attn_keys"] and golden["pos_enc_at_input"] and golden["activation"] == "relu"
    width, height = golden["feat_sizes_wh"]
    dim, heads, context = golden["d_model"], golden["num_heads"], golden["kv_in_dim"]
    scheme = presets.sam2(dim // heads, golden["rope_theta"])
    rope, positions = RotaryEmbedding(scheme.family), scheme.positions(height, width)
    rotation, keys = rope(positions), rope(positions.repeat(golden["memory_frames"], 1))
    curr, curr_pos, memory, memory_pos = (
        golden.array(name).transpose(0, 1) for name in ("curr", "curr_pos", "memory", "memory_pos")
    )
    x, all_weights = curr + 0.1 * curr_pos, golden.weights
    for index in range(golden["num_layers"]):
        weights = under(all_weights, f"layers.{index}.")
        assert weights["linear1.weight"].shape[0] == golden["dim_feedforward"]
        attend = rotary_attention(under(weights, "self_attn."), dim, heads)
        x = x + attend(norm(x, weights, "norm1", 1e-5), rotation=rotation)
        cross = rotary_attention(under(weights, "cross_attn_image."), dim, heads, context_dim=context)
        pointers = golden["num_obj_ptr_tokens"]
        x = x + cross(
            norm(x, weights, "norm2", 1e-5),
            memory + memory_pos,
            memory,
            rotation=rotation,
            key_rotation=keys,
            key_suffix_tokens=pointers,
        )
        hidden = F.relu(linear(norm(x, weights, "norm3", 1e-5), weights, "linear1"))
        x = x + linear(hidden, weights, "linear2")
    yield norm(x, all_weights, "norm", 1e-5).transpose(0, 1), golden.array("out"), golden.array("curr")


def edgetam_attention(golden):
    width, height = golden["q_sizes_wh"]
    dim, heads = golden["embedding_dim"], golden["num_heads"]
    rope = RotaryEmbedding(presets.sam2(dim // heads, golden["rope_theta"]).family)
    attention = rotary_attention(golden.weights, dim, heads, context_dim=golden["kv_in_dim"])
    q, k, v = (golden.array(name) for name in "qkv")
    rotations = {"rotation": rope(grid_positions(height, width)), "key_rotation": rope(edgetam_keys(golden))}
    yield attention(q, k, v, **rotations, key_suffix_tokens=golden["num_k_exclude_rope"]), golden.array("out"), q


def efficienttam_attention(golden):
    """Keys are rotated, pooled, and weighted by their number: on the scores (1) or on every channel (2)."""
    dim, heads, side = golden["embedding_dim"], golden["num_heads"], golden["grid"]
    scheme = presets.sam2(dim // heads, golden["rope_theta"])
    rope, positions = RotaryEmbedding(scheme.family), scheme.positions(side, side)
    pointers, weights = golden["num_k_exclude_rope"], golden.weights
    q, k, v = (
        linear(golden.array(name), weights, f"{name}_proj").unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv"
    )
    q = scheme.rotate(q, rope(positions))
    k = scheme.rotate(k, rope(positions.repeat(golden["memory_frames"], 1)), suffix_tokens=pointers)
    k, v, log_size = pool_keys(k, v, (side, side), pool=golden["pool"], suffix_tokens=pointers)
    assert log_size.max().item() == torch.tensor(2 * math.log(golden["pool"])).item()
    assert golden["kv_in_dim"] == golden.array("k").shape[-1]
    if golden.reference.endswith("2"):
        k, log_size = k + log_size[:, None], None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if log_size is None else log_size[None])
    yield linear(out.transpose(1, 2).flatten(2), weights, "out_proj"), golden.array("out"), golden.array("q")


def vjepa2(golden):
    """The rotation alone."""
    scheme = presets.vjepa2(golden["head_dim"])
    assert scheme.family.split == (golden["axis_dim"] // 2,) * 3
    positions = scheme.positions(*golden["grid_thw"])
    assert torch.equal(positions, golden.array("positions").float()) and golden.axes == "tyx"
    family = based(scheme, golden)
    q = golden.array("q")
    yield rotate_vjepa2(q, RotaryEmbedding(family)(positions)), golden.array("q_rot"), q


def vjepa2_attend(golden, x, positions):
    scheme, heads, weights = presets.vjepa2(golden["head_dim"]), golden["heads"], golden.weights
    rotation = RotaryEmbedding(scheme.family)(positions)
    q, k, v = linear(x, weights, "qkv").unflatten(-1, (3, heads, golden["head_dim"])).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(scheme.rotate(q, rotation), scheme.rotate(k, rotation), v)
    assert golden["dim"] == x.shape[-1]
    return linear(out.transpose(1, 2).flatten(2), weights, "proj")


def vjepa2_attention(golden):
    """All tokens, and kept tokens, which have the positions of their ids."""
    x, positions = golden.array("x"), grid_positions(*golden["grid_thw"])
    yield vjepa2_attend(golden, x, positions), golden.array("out"), x
    kept = golden.array("mask").long()
    masked = torch.stack([sample[ids] for sample, ids in zip(x, kept, strict=True)])
    yield vjepa2_attend(golden, masked, positions[kept]), golden.array("out_masked"), x


def vjepa2_actions(golden):
    """In each frame first the action tokens, at the origin of the image, then patches scaled to the training grid."""
    frames, height, width = golden["grid_thw"]
    size = golden["grid_size"]
    patches = grid_positions(1, height, width) * torch.tensor([1.0, size / height, size / width])
    frame = torch.cat([torch.zeros(golden["action_tokens"], 3), patches])
    positions = torch.cat([frame + torch.tensor([float(time), 0.0, 0.0]) for time in range(frames)])
    yield vjepa2_attend(golden, golden.array("x"), positions), golden.array("out"), golden.array("x")


MODULES = {
    "facebookresearch/dinov3 SelfAttention": dinov3_attention,
    "naver-ai/rope-vit RoPE_Layer_scale_init_Block": rope_vit_block,
    "naver-ai/rope-vit self-attn/rope_self_attn.py RoPEAttention(rope_mixed=True)": rope_vit_self_attention,
    "timm.layers.attention.AttentionRope": timm_attention,
    "timm.models.eva.EvaBlock(attn_type='eva', swiglu, scale_mlp)": timm_eva_block,
    "timm.models.eva.Eva tiny": timm_eva_model,
    "sam2 RoPEAttention cross-attention": sam2_attention,
    "sam2.modeling.sam.transformer.RoPEAttention (self)": sam2_attention,
    "sam2.modeling.memory_attention.MemoryAttention": sam2_memory_attention,
    "facebookresearch/EdgeTAM RoPEAttentionv2": edgetam_attention,
    "yformer/EfficientTAM EfficientRoPEAttention1": efficienttam_attention,
    "yformer/EfficientTAM EfficientRoPEAttention2": efficienttam_attention,
    "facebookresearch/vjepa2 rotate_queries_or_keys": vjepa2,
    "facebookresearch/vjepa2 RoPEAttention": vjepa2_attention,
    "facebookresearch/vjepa2 ACRoPEAttention": vjepa2_actions,
}
