"""models/rope_vit.py: sizes, encodings and what timm's optimizer sees."""

import copy

import pytest
import torch
from timm.optim import create_optimizer_v2

from axial_rope import Axial, Mixed
from models.rope_vit import SIZES, rope_vit


def small_vit(rope, **changes):
    torch.manual_seed(0)
    return rope_vit("N/2", rope, **({"num_classes": 10, "image_size": 8, "channels": 1} | changes)).eval()


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["Ti", "S", "B", "L"])
def test_sizes_are_those_of_the_papers(name):
    width, depth, heads = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}[name]
    assert SIZES[name] == (width, depth, heads)
    with torch.device("meta"):
        model = rope_vit(f"{name}/16", "none")
    patches, block, norm, head = 3 * 16 * 16 * width + width, 12 * width**2 + 13 * width, 2 * width, 1000 * width + 1000
    assert count(model) == patches + depth * block + norm + head
    assert model.blocks[0].attn.head_dim == 64


@pytest.mark.parametrize(("rope", "extra"), [("axial", 0), ("none", 0), ("learned", 16 * 64), ("mixed", 2 * 4 * 2 * 16)])
def test_only_learned_positions_add_parameters(rope, extra):
    """Learned: 16 patches of width 64. Mixed: 2 axes, 4 blocks, 2 heads, 16 pairs."""
    assert count(small_vit(rope)) - count(small_vit("none")) == extra


def test_families_are_those_of_the_paper():
    assert small_vit("axial").rope.family == Axial(head_dim=32, axes=2, base=100.0)
    assert small_vit("mixed").rope.family == Mixed(head_dim=32, heads=2, blocks=4, base=10.0)
    assert small_vit("axial").pos_embed is None and small_vit("mixed").pos_embed is None


@pytest.mark.parametrize("rope", ["axial", "mixed", "learned", "none"])
def test_any_image_of_whole_patches(rope):
    model = small_vit(rope)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert model(torch.randn(2, 1, 6, 14)).shape == (2, 10)
    assert copy.deepcopy(model)(torch.ones(1, 1, 6, 4)).equal(model(torch.ones(1, 1, 6, 4)))


@pytest.mark.parametrize(("rope", "matters"), [("axial", True), ("mixed", True), ("learned", True), ("none", False)])
def test_order_of_patches_matters_only_with_positions(rope, matters):
    model, image = small_vit(rope), torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        for parameter in model.parameters():  # the initial weights hardly show positions
            parameter.mul_(3)
        tiles = image.unfold(2, 2, 2).unfold(3, 2, 2)  # (1, 1, 4, 4, 2, 2)
        shuffled = tiles.flatten(2, 3)[:, :, torch.randperm(16)].unflatten(2, (4, 4))
        shuffled = shuffled.permute(0, 1, 2, 4, 3, 5).reshape(1, 1, 8, 8)
        difference = (model(image) - model(shuffled)).abs().max().item()
    assert (difference > 1e-3) == matters, difference


def test_class_token_is_asked_for():
    plain, token = small_vit("axial"), small_vit("axial", class_token=True)
    assert (plain.num_prefix_tokens, plain.global_pool) == (0, "avg")
    assert (token.num_prefix_tokens, token.global_pool) == (1, "token")
    assert token(torch.randn(1, 1, 8, 8)).shape == (1, 10)


def test_drop_path_grows_with_depth():
    blocks = small_vit("axial", drop_path=0.3).blocks
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(("rope", "name"), [("mixed", "rope.frequencies"), ("learned", "pos_embed")])
def test_learned_positions_are_spared_weight_decay(rope, name):
    model = small_vit(rope)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(dict(model.named_parameters())[name])] == 0
    assert decay[id(model.head.weight)] == 0.1


def test_layer_decay_puts_frequencies_with_the_stem():
    model = small_vit("mixed")
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert scale[id(model.rope.frequencies)] == scale[id(model.patch_embed.proj.weight)] == 0.5**5
    assert scale[id(model.blocks[0].attn.qkv.weight)] == 0.5**4


@pytest.mark.parametrize(
    ("size", "rope", "message"),
    [
        ("S", "axial", "size must be one of N, Ti, S, B, L, a slash and the patch such as 'S/16': got 'S'"),
        ("XL/16", "axial", "size must be one of .*: got 'XL/16'"),
        ("S/0", "axial", "size must be one of .*: got 'S/0'"),
        ("S/16", "rotary", "rope must be one of axial, mixed, learned, none: got 'rotary'"),
        ("S/15", "axial", "image_size must be a multiple of the patch = 15: got image_size=224"),
    ],
)
def test_errors_say_what_is_needed(size, rope, message):
    with pytest.raises(ValueError, match=message):
        rope_vit(size, rope)
