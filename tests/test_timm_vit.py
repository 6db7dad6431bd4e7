import copy
import functools
import pickle

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models import vision_transformer
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3

from axial_rope import Axial, Mixed, RotaryEmbedding, centered_positions, grid_positions, make_rotary, presets, rotate


def tiny(**options):
    """A two-block ViT of 4 heads of 8, with every position-related weight away from zero."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5} | options
    vit = VisionTransformer(**options)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit.eval()


FAMILIES = [Axial(8, base=100.0), Axial(8, base=100.0, layout="half"), Mixed(8, heads=4, blocks=2), Mixed(8, heads=4)]
VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "layer_scale": {"init_values": 0.5},
    "registers": {"reg_tokens": 3, "no_embed_class": True},
    "no_class_token": {"class_token": False, "global_pool": "avg"},
    "dynamic": {"dynamic_img_size": True},
    "post_norm": {"block_fn": vision_transformer.ResPostBlock},
    "pre_norm": {"pre_norm": True, "scale_attn_norm": True},
    "no_pos_embed": {"pos_embed": "none", "reg_tokens": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[2]], ids=repr)
@pytest.mark.parametrize("fused", [True, False])
def test_strength_0_changes_no_bit(variant, family, fused):
    set_fused_attn(fused)
    try:
        vit = tiny(**VARIANTS[variant])
    finally:
        set_fused_attn(True)
    x, keys = torch.randn(2, 3, 32, 32), list(vit.state_dict())
    expected = vit(x)
    rotary = make_rotary(vit, family, strength=0.0)
    assert torch.equal(rotary(x), expected)
    assert [key for key in rotary.state_dict() if key != "rope.frequencies"] == keys
    rotary.rope_strength = 1.0
    assert (rotary(x) - expected).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "patch"),
    [
        ("vit_small_patch16_224", {}, 16),
        ("vit_base_patch14_reg4_dinov2", {"img_size": 224}, 14),
        ("deit3_small_patch16_224", {}, 16),
    ],
)
def test_models_of_timm(name, options, patch):
    vit = timm.create_model(name, depth=3, **options).eval()
    x = torch.randn(1, 3, 224, 224)
    expected = vit(x)
    rotary = make_rotary(vit, Axial(head_dim=64, base=100.0), strength=0.0)
    assert torch.equal(rotary(x), expected)
    rotary.rope_strength = 1.0
    twin = pickle.loads(pickle.dumps(copy.deepcopy(rotary)))
    for grid in [(10, 20), (14, 6)]:
        image = torch.randn(1, 3, grid[0] * patch, grid[1] * patch)
        assert torch.equal(rotary(image), twin(image))
    rotary.patch_embed.dynamic_img_pad = True
    for size in [(160, 320), (224, 96)]:
        whole = [-(-side // patch) for side in size]
        image = torch.randn(1, 3, *size)
        padded = torch.zeros(1, 3, whole[0] * patch, whole[1] * patch)
        padded[..., : size[0], : size[1]] = image
        assert torch.equal(rotary(image), twin(padded))
        (features,) = rotary.forward_intermediates(image, indices=[0], intermediates_only=True)
        assert list(features.shape[-2:]) == whole


def reference_features(vit, x, rotation_of_block):
    """The forward pass written out, with queries and keys rotated."""
    x = vit._pos_embed(vit.patch_embed(x))
    x = vit.norm_pre(x)
    prefix = vit.num_prefix_tokens
    for index, block in enumerate(vit.blocks):
        attn, y = block.attn, block.norm1(x)
        q, k, v = attn.qkv(y).reshape(*y.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k = (rotate(t, rotation_of_block(index), prefix_tokens=prefix) for t in (attn.q_norm(q), attn.k_norm(k)))
        y = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + block.ls1(attn.proj(y))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return vit.norm(x)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("size", [(32, 32), (16, 56), (56, 8)])
def test_equal_to_the_pass_written_out_on_any_grid(family, size):
    """Pitfalls D3, D4, D7, E6, G1: rows and columns, prefix tokens, grids never seen."""
    vit = make_rotary(tiny(reg_tokens=2, qk_norm=True), family)
    rope, positions = vit.rope, grid_positions(size[0] // 8, size[1] // 8)

    def rotation_of_block(index):
        rotation = rope(positions)
        return rotation.block(index) if rotation.cos.dim() == 4 else rotation

    x = torch.randn(2, 3, *size)
    expected = reference_features(vit, x, rotation_of_block)
    torch.testing.assert_close(vit.forward_features(x), expected, atol=2e-5, rtol=1e-4)


def test_grids_of_the_same_area_differ():
    """Pitfall D3."""
    vit = make_rotary(tiny(pos_embed="none"), FAMILIES[0])
    patches = torch.randn(1, 16, 3, 8, 8)
    outputs = [
        vit(patches.unflatten(1, (h, w)).permute(0, 3, 1, 4, 2, 5).reshape(1, 3, 8 * h, 8 * w))
        for h, w in [(2, 8), (8, 2), (4, 4)]
    ]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert (outputs[a] - outputs[b]).abs().max() > 1e-3


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_prefix_tokens_stay_with_no_absolute_embedding(prefix):
    """Pitfall G4."""
    options = {"class_token": prefix > 0, "reg_tokens": max(prefix - 1, 0), "global_pool": "avg"}
    vit = make_rotary(tiny(**options), FAMILIES[0], keep_pos_embed=False)
    assert vit.forward_features(torch.randn(1, 3, 32, 16)).shape == (1, prefix + 8, 32)


def test_weights_load_before_or_after():
    source = tiny()
    weights = source.state_dict()
    before = make_rotary(copy.deepcopy(source), FAMILIES[0])
    after = make_rotary(tiny(num_classes=5), FAMILIES[0])
    after.load_state_dict(weights)
    x = torch.randn(1, 3, 32, 40)
    assert torch.equal(before(x), after(x))
    dropped = make_rotary(tiny(), FAMILIES[0], keep_pos_embed=False)
    dropped.load_state_dict(weights)
    assert "pos_embed" not in dropped.state_dict()


def test_loading_after_running_other_grids():
    """Pitfall E1: 14 x 14, load, 7 x 9, 14 x 14 again, bitwise."""
    vit = make_rotary(tiny(img_size=112), FAMILIES[0])
    x = torch.randn(1, 3, 112, 112)
    first = vit(x)
    keys = list(vit.state_dict())
    vit.load_state_dict(copy.deepcopy(vit.state_dict()))
    vit(torch.randn(1, 3, 56, 72))
    assert torch.equal(vit(x), first) and list(vit.state_dict()) == keys


def test_legacy_tables_in_blocks_are_dropped_with_a_message():
    """Pitfall E2."""
    vit = make_rotary(tiny(), FAMILIES[0])
    state = vit.state_dict() | {"blocks.1.attn.rope.freqs_cos": torch.zeros(16, 8), "rope.freqs_sin": torch.zeros(16, 8)}
    with pytest.warns(UserWarning, match="blocks.1.attn.rope.freqs_cos, rope.freqs_sin"):
        vit.load_state_dict(state)


def test_patch_dropout_keeps_each_token_at_its_cell():
    """Pitfall L1: each sample keeps cells of its own, and its kept tokens turn by the positions of those cells."""
    vit = make_rotary(tiny(patch_drop_rate=0.5, pos_embed="none"), FAMILIES[2]).train()
    x = torch.randn(3, 3, 32, 48)
    seen = {}
    vit.rope.register_forward_hook(lambda module, arguments, output: seen.update(positions=arguments[0]))
    torch.manual_seed(7)
    found = vit.forward_features(x)
    torch.manual_seed(7)
    kept = torch.argsort(torch.randn(3, 24), dim=-1)[:, :12]
    assert torch.equal(seen["positions"], grid_positions(4, 6)[kept])
    assert not torch.equal(seen["positions"][0], seen["positions"][1])
    for sample in range(3):
        tokens = vit._pos_embed(vit.patch_embed(x[sample : sample + 1]))
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:][:, kept[sample]]], dim=1)
        for block, rotation in zip(vit.blocks, vit.rope.per_block(grid_positions(4, 6)[kept[sample]], 2), strict=True):
            tokens = block(tokens, rotation)
        torch.testing.assert_close(vit.norm(tokens)[0], found[sample], atol=2e-5, rtol=1e-4)


def gradients(vit, crops):
    vit.zero_grad()
    sum(vit(crop).square().mean() for crop in crops).backward()
    return {name: parameter.grad.clone() for name, parameter in vit.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_checkpointed_crops_of_different_grids(family):
    """Two crops before one backward pass: a rotation left on a module would be the second crop's for both."""
    vit = make_rotary(tiny(), family).train()
    crops = [torch.randn(2, 3, 32, 48), torch.randn(2, 3, 16, 24)]
    plain = gradients(vit, crops)
    vit.set_grad_checkpointing(True)
    for name, grad in gradients(vit, crops).items():
        torch.testing.assert_close(grad, plain[name], msg=name)
    if family.learned:
        assert plain["rope.frequencies"].abs().min() > 0


def test_the_rotation_is_built_once_and_left_nowhere():
    """Pitfalls E9, J16: one table per forward pass, no tensor left on any module."""
    vit = make_rotary(tiny(), FAMILIES[0])
    calls = []
    vit.rope.register_forward_hook(lambda *_: calls.append(1))
    before = {name: set(vars(module)) for name, module in vit.named_modules()}
    vit(torch.randn(1, 3, 32, 64))
    assert len(calls) == 1
    for name, module in vit.named_modules():
        assert set(vars(module)) == before[name]
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())


def test_forward_intermediates_and_features_only():
    plain = tiny()
    x = torch.randn(2, 3, 32, 32)
    expected = plain.forward_intermediates(x, indices=[0, 1], return_prefix_tokens=True, norm=True)
    vit = make_rotary(copy.deepcopy(plain), FAMILIES[2], strength=0.0)
    found = vit.forward_intermediates(x, indices=[0, 1], return_prefix_tokens=True, norm=True)
    torch.testing.assert_close(found, expected)
    options = {"indices": [0], "output_dict": True, "output_fmt": "NLC", "stop_early": True}
    torch.testing.assert_close(vit.forward_intermediates(x, **options), plain.forward_intermediates(x, **options))
    torch.testing.assert_close(
        vit.get_intermediate_layers(x, n=2, reshape=True), plain.get_intermediate_layers(x, n=2, reshape=True)
    )
    vit.rope_strength = 1.0
    final, features = vit.forward_intermediates(torch.randn(1, 3, 16, 40), indices=1)
    assert features[0].shape == (1, 32, 2, 5)
    assert torch.equal(vit.norm(features[0].flatten(2).mT), final[:, 1:])
    with pytest.raises(ValueError, match='output_fmt must be "NCHW" or "NLC": got \'NHWC\''):
        vit.forward_intermediates(x, output_fmt="NHWC")

    net = timm.create_model(
        "vit_tiny_patch16_224", features_only=True, out_indices=[0, 2], depth=4, img_size=64, dynamic_img_size=True
    )
    net = make_rotary(net.eval(), Axial(64))
    assert [tuple(y.shape) for y in net(torch.randn(1, 3, 32, 96))] == [(1, 192, 2, 6)] * 2


def test_everything_else_timm_offers():
    """set_input_size, reset_classifier, deepcopy, pickle and EMA, after a forward pass in training (pitfalls E4, J14)."""
    for family in FAMILIES:
        vit = make_rotary(tiny(), family).train()
        vit(torch.randn(2, 3, 32, 48)).sum().backward()
        vit.set_input_size((48, 24))
        vit.reset_classifier(7)
        x = torch.randn(1, 3, 48, 24)
        expected = vit.eval()(x)
        assert expected.shape == (1, 7)
        assert torch.equal(copy.deepcopy(vit)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(vit))(x), expected)
        ema = ModelEmaV3(vit, decay=0.5)
        ema.update(vit)
        assert torch.equal(ema.module(x), expected)


def test_optimizer_groups_know_the_learned_frequencies():
    vit = make_rotary(tiny(), FAMILIES[2])
    assert "rope.frequencies" in vit.no_weight_decay() and "cls_token" in vit.no_weight_decay()
    assert "rope.frequencies" not in make_rotary(tiny(), FAMILIES[0]).no_weight_decay()
    groups = param_groups_weight_decay(vit, weight_decay=0.1, no_weight_decay_list=vit.no_weight_decay())
    undecayed = {id(parameter) for group in groups if not group["weight_decay"] for parameter in group["params"]}
    assert id(vit.rope.frequencies) in undecayed and id(vit.blocks[0].attn.qkv.weight) not in undecayed
    scales = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(vit, layer_decay=0.5, no_weight_decay_list=vit.no_weight_decay())
        for parameter in group["params"]
    }
    assert scales[id(vit.rope.frequencies)] == scales[id(vit.pos_embed)] < scales[id(vit.blocks[0].attn.qkv.weight)]


def test_positions_can_be_replaced():
    vit = make_rotary(tiny(pos_embed="none"), FAMILIES[0])
    x = torch.randn(1, 3, 64, 32)
    raw = vit(x)
    vit.rope_positions = functools.partial(grid_positions, reference=(4, 4))
    interpolated = vit(x)
    assert not torch.equal(interpolated, raw)
    rope = vit.rope
    vit.rope_positions = lambda height, width, device: grid_positions(height, width) * torch.tensor([0.5, 1.0])
    torch.testing.assert_close(vit(x), interpolated)
    vit.rope_positions = centered_positions
    assert vit.rope is rope and not torch.equal(vit(x), interpolated)


def test_masks_pass_through():
    x, mask = torch.randn(2, 3, 32, 16), torch.ones(9, 9, dtype=torch.bool).tril()
    fused = make_rotary(tiny(), FAMILIES[0])
    set_fused_attn(False)
    try:
        plain = make_rotary(tiny(), FAMILIES[0])
    finally:
        set_fused_attn(True)
    for options in [{"attn_mask": mask}, {"is_causal": True}, {"attn_mask": torch.zeros(9, 9).masked_fill(~mask, -1e9)}]:
        torch.testing.assert_close(fused.forward_features(x, **options), plain.forward_features(x, **options))
    causal = fused.forward_features(x, is_causal=True)
    torch.testing.assert_close(fused.forward_features(x, attn_mask=mask), causal)
    assert (fused.forward_features(x) - causal).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_bf16_weights_and_autocast_use_exact_angles(family):
    """Pitfalls N13, A3, A4: a cast model turns by the same angles as before."""
    vit = make_rotary(tiny(), family)
    x = torch.randn(1, 3, 32, 64)
    exact = vit(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = vit(x)
    frequencies = vit.rope.frequencies.detach().clone()
    vit.bfloat16()
    assert torch.equal(vit.rope.frequencies, frequencies)
    for found in (autocast, vit(x.bfloat16())):
        assert (found.float() - exact).norm() < 0.05 * exact.norm()


def test_meta_device():
    """Pitfall J10."""
    source = make_rotary(tiny(), FAMILIES[0])
    with torch.device("meta"):
        vit = make_rotary(VisionTransformer(32, 8, embed_dim=32, depth=2, num_heads=4, num_classes=5), FAMILIES[0])
    vit.to_empty(device="cpu").eval().load_state_dict(source.state_dict())
    x = torch.randn(1, 3, 32, 64)
    assert torch.equal(vit(x), source(x))


@pytest.mark.parametrize(
    ("vit", "family", "options", "error", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), Axial(8), {}, TypeError, "vit must be a timm VisionTransformer: got torch.nn"),
        (lambda: make_rotary(tiny(), Axial(8)), Axial(8), {}, TypeError, "vit must not be rotary already"),
        (
            lambda: tiny(block_fn=vision_transformer.ParallelScalingBlock),
            Axial(8),
            {},
            TypeError,
            "blocks must be timm's Block or",
        ),
        (tiny, Axial(16), {}, ValueError, "family must have the model's head_dim=8: got head_dim=16"),
        (tiny, Axial(8, axes=1), {}, ValueError, r"family must have 2 axes \(y, x\) for images: got 1"),
        (tiny, Mixed(8, heads=2), {}, ValueError, "heads=4 and blocks=2: got heads=2 and blocks=None"),
        (tiny, Mixed(8, heads=4, blocks=3), {}, ValueError, "heads=4 and blocks=2: got heads=4 and blocks=3"),
        (tiny, Axial(8), {"strength": 1.5}, ValueError, "strength must be between 0 and 1: got 1.5"),
        (tiny, Axial(8), {"positions": grid_positions(4, 4)}, TypeError, r"positions must be a function of .*: got Tensor"),
        (tiny, presets.qwen2_vl_vision(8), {}, ValueError, "tokens row by row: got a preset with merge=2, give it merge=1"),
        (tiny, "axial", {}, TypeError, "family must be a family of frequencies"),
    ],
)
def test_messages_come_before_any_change(vit, family, options, error, message):
    vit = vit()
    kind = type(vit)
    with pytest.raises(error, match=message):
        make_rotary(vit, family, **options)
    assert type(vit) is kind


def test_strength_is_checked_when_it_is_set():
    vit = make_rotary(tiny(), Axial(8))
    with pytest.raises(ValueError, match=r"strength must be between 0 and 1: got -0\.1"):
        vit.rope_strength = -0.1


def test_strength_scales_the_angles():
    vit = make_rotary(tiny(), FAMILIES[0], strength=0.5)
    seen = []
    vit.rope.register_forward_hook(lambda module, arguments, output: seen.append(output))
    vit(torch.randn(1, 3, 32, 32))
    expected = RotaryEmbedding(FAMILIES[0])(grid_positions(4, 4) / 2)
    assert torch.equal(seen[0].cos, expected.cos)
