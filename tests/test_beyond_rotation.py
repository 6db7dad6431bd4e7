"""What isn't a rotation."""

import pytest
import torch
from torch.nn import functional as F

from axial_rope import Axial, RotaryEmbedding, grid_positions, presets, rotate
from axial_rope.beyond_rotation import linear_attention, pool_keys, rotate_vjepa2, xpos
from axial_rope.conversion import with_layout


def test_pairs_of_vjepa2_are_no_rotation_and_say_so():
    """Pitfall F2: lengths change and scores depend on the place; the rotation of the same family keeps both."""
    torch.manual_seed(0)
    family, _, turn = presets.vjepa2(64)
    rope = RotaryEmbedding(family)
    q, k = torch.randn(2, 1, 64)

    def scores(turn):
        places = [(3, 1), (10, 8), (52, 50)]
        return torch.tensor(
            [
                (turn(q, rope(torch.full((1, 3), float(m)))) @ turn(k, rope(torch.full((1, 3), float(n)))).mT).item()
                for m, n in places
            ]
        )

    assert scores(rotate).std() < 1e-4 and scores(turn).std() > 0.1
    positions = rope(torch.full((1, 3), 5.0))
    assert abs(turn(q, positions).norm() / q.norm() - 1) > 0.005
    assert (rotate(q, positions).norm() / q.norm()).item() == pytest.approx(1.0, abs=1e-6)
    assert "kept for its checkpoints" in rotate_vjepa2.__doc__


def test_vjepa2_leaves_prefix_and_suffix_and_dtype():
    family, positions, turn = presets.vjepa2(16)
    rotation = RotaryEmbedding(family)(positions(1, 2, 3))
    x = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    out = turn(x, rotation, prefix_tokens=1, suffix_tokens=2)
    assert out.dtype == x.dtype and torch.equal(out[:, :, [0, 7, 8]], x[:, :, [0, 7, 8]])
    assert torch.equal(out[:, :, 1:7], turn(x[:, :, 1:7], rotation))
    with pytest.raises(ValueError, match='must be "interleaved"'):
        turn(x[:, :, :6], RotaryEmbedding(with_layout(family, "half"))(positions(1, 2, 3)))


def test_xpos_depends_on_distance_alone_and_not_on_the_centre():
    """Also where keys come from a cache: queries with the same centre see the scores of the full sequence."""
    torch.manual_seed(0)
    rope, q, k = RotaryEmbedding(Axial(16, 1)), torch.randn(1, 16), torch.randn(1, 16)

    def score(m, n, center):
        at = [torch.tensor([float(place)]) for place in (m, n)]
        queries, _ = xpos(rope(at[0][:, None]), at[0], center=center, scale_base=16.0)
        _, keys = xpos(rope(at[1][:, None]), at[1], center=center, scale_base=16.0)
        return (rotate(q, queries) @ rotate(k, keys).mT).item()

    assert score(9, 4, 0) == pytest.approx(score(25, 20, 7), abs=1e-4)
    with pytest.raises(ValueError, match=r"\(1,\): got \(2,\)"):
        xpos(rope(torch.zeros(1, 1)), torch.zeros(2), center=0)


def test_pooled_keys_are_means_of_rotated_ones():
    keys, values = torch.randn(2, 1, 2, 2 * 24 + 3, 8)
    pooled, shorter, log_size = pool_keys(keys, values, (4, 6), suffix_tokens=3)
    assert pooled.shape == shorter.shape == (1, 2, 2 * 6 + 3, 8)
    cell = [24 + 2 * 6 + 4, 24 + 2 * 6 + 5, 24 + 3 * 6 + 4, 24 + 3 * 6 + 5]  # frame 1, rows 2 3, columns 4 5
    torch.testing.assert_close(pooled[..., 11, :], keys[..., cell, :].mean(dim=-2))
    assert torch.equal(pooled[..., 12:, :], keys[..., 48:, :])
    assert log_size.tolist() == [pytest.approx(1.3862944)] * 12 + [0.0] * 3
    with pytest.raises(ValueError, match=r"whole frames of grid \(4, 6\) = 24 tokens .* got 50"):
        pool_keys(keys[..., :50, :], values[..., :50, :], (4, 6), suffix_tokens=3)
    with pytest.raises(ValueError, match="multiple of pool=2"):
        pool_keys(keys, values, (3, 16))


def test_linear_attention_rotates_the_numerator_alone():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    rotation = RotaryEmbedding(Axial(8, 1))(grid_positions(5))
    feature = [F.elu(x) + 1 for x in (q, k)]
    weights = rotate(feature[0], rotation) @ rotate(feature[1], rotation).mT
    expected = weights @ v / (feature[0] @ feature[1].mT).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(linear_attention(q, k, v, rotation), expected)
    shifted = RotaryEmbedding(Axial(8, 1))(grid_positions(5) + 7)
    torch.testing.assert_close(linear_attention(q, k, v, shifted), expected, rtol=1e-4, atol=1e-5)
    none = linear_attention(q, k, torch.ones_like(v), RotaryEmbedding(Axial(8, 1))(torch.zeros(5, 1)))
    torch.testing.assert_close(none, torch.ones_like(v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_attention_over_many_keys_in_low_precision(dtype):
    rotation = RotaryEmbedding(Axial(64))(grid_positions(32, 32))
    q, k, v = torch.randn(3, 1, 2, 1024, 64).to(dtype)
    out = linear_attention(q, k, v, rotation)
    assert out.dtype == dtype
    assert torch.equal(out, linear_attention(q.float(), k.float(), v.float(), rotation).to(dtype)) and out.abs().max() > 0.01
