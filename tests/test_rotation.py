import math

import pytest
import torch
from independent import rotate_complex, rotate_matrix

from axial_rope import (
    Axial,
    Mixed,
    RotaryEmbedding,
    Rotation,
    angles,
    grid_positions,
    layout_permutation,
    pair_channels,
    rotate,
    rotate_packed,
)

LAYOUTS = ["interleaved", "half", "half_per_axis"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rotation_of(family, *grid):
    return RotaryEmbedding(family)(grid_positions(*grid))


def test_the_seeds_of_this_field():
    """Scores that follow from RoFormer's formula, dim 64, base 10000."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 64)
    rope = RotaryEmbedding(Axial(64, axes=1, base=10000.0))

    def at(x, position):
        return rotate(x[None], rope(torch.tensor([[position]])))[0]

    assert (at(q, 5) @ at(k, 2)).item() == pytest.approx(-8.2811, abs=1e-4)
    assert (at(q, 105) @ at(k, 102)).item() == pytest.approx(-8.2811, abs=1e-4)
    assert (at(q, 5) @ at(k, 4)).item() == pytest.approx(-11.4563, abs=1e-4)
    assert q.norm().item() == pytest.approx(8.3705, abs=1e-4)
    assert at(q, 5).norm().item() == pytest.approx(8.3705, abs=1e-4)


def test_thirty_degrees():
    step = math.pi / 6

    def at(x, position):
        angle = torch.tensor([[step * position]])
        return rotate(torch.tensor([x]), Rotation(angle.cos(), angle.sin(), head_dim=2))[0]

    assert at([1.0, 1.0], 1).tolist() == pytest.approx([0.366, 1.366], abs=1e-3)
    assert (at([1.0, 0.0], 0) @ at([1.0, 1.0], 1)).item() == pytest.approx(0.366, abs=1e-3)
    assert (at([1.0, 0.0], 1) @ at([1.0, 1.0], 2)).item() == pytest.approx(0.366, abs=1e-3)


def test_composition():
    """R(i)^T R(j) = R(j - i)."""
    rope = RotaryEmbedding(Axial(16, axes=2))
    x = torch.randn(1, 16, dtype=torch.float64)
    i, j = torch.tensor([[2.0, 7.0]], dtype=torch.float64), torch.tensor([[5.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(rotate(rotate(x, rope(j)), rope(i).inverse()), rotate(x, rope(j - i)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [None, (2, 6), (3, 2)], ids=str)
def test_equal_to_complex_numbers_and_to_matrices(layout, split):
    """Pitfalls F3, H9: two independent writings."""
    family = Axial(16, axes="xy", base=50.0, pairs_per_axis=split, layout=layout)
    positions = grid_positions(3, 5)
    x = torch.randn(2, 3, 15, 16, dtype=torch.float64)
    found = rotate(x, RotaryEmbedding(family)(positions))
    pairs = pair_channels(layout, family.split)
    for write in (rotate_complex, rotate_matrix):
        expected = write(x, positions, family.frequencies(), pairs)
        torch.testing.assert_close(found, expected, atol=3e-6, rtol=0)
    assert torch.equal(found[..., 2 * family.pairs :], x[..., 2 * family.pairs :])  # pitfall G9


def test_layouts_as_drawn():
    assert pair_channels("interleaved", (2, 2)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pair_channels("half", (2, 2)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert pair_channels("half_per_axis", (2, 2)).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert pair_channels("half_per_axis", (1, 3)).tolist() == [[0, 1], [2, 5], [3, 6], [4, 7]]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_layout_permutation(source, target):
    x = torch.randn(4, 15, 12)
    split = (3, 2)

    def turned(x, layout):
        return rotate(x, rotation_of(Axial(12, pairs_per_axis=split, layout=layout), 3, 5))

    order = layout_permutation(source, target, split, 12)
    torch.testing.assert_close(turned(x[..., order], target), turned(x, source)[..., order])
    back = layout_permutation(target, source, split, 12)
    assert torch.equal(x[..., order][..., back], x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_stays_and_low_precision_is_exact(layout, dtype):
    """Pitfalls A5, B1, B2: one rounding, at the end."""
    rotation = rotation_of(Axial(32, layout=layout), 9, 11)
    x = torch.randn(2, 3, 99, 32).to(dtype)
    found = rotate(x, rotation)
    assert found.dtype == dtype
    torch.nn.functional.scaled_dot_product_attention(found, found, x)
    if dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(found, rotate(x.float(), rotation).to(dtype))


def test_mixed_dtypes_of_input_and_table():
    """Pitfall B4."""
    rotation = rotation_of(Axial(32), 4, 4)
    low = Rotation(rotation.cos.bfloat16(), rotation.sin.bfloat16(), 32, rotation.layout, rotation.split)
    x = torch.randn(16, 32)
    assert rotate(x, low).dtype == torch.float32
    assert rotate(x.bfloat16(), rotation).dtype == torch.bfloat16
    torch.testing.assert_close(rotate(x, low), rotate(x, rotation), atol=0.03, rtol=0)


def test_the_input_is_never_written():
    x = torch.randn(2, 16, 32)
    before = x.clone()
    out = rotate(x, rotation_of(Axial(32), 4, 4))
    out.zero_()
    assert torch.equal(x, before)


def test_prefix_and_suffix_are_returned_as_they_are():
    """Pitfall G1: class tokens bitwise unchanged, patch i at position i."""
    rotation = rotation_of(Axial(32), 3, 4)
    x = torch.randn(2, 3, 17, 32).bfloat16()
    out = rotate(x, rotation, prefix_tokens=2, suffix_tokens=3)
    assert torch.equal(out[..., :2, :], x[..., :2, :]) and torch.equal(out[..., -3:, :], x[..., -3:, :])
    assert torch.equal(out[..., 2:14, :], rotate(x[..., 2:14, :], rotation))


def test_heads_and_tokens_are_not_confused():
    """Pitfalls F8, M7, M11: with as many heads as tokens, permuting heads commutes with the rotation."""
    rotation = rotation_of(Axial(8), 2, 2)
    x = torch.randn(3, 4, 4, 8)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(rotate(x[:, order], rotation), rotate(x, rotation)[:, order])
    assert not torch.equal(rotate(x[:, :, order], rotation), rotate(x, rotation)[:, :, order])


def test_tables_per_head_and_per_sample():
    """Pitfall L2: every table shape equals a loop."""
    torch.manual_seed(1)
    batch, heads, tokens = 3, 2, 5
    family = Mixed(8, heads=heads)
    rope = RotaryEmbedding(family)
    positions = torch.randn(batch, tokens, 2)
    x = torch.randn(batch, heads, tokens, 8)
    found = rotate(x, rope(positions))
    for b in range(batch):
        for h in range(heads):
            pairs = pair_channels("interleaved", family.split)
            expected = rotate_complex(x[b, h], positions[b], rope.frequencies[:, h].detach(), pairs)
            torch.testing.assert_close(found[b, h].double(), expected, atol=3e-6, rtol=0)


def test_angle_shapes():
    shared, heads, blocks = torch.ones(2, 4), torch.ones(2, 3, 4), torch.ones(2, 6, 3, 4)
    grid, batch = torch.ones(5, 2), torch.ones(7, 5, 2)
    assert angles(grid, shared).shape == (5, 4)
    assert angles(grid, heads).shape == (3, 5, 4)
    assert angles(grid, blocks).shape == (6, 3, 5, 4)
    assert angles(batch, shared).shape == (7, 1, 5, 4)
    assert angles(batch, heads).shape == (7, 3, 5, 4)
    assert angles(batch, blocks).shape == (6, 7, 3, 5, 4)


@pytest.mark.parametrize("lead", [(), (7,)])
@pytest.mark.parametrize("blocks", [(), (6,)])
def test_angles_equal_a_loop_and_the_heads_of_a_token_lie_together(lead, blocks):
    generator = torch.Generator().manual_seed(2)
    positions = torch.randn(*lead, 5, 3, generator=generator)
    frequencies = torch.randn(3, *blocks, 2, 4, generator=generator)
    found = angles(positions, frequencies)
    expected = torch.einsum("a...hp,...na->...hnp" if not (lead and blocks) else "alhp,bna->lbhnp", frequencies, positions)
    torch.testing.assert_close(found, expected)
    assert found.stride(-3) == 4 and found.stride(-2) == 8


def test_messages_of_angles_and_blocks():
    with pytest.raises(ValueError, match=r"^frequencies must be .* got \(3, 8\) for \(4, 2\)"):
        angles(torch.zeros(4, 2), torch.zeros(3, 8))
    with pytest.raises(TypeError, match=r"^angle must be a tensor: got list"):
        Rotation.from_angles([[0.0]], 2)
    with pytest.raises(TypeError, match=r"^angle must be float32 or float64: got torch.bfloat16"):
        Rotation.from_angles(torch.zeros(3, 4, dtype=torch.bfloat16), 8)
    with pytest.raises(ValueError, match=r"^blocks must be the first size of cos and sin, \(2, 5, 4\): got 7"):
        Rotation.from_angles(torch.zeros(2, 5, 4), 8, blocks=7)
    rotation = Rotation.from_angles(torch.zeros(2, 5, 4), 8)
    for take in (rotation.unbind, lambda: rotation.block(0)):
        with pytest.raises(ValueError, match=r"^rotation must have blocks in front"):
            take()
    assert rotation == rotation and rotation != Rotation.from_angles(torch.zeros(2, 5, 4), 8)


def test_angles_are_float32_products():
    """Pitfall A1: position 1857 at pair 1 of dim 32, base 1e4 turns by 1044.268."""
    rope = RotaryEmbedding(Axial(32, axes=1))
    assert angles(torch.tensor([[1857.0]]), rope.frequencies)[0, 1].item() == pytest.approx(1044.268, abs=1e-3)


def test_slice_is_the_rotation_of_those_tokens():
    """Pitfall L6: slices over ranks make up the whole."""
    rotation = rotation_of(Axial(8), 3, 5)
    x = torch.randn(15, 8)
    parts = [rotate(x[a:b], rotation.slice(a, b)) for a, b in [(0, 4), (4, 11), (11, 15)]]
    assert torch.equal(torch.cat(parts), rotate(x, rotation))


def test_zero_angle_is_the_identity():
    """Pitfall L3: a padded token at position 0 keeps its value."""
    x = torch.randn(2, 1, 16).bfloat16()
    assert torch.equal(rotate(x, RotaryEmbedding(Axial(16))(torch.zeros(1, 2))), x)


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((12, 16), {}, ValueError, r"x must have shape \(..., tokens, head_dim=32\): got \(12, 16\)"),
        ((32,), {}, ValueError, r"x must have shape \(..., tokens, head_dim=32\): got \(32,\)"),
        ((13, 32), {}, ValueError, r"= 0 \+ 12 \+ 0: got 13 tokens"),
        ((13, 32), {"prefix_tokens": 2}, ValueError, r"= 2 \+ 12 \+ 0: got 13 tokens"),
        ((12, 32), {"prefix_tokens": -1, "suffix_tokens": 1}, ValueError, "must not be negative: got -1 and 1"),
    ],
)
def test_messages(shape, options, error, message):
    with pytest.raises(error, match=message):
        rotate(torch.zeros(shape), rotation_of(Axial(32), 3, 4), **options)


def test_messages_about_heads_samples_and_dtypes():
    per_head = RotaryEmbedding(Mixed(8, heads=2))(grid_positions(2, 2))
    with pytest.raises(ValueError, match=r"samples and heads of the rotation, \(2,\): got \(5, 3\) from \(5, 3, 4, 8\)"):
        rotate(torch.zeros(5, 3, 4, 8), per_head)
    per_sample = RotaryEmbedding(Axial(8))(torch.zeros(3, 4, 2))
    with pytest.raises(ValueError, match=r"samples and heads of the rotation, \(3, 1\): got \(3,\) from \(3, 4, 8\)"):
        rotate(torch.zeros(3, 4, 8), per_sample)
    per_block = RotaryEmbedding(Mixed(8, heads=2, blocks=3))(grid_positions(2, 2))
    with pytest.raises(ValueError, match="rotation must be that of one block: got those of 3"):
        rotate(torch.zeros(3, 2, 4, 8), per_block)
    assert torch.equal(
        rotate(torch.ones(3, 2, 4, 8), per_block.block(1))[0], rotate(torch.ones(2, 4, 8), per_block.block(1))
    )
    with pytest.raises(TypeError, match="x must be a tensor: got list"):
        rotate([1.0, 0.0], per_head)
    with pytest.raises(TypeError, match="qkv must be a tensor: got list"):
        rotate_packed([1.0, 0.0], per_head, 2)
    with pytest.raises(TypeError, match="positional argument"):
        rotate(torch.zeros(5, 8), RotaryEmbedding(Axial(8))(grid_positions(2, 2)), 1)
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"x must be a real floating tensor: got {dtype}"):
            rotate(torch.zeros(4, 8, dtype=dtype), RotaryEmbedding(Axial(8))(grid_positions(2, 2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "hlaf"}, "layout must be one of interleaved, half, half_per_axis: got 'hlaf'"),
        ({"layout": "half_per_axis"}, r"split must hold the 8 pairs of cos and sin: got \(\)"),
        ({"layout": "half_per_axis", "split": (3,)}, r"split must hold the 8 pairs of cos and sin: got \(3,\)"),
        ({"sin": torch.zeros(1, 8)}, r"cos and sin must have one shape, .*: got \(6, 8\) and \(1, 8\)"),
        ({"head_dim": 14}, r"head_dim must be even and at least 2 \* 8 pairs: got 14"),
        ({"head_dim": 17}, r"head_dim must be even and at least 2 \* 8 pairs: got 17"),
    ],
)
def test_tables_that_fit_no_head(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rotation(**{"cos": torch.ones(6, 8), "sin": torch.zeros(6, 8), "head_dim": 16} | arguments)
