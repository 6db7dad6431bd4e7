"""Weights of other RoPE-ViTs in models of make_rotary: the same outputs, on any grid, and every key accounted for."""

import functools

import pytest
import timm
import torch

from axial_rope import Axial, make_rotary, presets
from axial_rope.conversion import rope_vit_weights

SIZE = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64, "num_classes": 5}
MODELS = {
    "vit_small_patch16_rope_mixed_224": (presets.rope_vit_mixed(16, heads=3, blocks=2), {}),
    "vit_small_patch16_rope_mixed_ape_224": (presets.rope_vit_mixed(16, heads=3, blocks=2), {}),
    "vit_small_patch16_rope_224": (presets.rope_vit_axial(16), {}),
    "vit_small_patch16_dinov3": (presets.dinov3(16), {"reg_tokens": 4, "global_pool": "avg", "norm_eps": 1e-5}),
}


@pytest.mark.parametrize("name", MODELS)
def test_timms_own_models(name):
    scheme, options = MODELS[name]
    options, eps = dict(options), options.get("norm_eps", 1e-6)
    options.pop("norm_eps", None)
    theirs = timm.create_model(name, **SIZE, dynamic_img_size=True).eval()
    state = theirs.state_dict()
    for key, tensor in state.items():  # zeros and ones would hide a mistake
        if tensor.dim() < 2 or "token" in key or "pos_embed" in key:
            torch.nn.init.normal_(tensor, mean=float("norm" in key or "gamma" in key), std=0.2)
    pos_embed = "learn" if "pos_embed" in state else "none"
    ours = timm.create_model(
        "vit_small_patch16_224", **SIZE, pos_embed=pos_embed, init_values=1.0, no_embed_class=True,
        norm_layer=functools.partial(torch.nn.LayerNorm, eps=eps), fc_norm=False, **options,
    )  # fmt: skip
    ours = make_rotary(ours, scheme).eval()
    converted = rope_vit_weights(state, heads=3)
    missing, unexpected = ours.load_state_dict(converted.weights, strict=False)
    # what DINOv3 hasn't: a bias of the projection
    assert all(key.endswith("qkv.bias") and "dinov3" in name for key in missing) and not unexpected
    with torch.no_grad():
        for key in missing:
            ours.get_parameter(key).zero_()
        for size in ((64, 64), (48, 80)):
            x = torch.randn(2, 3, *size)
            assert (ours(x) - theirs(x)).abs().max() < 1e-5
    assert set(converted.renamed) | set(converted.dropped) | set(converted.weights) >= set(state)


def test_navers_names():
    table, q, v = torch.randn(2, 4, 6), torch.randn(48), torch.randn(48)
    saved = {"freqs": table, "freqs_t_x": torch.zeros(4), "freqs_t_y": torch.zeros(4), "blocks.0.gamma_2": torch.ones(48)}
    saved |= {"blocks.0.attn.q_bias": q, "blocks.0.attn.v_bias": v, "head.weight": torch.zeros(5, 48)}
    weights, renamed, dropped = rope_vit_weights(saved, heads=3)
    assert torch.equal(weights["rope.frequencies"], table.view(2, 4, 3, 2)[[1, 0]])
    assert torch.equal(weights["blocks.0.attn.qkv.bias"], torch.cat([q, torch.zeros(48), v]))
    assert dropped == ("freqs_t_x", "freqs_t_y") and weights["head.weight"] is saved["head.weight"]
    assert renamed["blocks.0.gamma_2"] == "blocks.0.ls2.gamma" and "head.weight" not in renamed


def test_refusals():
    with pytest.raises(ValueError, match="state_dict must hold the blocks of a ViT: got 1 keys without"):
        rope_vit_weights({"freqs": torch.zeros(2, 4, 6)}, heads=3)
    for shape in ((2, 4, 7), (3, 4, 6), (2, 4, 2, 3)):
        with pytest.raises(ValueError, match=r"freqs must have shape .* for 3 heads: got"):
            rope_vit_weights({"freqs": torch.zeros(shape), "blocks.0.norm1.weight": torch.ones(2)}, heads=3)
    model = make_rotary(timm.create_model("vit_small_patch16_224", **SIZE), Axial(16))
    assert model.state_dict().keys() == rope_vit_weights(model.state_dict(), heads=3).weights.keys()
