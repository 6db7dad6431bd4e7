import pytest
import torch
from torch.nn import functional as F

from axial_rope import Axial, Mixed, RotaryAttention, RotaryEmbedding, grid_positions, rotate


@pytest.fixture
def rope():
    return RotaryEmbedding(Axial(8))


def test_self_attention_by_hand(rope):
    attend = RotaryAttention(24, heads=3)
    x, rotation = torch.randn(2, 13, 24), rope(grid_positions(3, 4))
    q, k, v = (
        projection(x).view(2, 13, 3, 8).transpose(1, 2) for projection in (attend.q_proj, attend.k_proj, attend.v_proj)
    )
    q, k = rotate(q, rotation, prefix_tokens=1), rotate(k, rotation, prefix_tokens=1)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    expected = attend.out_proj((weights @ v).transpose(1, 2).reshape(2, 13, 24))
    torch.testing.assert_close(attend(x, rotation=rotation, prefix_tokens=1), expected)


def test_permutation_equivariance_only_without_positions(rope):
    attend = RotaryAttention(16, heads=2)
    x, order = torch.randn(1, 12, 16), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attend(x[:, order]), attend(x)[:, order])
    rotation = rope(grid_positions(3, 4))
    difference = attend(x[:, order], rotation=rotation) - attend(x, rotation=rotation)[:, order]
    assert difference.abs().max() > 1e-3
    # and again with the positions permuted like the tokens
    moved = rope(grid_positions(3, 4)[order])
    torch.testing.assert_close(attend(x[:, order], rotation=moved), attend(x, rotation=rotation)[:, order])


def test_cross_attention_with_positions_of_its_own(rope):
    """Keys of another grid, with class tokens in front and pointers behind; and pitfall I5: their order doesn't matter."""
    attend = RotaryAttention(16, heads=2, context_dim=10)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 1 + 20 + 3, 10)
    rotation, key_rotation = rope(grid_positions(2, 3)), rope(grid_positions(4, 5))
    options = {"rotation": rotation, "key_prefix_tokens": 1, "key_suffix_tokens": 3}
    out = attend(x, memory, key_rotation=key_rotation, **options)
    order = torch.randperm(20)
    shuffled = torch.cat([memory[:, :1], memory[:, 1:21][:, order], memory[:, 21:]], dim=1)
    moved = rope(grid_positions(4, 5)[order])
    torch.testing.assert_close(attend(x, shuffled, key_rotation=moved, **options), out)
    assert (attend(x, shuffled, key_rotation=key_rotation, **options) - out).abs().max() > 1e-4


def test_value_apart_from_key():
    attend = RotaryAttention(16, heads=2)
    x, key, value = torch.randn(3, 1, 4, 16).unbind(0)
    assert torch.equal(attend(x, key, key), attend(x, key))
    assert not torch.equal(attend(x, key, value), attend(x, key))


def test_grouped_queries_equal_repeated_keys(rope):
    grouped = RotaryAttention(32, heads=4, kv_heads=2)
    full = RotaryAttention(32, heads=4)
    state = grouped.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            tensor = state[f"{name}.{kind}"]
            state[f"{name}.{kind}"] = tensor.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    x, rotation = torch.randn(2, 12, 32), rope(grid_positions(3, 4))
    torch.testing.assert_close(grouped(x, rotation=rotation), full(x, rotation=rotation))


def test_masks(rope):
    """Pitfall I9: boolean and additive masks agree, with fewer keys than queries."""
    attend = RotaryAttention(16, heads=2)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 3, 16)
    allowed = torch.tensor([[[[True, False, True]]], [[[True, True, False]]]])
    added = torch.zeros(2, 1, 1, 3).masked_fill(~allowed, float("-inf"))
    found = attend(x, memory, mask=allowed)
    torch.testing.assert_close(found, attend(x, memory, mask=added))
    torch.testing.assert_close(found[:1], attend(x[:1], memory[:1, [0, 2]]))


def test_causal(rope):
    attend, rotation = RotaryAttention(16, heads=2), rope(grid_positions(1, 6))
    x = torch.randn(1, 6, 16)
    out = attend(x, rotation=rotation, is_causal=True)
    torch.testing.assert_close(out[:, :4], attend(x[:, :4], rotation=rotation.slice(0, 4), is_causal=True))


def test_norms_come_before_the_rotation(rope):
    """The norm's weight sits on channels of unrotated queries, as in timm and EVA-02."""
    attend = RotaryAttention(8, heads=1, qk_norm=True)
    with torch.no_grad():
        attend.q_norm.weight.copy_(torch.arange(1.0, 9.0))
    x, rotation = torch.randn(1, 12, 8), rope(grid_positions(3, 4))
    q = rotate(F.layer_norm(attend.q_proj(x), (8,), attend.q_norm.weight, attend.q_norm.bias), rotation)
    k = rotate(F.layer_norm(attend.k_proj(x), (8,)), rotation)
    expected = attend.out_proj((q @ k.mT / 8**0.5).softmax(-1) @ attend.v_proj(x))
    torch.testing.assert_close(attend(x, rotation=rotation), expected)


def test_dropout_only_in_training():
    attend = RotaryAttention(16, heads=2, dropout=0.5)
    x = torch.randn(1, 9, 16)
    assert torch.equal(attend.eval()(x), attend(x))
    assert not torch.equal(attend.train()(x), attend(x))


def test_learned_frequencies_get_gradients_through_attention():
    rope, attend = RotaryEmbedding(Mixed(8, heads=2)), RotaryAttention(16, heads=2)
    attend(torch.randn(1, 12, 16), rotation=rope(grid_positions(3, 4))).square().sum().backward()
    assert rope.frequencies.grad.abs().min() > 0


def test_autocast():
    """Queries, keys and values meet in one dtype (pitfall B1)."""
    attend, rope = RotaryAttention(16, heads=2), RotaryEmbedding(Axial(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(torch.randn(1, 12, 16), rotation=rope(grid_positions(3, 4))).dtype == torch.bfloat16


def test_messages(rope):
    with pytest.raises(ValueError, match="dim must be divisible by heads=3, or head_dim be given: got dim=16"):
        RotaryAttention(16, heads=3)
    with pytest.raises(ValueError, match="heads must be divisible by kv_heads=3: got heads=4"):
        RotaryAttention(16, heads=4, kv_heads=3)
    attend, rotation = RotaryAttention(16, heads=2), rope(grid_positions(3, 4))
    with pytest.raises(ValueError, match="key must be given with value, key_rotation"):
        attend(torch.randn(1, 12, 16), key_rotation=rotation)
    with pytest.raises(ValueError, match=r"= 2 \+ 12 \+ 0: got 12 tokens"):
        attend(torch.randn(1, 12, 16), rotation=rotation, prefix_tokens=2)
    with pytest.raises(ValueError, match=r"dropout must be between 0 and 1: got 1\.5"):
        RotaryAttention(16, heads=2, dropout=1.5)
    x = torch.randn(2, 12, 16)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, tokens, 16\): got \(12, 16\)"):
        attend(x[0])
    with pytest.raises(ValueError, match=r"key must have shape \(batch, tokens, 16\): got \(2, 12, 8\)"):
        attend(x, x[..., :8])
    with pytest.raises(ValueError, match=r"batch 2 of x and as many tokens: got \(1, 12, 16\) and \(1, 12, 16\)"):
        attend(x, x[:1])
    with pytest.raises(ValueError, match=r"as many tokens: got \(2, 12, 16\) and \(2, 11, 16\)"):
        attend(x, x, x[:, 1:])
    with pytest.raises(TypeError, match=r"mask must be boolean or floating: got torch\.int64"):
        attend(x, mask=torch.ones(12, 12, dtype=torch.int64))
    for shape in ((12,), (2, 12), (12, 11), (3, 12, 12), (1, 2, 2, 12, 12)):
        with pytest.raises(ValueError, match=r"mask must be broadcastable to .* = \(2, 2, 12, 12\): got"):
            attend(x, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must not be given with is_causal=True"):
        attend(x, mask=torch.ones(12, 12, dtype=torch.bool), is_causal=True)
