"""The rotation's backends against plain arithmetic in float64, and what they promise about memory."""

import pytest
import torch
from kernel_helpers import LAYOUTS, SHAPES, a_rotation, a_tensor, an_angle, reference, split_packed

from axial_rope import Axial, Mixed, RotaryEmbedding, Rotation, grid_positions, rotate, rotate_packed
from axial_rope.kernels import Table, eager, plain, use_rotation


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_doors_agree_with_float64(shape, layout, head_dim):
    rotation = a_rotation(shape, LAYOUTS[layout], layout, head_dim)
    qkv = a_tensor(2, 8, 3 * 3 * head_dim)
    kept = qkv.clone()
    q, k, v = split_packed(qkv, 3)
    expected = reference(q, rotation, 1, 2), reference(k, rotation, 1, 2), v.double()
    for got, want in zip(rotate_packed(qkv, rotation, 3, prefix_tokens=1, suffix_tokens=2), expected, strict=True):
        assert (got - want).abs().max() < 2e-6
    assert (rotate(q, rotation, prefix_tokens=1, suffix_tokens=2) - expected[0]).abs().max() < 2e-6
    assert torch.equal(qkv, kept)
    for got, want in zip(
        rotate_packed(qkv, rotation, 3, prefix_tokens=1, suffix_tokens=2, overwrite=True), expected, strict=True
    ):
        assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pairs", [4, 10, 16, 32, 36])
def test_low_precision_is_exact_to_the_bit(dtype, pairs, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for layout in ("interleaved", "half"):
            for shape in ((96,), (5, 96), (3, 1, 96)):
                rotation = a_rotation(shape, (pairs,), layout, head_dim=2 * pairs + 4)
                x = a_tensor(3, 5, 97, 2 * pairs + 4, dtype=dtype)
                for y in (
                    x,
                    x.transpose(1, 2).contiguous().transpose(1, 2),
                    a_tensor(3, 98, 5, x.shape[-1]).to(dtype)[:, 1:].mT.mT.transpose(1, 2),
                ):
                    exact = rotate(y.float(), rotation, prefix_tokens=1).to(dtype)
                    assert torch.equal(rotate(y, rotation, prefix_tokens=1), exact)
                qkv = a_tensor(3, 97, 15 * x.shape[-1], dtype=dtype)
                for overwrite in (False, True):
                    exact = rotate_packed(qkv.float(), rotation, 5, prefix_tokens=1, overwrite=overwrite)
                    got = rotate_packed(qkv.clone(), rotation, 5, prefix_tokens=1, overwrite=overwrite)
                    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(got, exact, strict=True))
                plainly = plain.turn(x, Table(rotation.cos, rotation.sin, layout, (pairs,), 1))
                assert torch.equal(
                    plainly, plain.turn(x.float(), Table(rotation.cos, rotation.sin, layout, (pairs,), 1)).to(dtype)
                )
    finally:
        torch.set_num_threads(before)


def test_odd_memory():
    """Offsets, strides and sizes that have no complex view."""
    rotation = a_rotation()
    for x in (
        a_tensor(2, 3, 5, 17)[..., 1:],
        a_tensor(2, 3, 5, 17)[..., :16],
        a_tensor(2, 3, 16, 5).mT,
        a_tensor(1 + 2 * 3 * 5 * 16)[1:].view(2, 3, 5, 16),
        a_tensor(1, 1, 5, 16).expand(2, 3, 5, 16),
        a_tensor(2, 3, 5, 32)[..., ::2],
        a_tensor(0, 3, 5, 16),
    ):
        assert torch.allclose(rotate(x, rotation).double(), reference(x, rotation), atol=2e-6)


def test_a_table_in_other_memory_and_other_dtypes():
    rotation = a_rotation((3, 5))
    x = a_tensor(2, 3, 5, 16)
    by_turns = torch.stack([rotation.cos, rotation.sin], dim=-1)
    assert torch.equal(rotate(x, Rotation(by_turns[..., 0], by_turns[..., 1], 16)), rotate(x, rotation))
    assert eager.complex_table(by_turns[..., 0], by_turns[..., 1], torch.float32).data_ptr() == by_turns.data_ptr()
    swapped = Rotation(by_turns[..., 1], by_turns[..., 0], 16, split=(8,))
    assert torch.allclose(rotate(x, swapped).double(), reference(x, swapped), atol=2e-6)
    low = Rotation(rotation.cos.bfloat16(), rotation.sin.bfloat16(), 16, split=(8,))
    assert torch.allclose(rotate(x, low).double(), reference(x, low), atol=2e-6)
    double = a_rotation((3, 5), dtype=torch.float64)
    assert rotate(x, double).dtype == torch.float32
    assert torch.equal(rotate(x, double), rotate(x.double(), double).float())


def test_another_use_of_an_overwritten_projection_is_seen():
    rotation = a_rotation()
    layer = torch.nn.Linear(8, 144)
    x = a_tensor(2, 5, 8)

    def loss(again):
        layer.zero_grad()
        qkv = layer(x)
        q, k, v = rotate_packed(qkv, rotation, 3, overwrite=True)
        # With `overwrite` the projection holds the turned q and k from here on.
        total = q.square().sum() * 3 + (k * v).sum() + (qkv.sin().sum() if again else 0)
        total.backward()
        return layer.weight.grad.clone()

    def plainly():
        layer.zero_grad()
        q, k, v = split_packed(layer(x), 3)
        q, k = (plain.turn(t, Table(rotation.cos, rotation.sin, "interleaved", (8,))) for t in (q, k))
        (q.square().sum() * 3 + (k * v).sum() + sum(t.sin().sum() for t in (q, k, v))).backward()
        return layer.weight.grad

    assert torch.allclose(loss(again=True), plainly(), atol=1e-4)
    assert not torch.allclose(loss(again=False), plainly(), atol=1e-4)


def test_what_is_kept_of_an_overwritten_projection_is_missed():
    qkv = torch.nn.Linear(8, 144)(a_tensor(2, 5, 8))
    square = qkv.square()
    rotate_packed(qkv, a_rotation(), 3, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_a_changed_table_is_missed():
    rotation = a_rotation()
    y = rotate(a_tensor(2, 5, 16).requires_grad_(), rotation)
    rotation.cos.mul_(2)
    with pytest.raises(RuntimeError, match="cos and sin must stay as they are until the backward pass"):
        y.sum().backward()


def test_a_leaf_and_a_part_are_never_overwritten():
    rotation = a_rotation()
    leaf = a_tensor(2, 5, 144).requires_grad_()
    part = a_tensor(2, 5, 288)
    kept_leaf, kept_part = leaf.detach().clone(), part.clone()
    rotate_packed(leaf, rotation, 3, overwrite=True)
    rotate_packed(part[..., :144], rotation, 3, overwrite=True)
    assert torch.equal(leaf, kept_leaf) and torch.equal(part, kept_part)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_autograd(context):
    rope = RotaryEmbedding(Mixed(head_dim=16, heads=3))
    x = a_tensor(2, 3, 6, 16)
    with context():
        rotation = rope(grid_positions(2, 3))
        assert torch.allclose(rotate(x, rotation).double(), reference(x, rotation), atol=2e-6)
        assert (
            rotate_packed(a_tensor(2, 6, 144), rotation, 3, overwrite=True)[0]
            - reference(split_packed(a_tensor(2, 6, 144), 3)[0], rotation)
        ).abs().max() < 2e-6
    q = split_packed(a_tensor(2, 6, 144), 3)[0]
    assert torch.allclose(rotate(q.requires_grad_(), rotation).double(), reference(q, rotation), atol=2e-6)


def test_a_table_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        rotation = RotaryEmbedding(Axial(head_dim=16))(grid_positions(2, 3))
    x = a_tensor(2, 3, 6, 16).requires_grad_()
    rotate(x, rotation).sum().backward()
    assert (x.grad - reference(torch.ones_like(x), rotation.inverse())).abs().max() < 2e-6


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # PyTorch's own, at the first jvp
def test_transforms_of_functions():
    rotation = a_rotation((3, 5))
    x, tangent = a_tensor(2, 3, 5, 16), a_tensor(2, 3, 5, 16, seed=5)

    def turn(x):
        return rotate(x, rotation)

    def turn_all(qkv):
        return torch.stack(rotate_packed(qkv, rotation, 3, overwrite=True))

    batch = a_tensor(4, 2, 3, 5, 16)
    assert torch.allclose(torch.func.vmap(turn)(batch), torch.stack([turn(x) for x in batch]))
    packed = a_tensor(4, 2, 5, 144)
    assert torch.allclose(torch.func.vmap(turn_all)(packed), torch.stack([turn_all(p.clone()) for p in packed]))
    assert torch.allclose(torch.func.jvp(turn, (x,), (tangent,))[1], turn(tangent), atol=1e-6)
    assert torch.allclose(
        torch.func.grad(lambda x: turn(x).sum())(x), rotate(torch.ones_like(x), rotation.inverse()), atol=1e-6
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(turn(dual)).tangent, turn(tangent), atol=1e-6)
    per_sample = torch.func.vmap(torch.func.grad(lambda cos, x: rotate(x, Rotation(cos, rotation.sin, 16)).sum()), (None, 0))
    one = rotation.cos.clone().requires_grad_()
    rotate(x[:1], Rotation(one, rotation.sin, 16)).sum().backward()
    assert torch.allclose(per_sample(rotation.cos, x)[0], one.grad, atol=1e-5)


def test_fake_and_meta_tensors():
    rotation = a_rotation()
    meta = Rotation(rotation.cos.to("meta"), rotation.sin.to("meta"), 16)
    assert rotate(a_tensor(2, 3, 5, 16).to("meta"), meta).shape == (2, 3, 5, 16)
    assert rotate_packed(a_tensor(2, 5, 144).to("meta"), meta, 3)[1].shape == (2, 3, 5, 16)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = Rotation(mode.from_tensor(rotation.cos), mode.from_tensor(rotation.sin), 16)
        assert rotate(torch.empty(2, 3, 5, 16), fake).shape == (2, 3, 5, 16)
        assert [t.shape for t in rotate_packed(torch.empty(2, 5, 144), fake, 3)] == [(2, 3, 5, 16)] * 3


def test_own_rotation_is_called_by_every_door():
    rotation, calls = a_rotation(), []

    def turn(x, table):
        calls.append((tuple(x.shape), table.prefix))
        return plain.turn(x, table) + 1

    x, qkv = a_tensor(2, 3, 6, 16), a_tensor(2, 6, 144)
    with use_rotation(turn):
        y = rotate(x, rotation, prefix_tokens=1)
        _, k, v = rotate_packed(qkv, rotation, 3, prefix_tokens=1, overwrite=True)
    assert calls == [((2, 3, 6, 16), 1)] * 3
    assert (y - 1 - reference(x, rotation, 1)).abs().max() < 2e-6
    assert (k - 1 - reference(split_packed(qkv, 3)[1], rotation, 1)).abs().max() < 2e-6
    assert torch.equal(v, split_packed(qkv, 3)[2])
    rotate(x, rotation, prefix_tokens=1)
    assert len(calls) == 3


def test_packed_errors():
    rotation = a_rotation()
    with pytest.raises(
        ValueError, match=r"qkv must have shape \(batch, tokens, 3 \* heads \* head_dim = 3 \* 3 \* 16 = 144\): got"
    ):
        rotate_packed(a_tensor(2, 5, 96), rotation, 3)
    with pytest.raises(ValueError, match=r"qkv must have prefix_tokens \+ 5 rotated .* got 7 tokens"):
        rotate_packed(a_tensor(2, 7, 144), rotation, 3, prefix_tokens=1)
    with pytest.raises(ValueError, match=r"qkv must have the samples and heads of the rotation, \(2,\): got \(2, 3\)"):
        rotate_packed(a_tensor(2, 5, 144), a_rotation((2, 5)), 3)
    with pytest.raises(TypeError, match=r"qkv must be a real floating tensor: got torch\.int64"):
        rotate_packed(torch.zeros(2, 5, 144, dtype=torch.int64), rotation, 3)


def test_prefix_stays_even_where_it_is_not_finite():
    x = a_tensor(2, 3, 6, 16)
    x[:, :, 0, ::2], x[:, :, 0, 1::2] = float("inf"), -0.0
    assert torch.equal(rotate(x, a_rotation(), prefix_tokens=1)[:, :, :1], x[:, :, :1])


def test_lazily_conjugated_parts():
    table = torch.polar(torch.ones(6, 16), a_tensor(6, 16)).conj()
    exact = table.resolve_conj()
    lazy, resolved = (Rotation(part.real, part.imag, 32) for part in (table, exact))
    for dtype in (torch.float32, torch.bfloat16):
        x = a_tensor(2, 6, 32).to(dtype)
        assert torch.equal(rotate(x, lazy), rotate(x, resolved))
    x = torch.complex(a_tensor(6, 32), a_tensor(6, 32)).conj().imag
    assert torch.equal(rotate(x, resolved), rotate(x.resolve_neg(), resolved))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_a_table_gives_the_same_bits_in_any_order_of_memory(order, layout):
    angle = an_angle((2, 3, 70), 32)
    permuted = angle.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    x, qkv = a_tensor(2, 3, 72, 64).bfloat16(), a_tensor(2, 72, 9 * 64).bfloat16()
    split = (12, 20) if layout == "half_per_axis" else (32,)
    expected = rotate(x.float(), Rotation.from_angles(angle, 64, layout, split), prefix_tokens=2)
    for rotation in (
        Rotation.from_angles(permuted, 64, layout, split),
        Rotation(permuted.cos(), permuted.sin(), 64, layout, split),
    ):
        assert torch.equal(rotate(x.float(), rotation, prefix_tokens=2), expected)
        assert torch.equal(rotate(x, rotation, prefix_tokens=2), expected.bfloat16())
        low, wide = (rotate_packed(tensor, rotation, 3, prefix_tokens=2) for tensor in (qkv, qkv.float()))
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, wide, strict=True))
