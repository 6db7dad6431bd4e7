"""Gradients through the rotation, of what is turned and of learned angles, and what is kept for them."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernel_helpers import LAYOUTS, SHAPES, a_rotation, a_tensor, an_angle, reference, saved_bytes, split_packed
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from axial_rope import Axial, Mixed, RotaryEmbedding, Rotation, grid_positions, kernels, rotate, rotate_packed
from axial_rope.kernels import Table, autograd, eager, plain, use_rotation


@pytest.mark.parametrize("learned", ["fixed", "angle", "cos and sin"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_their_gradients(layout, shape, learned):
    split = {"interleaved": (2,), "half": (2,), "half_per_axis": (1, 1)}[layout]
    angle = an_angle((*shape[:-1], 2), 2, torch.float64)
    tables = (angle,) if learned == "angle" else (angle.cos(), angle.sin())
    tables = [table.requires_grad_(learned != "fixed") for table in tables]
    make = Rotation.from_angles if learned == "angle" else Rotation
    x = a_tensor(2, 3, 3, 6, dtype=torch.float64).requires_grad_()
    weight = torch.eye(3 * 3 * 6, dtype=torch.float64)

    def separate(x, *tables):
        return rotate(x, make(*tables, 6, layout, split), prefix_tokens=1)

    def packed(x, *tables):
        qkv = torch.cat([x, 2 * x, 3 * x], dim=1).transpose(1, 2).flatten(2) @ weight
        return rotate_packed(qkv, make(*tables, 6, layout, split), 3, prefix_tokens=1, overwrite=True)

    for function in (separate, packed):
        assert gradcheck(function, (x, *tables), fast_mode=True)
        assert gradgradcheck(function, (x, *tables), fast_mode=True)


def test_angle_gradient_is_that_of_a_float64_reference():
    rope = RotaryEmbedding(Mixed(head_dim=32, heads=3, blocks=2))
    exact = copy.deepcopy(rope).double()
    qkv, weight = a_tensor(4, 13, 3 * 3 * 32), a_tensor(4, 3, 13, 32, seed=2)
    gradients = []
    for module, dtype, turn in ((rope, torch.float32, None), (exact, torch.float64, plain.turn)):
        total = 0
        for rotation in module.per_block(grid_positions(3, 4).to(dtype), 2):
            if turn is None:
                q, k, _ = rotate_packed(qkv, rotation, 3, prefix_tokens=1)
            else:
                with use_rotation(turn):
                    q, k, _ = rotate_packed(qkv.to(dtype), rotation, 3, prefix_tokens=1)
            total = total + (q * weight.to(dtype)).sum() + (k * weight.to(dtype)).square().sum()
        total.backward()
        gradients.append(module.frequencies.grad)
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()
    assert (gradients[0] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fixed_table_keeps_nothing_for_backward(dtype):
    rotation = a_rotation()
    x, qkv = a_tensor(2, 3, 5, 16, dtype=dtype).requires_grad_(), a_tensor(2, 5, 144, dtype=dtype).requires_grad_()
    assert saved_bytes(lambda: rotate(x, rotation))[0] == 0
    assert saved_bytes(lambda: rotate_packed(qkv, rotation, 3))[0] == 0
    with use_rotation(plain.turn):
        assert saved_bytes(lambda: rotate(x, rotation))[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_angles_are_all_that_is_kept_beside_what_attention_keeps(dtype):
    angle = an_angle((3, 5)).requires_grad_()
    x = a_tensor(2, 5, 48, dtype=dtype).requires_grad_()
    layer = torch.nn.Linear(48, 144, dtype=dtype)

    def attend(*qkv):
        out = torch.nn.functional.scaled_dot_product_attention(*qkv)
        return out.transpose(1, 2).flatten(2).square()  # merged without a copy

    def rotary():
        return attend(*rotate_packed(layer(x), Rotation.from_angles(angle, 16), 3, overwrite=True))

    without, _ = saved_bytes(lambda: attend(*split_packed(layer(x), 3)))
    assert saved_bytes(rotary)[0] == without + angle.numel() * 4


def test_a_learned_embedding_keeps_its_angles_once():
    rope = RotaryEmbedding(Mixed(head_dim=16, heads=3, blocks=2))
    kept, rotations = saved_bytes(lambda: rope.per_block(grid_positions(2, 3), 2))
    assert kept == 2 * 3 * 6 * 8 * 4 + 6 * 2 * 4  # and the positions
    memory = {rotation.angle.untyped_storage().data_ptr() for rotation in rotations}
    assert len(memory) == 1 and [rotation.angle.shape for rotation in rotations] == [(3, 6, 8)] * 2
    double = rope.double()
    assert torch.equal(double(grid_positions(2, 3)).cos, double(grid_positions(2, 3)).cos)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cosines_and_sines_lie_as_the_layout_wants_them(layout, shape):
    angle = an_angle(shape, 8, torch.float64).requires_grad_()
    assert gradcheck(kernels.cos_sin, (angle, layout)) and gradgradcheck(kernels.cos_sin, (angle, layout))
    cos, sin = kernels.cos_sin(angle, layout)
    assert torch.equal(cos, angle.cos()) and torch.equal(sin, angle.sin())
    by_turns = layout == "interleaved"
    assert cos.stride(-1) == sin.stride(-1) == (2 if by_turns else 1)
    assert (sin.data_ptr() == cos.data_ptr() + cos.element_size()) is by_turns


@pytest.mark.parametrize("part", ["itself", "slice", "block"])
def test_a_learned_table_changed_in_place_turns_gradients_as_it_turns_values(part):
    angle = an_angle((2, 5)).requires_grad_()
    whole = Rotation.from_angles(angle, 16, blocks=2 if part == "block" else None)
    rotation = {"itself": whole, "slice": whole.slice(0, 5), "block": whole.block(0) if whole.blocks else whole}[part]
    with torch.no_grad():  # no rotation at all
        whole.cos.fill_(1.0)
        whole.sin.zero_()
    x = a_tensor(2, 5, 16).requires_grad_()
    for turn in (rotation, rotation.inverse()):
        (gradient,) = torch.autograd.grad(rotate(x, turn).sum(), x)
        assert turn.angle is None and torch.equal(gradient, torch.ones_like(x))


def test_a_learned_rotation_inverted_without_a_graph_keeps_no_angle():
    rotation = Rotation.from_angles(an_angle().requires_grad_(), 16)
    with torch.no_grad():
        back = rotation.inverse()
    assert back.angle is None and rotate(a_tensor(1, 5, 16), back).requires_grad  # by way of cos


def test_learned_angles_of_no_pairs():
    angle = torch.zeros(5, 0, requires_grad=True)
    x = a_tensor(1, 5, 8).requires_grad_()
    rotate(x, Rotation.from_angles(angle, 8)).sum().backward()
    assert angle.grad.shape == (5, 0) and torch.equal(x.grad, torch.ones_like(x))


def test_a_projection_that_keeps_its_gradient_is_not_overwritten():
    weight = a_tensor(144, 16).requires_grad_()
    results = []
    for overwrite in (False, True):
        projection = torch.nn.functional.linear(a_tensor(2, 5, 16), weight)
        projection.retain_grad()
        q, k, v = rotate_packed(projection, a_rotation(), 3, overwrite=overwrite)
        (q * k + v).square().sum().backward()
        results.append(projection.grad)
    assert results[0].abs().max() > 0.1 and torch.equal(*results)


def test_angles_that_a_step_has_changed_are_not_taken_for_those_of_the_table():
    angle = an_angle().requires_grad_()
    rotation = Rotation.from_angles(angle, 16)
    with torch.no_grad():
        angle.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotate(a_tensor(1, 5, 16), rotation).sum().backward()


@pytest.mark.parametrize("change", ["itself", "inverse", "block", "slice", "unbind", "replace"])
def test_the_angle_follows_its_tables(change):
    """The gradients through a rotation that was made of another are those of plain arithmetic on its cos and sin."""
    x, gradients = a_tensor(2, 3, 5, 16), []
    for turn in (None, plain.turn):
        angle = an_angle((2, 3, 5)).requires_grad_()
        whole = Rotation.from_angles(angle, 16, blocks=2)
        rotation = {
            "itself": lambda whole: whole.block(1),
            "inverse": lambda whole: whole.inverse().block(1),
            "block": lambda whole: whole.block(0),
            "slice": lambda whole: whole.block(1).slice(1, 4),
            "unbind": lambda whole: whole.unbind()[1],
            "replace": lambda whole: replace(whole.block(1), cos=whole.block(1).cos * 2),
        }[change](whole)
        assert (rotation.angle is None) == (change == "replace")
        with use_rotation(turn) if turn else nullcontext():
            y = rotate(x[:, :, : rotation.tokens], rotation)
        (y * a_tensor(*y.shape, seed=3)).sum().backward()
        gradients.append(angle.grad)
    assert torch.allclose(*gradients, atol=1e-5) and gradients[0].abs().max() > 0.1


def test_a_fixed_rotation_has_no_angle():
    assert RotaryEmbedding(Axial(16))(grid_positions(2, 3)).angle is None
    with torch.no_grad():
        assert RotaryEmbedding(Mixed(16, heads=3))(grid_positions(2, 3)).angle is None
        assert Rotation.from_angles(an_angle().requires_grad_(), 16).angle is None
    with pytest.raises(ValueError, match="rotation must have blocks in front: got blocks=None"):
        a_rotation().unbind()


def test_gradients_come_in_any_strides():
    rotation = a_rotation((3, 5))
    x = a_tensor(2, 3, 5, 16)
    for gradient in (
        torch.ones(()).expand(2, 3, 5, 16),
        a_tensor(2, 5, 3, 16).transpose(1, 2),
        a_tensor(2, 3, 5, 33)[..., 1:17],
        a_tensor(2, 3, 16, 5).mT,
    ):
        leaf = x.clone().requires_grad_()
        rotate(leaf, rotation).backward(gradient)
        assert (leaf.grad - reference(gradient, rotation.inverse())).abs().max() < 2e-6
        assert leaf.grad.stride() == leaf.stride()
        leaf = a_tensor(2, 5, 144).requires_grad_()
        torch.autograd.backward(rotate_packed(leaf, rotation, 3), [gradient] * 3)
        q, k, v = split_packed(leaf.grad, 3)
        assert torch.equal(v, gradient) and torch.equal(q, k)
        assert (q - reference(gradient, rotation.inverse())).abs().max() < 2e-6
        assert leaf.grad.stride() == leaf.stride()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    angle = an_angle((3, 5)).requires_grad_()
    rotation = Rotation.from_angles(angle, 16)
    layer = torch.nn.Linear(8, 144)

    def block(x):
        return torch.cat(rotate_packed(layer(x), rotation, 3, overwrite=True)).sin()

    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        x, angle.grad = a_tensor(2, 5, 8).requires_grad_(), None
        run(x).sum().backward()
        gradients.append((x.grad, angle.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_double_backward_door_is_plain():
    """Backward with create_graph must not call the memory backend, whose work autograd doesn't see."""
    x = a_tensor(2, 3, 5, 16).requires_grad_()
    y = autograd.Turn.apply(x, None, Table(a_rotation().cos, a_rotation().sin, "half", (8,)), eager)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert first.grad_fn is not None
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, torch.full_like(x, 2.0), atol=1e-5)


def test_batches_of_gradients():
    rope = RotaryEmbedding(Mixed(8, heads=3))
    rotation = rope(grid_positions(2, 3))
    x, packed = a_tensor(2, 3, 6, 8).requires_grad_(), a_tensor(2, 6, 72).requires_grad_()
    for leaf, y in ((x, rotate(x, rotation)), (packed, torch.stack(rotate_packed(packed * 1, rotation, 3, overwrite=True)))):
        gradients, inputs = a_tensor(4, *y.shape), (leaf, rope.frequencies)
        batched = torch.autograd.grad(y, inputs, gradients, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(y, inputs, gradient, retain_graph=True) for gradient in gradients]
        for got, want in zip(batched, zip(*one_by_one, strict=True), strict=True):
            assert torch.allclose(got, torch.stack(want), atol=1e-5)
    jacobian = torch.autograd.functional.jacobian(lambda x: rotate(x, rotation.inverse()), x.detach(), vectorize=True)
    assert jacobian.shape == (2, 3, 6, 8) * 2
