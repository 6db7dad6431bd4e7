"""Projections whose memory is reused, or whose weights are used directly: only where nobody looks at what they give."""

import copy

import pytest
import timm
import torch
from torch import nn

from axial_rope import (
    Axial,
    MemoryAttention,
    RotaryEmbedding,
    grid_positions,
    make_rotary,
    memory_from_frames,
    rotate_packed,
)


class Halved(torch.autograd.Function):
    """The identity, as a view, with half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def hooked(x):
    x.register_hook(lambda gradient: gradient / 2)
    return x


@pytest.mark.parametrize("between", [Halved.apply, hooked], ids=["function", "hook"])
def test_what_stands_between_a_projection_and_its_rotation_sees_the_gradient(between):
    layer, rotation = nn.Linear(4, 48), RotaryEmbedding(Axial(8))(grid_positions(2, 3))
    x, weight = torch.randn(2, 6, 4), torch.randn(3, 2, 2, 6, 8)
    found = []
    for overwrite in (False, True):
        parts = rotate_packed(between(layer(x)), rotation, 2, overwrite=overwrite)
        found.append(torch.autograd.grad((torch.stack(parts) * weight).sum(), layer.weight)[0])
    assert torch.equal(*found) and found[0].abs().max() > 0


def test_a_projection_made_in_inference_mode_is_left_alone():
    rotation = RotaryEmbedding(Axial(8))(grid_positions(2, 3))
    with torch.inference_mode():
        qkv = torch.randn(2, 6, 48)
    before = qkv.clone()
    rotate_packed(qkv, rotation, 2, overwrite=True)
    assert torch.equal(qkv, before)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # of modules that return no tensors
@pytest.mark.parametrize("everywhere", [False, True])
def test_backward_hooks_of_the_projection_of_a_vit(everywhere):
    vit = timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=1, num_heads=3, img_size=32, num_classes=5)
    vit, x = make_rotary(vit, Axial(16)), torch.randn(2, 3, 32, 48)
    layer = vit.blocks[0].attn.qkv
    vit(x).square().sum().backward()
    exact, seen = layer.bias.grad.clone(), []

    def halve(module, gradients):
        if module is layer:
            seen.append(1)
            return (gradients[0] / 2,)
        return None

    register = (
        nn.modules.module.register_module_full_backward_pre_hook if everywhere else layer.register_full_backward_pre_hook
    )
    handle = register(halve)
    try:
        vit.zero_grad()
        vit(x).square().sum().backward()
    finally:
        handle.remove()
    assert seen == [1] and torch.allclose(layer.bias.grad, exact / 2, atol=1e-6) and exact.abs().max() > 1e-3


class Adapted(nn.Module):
    """A layer with an adapter beside it, and its weights under its own name, as adapter libraries have it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(layer.in_features, layer.out_features)
        self.in_features, self.weight, self.bias = layer.in_features, layer.weight, layer.bias

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


def test_adapters_and_hooks_of_the_values_of_a_memory():
    """Without gradients a narrow memory is averaged before it is projected, by the weights of a plain layer alone."""
    attend = MemoryAttention(32, 8, depth=1, heads=1, mlp_dim=32).eval()
    memory = memory_from_frames([torch.randn(2, 6, 8)], grids=[(2, 3)], ages=[1])
    x, layer = torch.randn(2, 6, 32), attend.layers[0].cross_attention
    plain = attend(x, memory, grid=(2, 3))
    adapted, hooked = copy.deepcopy(attend), copy.deepcopy(attend)
    adapted.layers[0].cross_attention.v_proj = Adapted(layer.v_proj)
    hooked.layers[0].cross_attention.v_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    for model in (adapted, hooked):
        with torch.no_grad():
            without = model(x, memory, grid=(2, 3))
        assert torch.allclose(without, model(x, memory, grid=(2, 3)), atol=1e-6)
        assert (without - plain).abs().max() > 1e-3
