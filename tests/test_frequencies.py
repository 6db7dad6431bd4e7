import math
import pickle

import pytest
import torch

from axial_rope import Axial, Mixed, MRope, Periods, Pixels, family_from_dict

FAMILIES = [
    Axial(64),
    Axial(64, axes="xy", base=100.0, pairs_per_axis=(24, 8), layout="half"),
    Axial(48, axes=3, base=(100.0, 10.0, 1000.0), layout="half_per_axis"),
    Axial(32, dealt=True),
    MRope(64, (12, 10, 10), order="strided"),
    Periods(32),
    Periods(32, period_range=(0.1, 4.0)),
    Periods(8, periods=(0.5, 2.0)),
    Pixels(32, spacing="linear"),
    Mixed(32, heads=2),
    Mixed(48, heads=3, blocks=2, axes=3, layout="half"),
]


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_family_is_plain_data(family):
    data = family.as_dict()
    assert family_from_dict(data) == family
    assert eval(repr(family)) == family
    assert pickle.loads(pickle.dumps(family)) == family
    assert hash(family) == hash(family_from_dict(data))


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_tables_are_float32_on_the_cpu_whatever_the_default_is(family):
    """Pitfall A11."""
    torch.manual_seed(3)
    expected = family.frequencies()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(3)
        with torch.device("meta"):
            found = family.frequencies()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and found.device.type == "cpu"
    assert torch.equal(expected, found)
    assert expected.shape[0] == family.columns and expected.shape[-1] == family.pairs


def test_axial_by_hand():
    y_first = Axial(8, base=16.0).frequencies()
    assert y_first.tolist() == [[1.0, 0.25, 0, 0], [0, 0, 1.0, 0.25]]
    x_first = Axial(8, axes="xy", base=16.0).frequencies()
    assert x_first.tolist() == [[0, 0, 1.0, 0.25], [1.0, 0.25, 0, 0]]


def test_unequal_split_follows_the_order_of_axes():
    """Pitfall G10: (16, 48) channels on head_dim 64."""
    table = Axial(64, axes="xy", pairs_per_axis=(24, 8)).frequencies()
    assert (table[1, :24] > 0).all() and (table[1, 24:] == 0).all()
    assert (table[0, 24:] > 0).all() and (table[0, :24] == 0).all()
    # 16 pairs on y, 16 on x, none on t
    table = Axial(64, axes=3, pairs_per_axis=(0, 16, 16)).frequencies()
    assert (table[0] == 0).all() and table[1, :16].min() > 0 and table[2, 16:].min() > 0


def test_partial_rotation_uses_the_rotated_width():
    """GPT-J: rotary_dim 16 of 32 has exponents 2i / 16."""
    family = Axial(32, axes=1, pairs_per_axis=(8,))
    assert family.pairs == 8
    expected = [10000.0 ** (-2 * i / 16) for i in range(8)]
    assert family.frequencies()[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_base_per_axis():
    table = Axial(12, axes=3, base=(4.0, 9.0, 16.0)).frequencies()
    assert table[0].tolist() == pytest.approx([1, 0.5, 0, 0, 0, 0])
    assert table[1].tolist() == pytest.approx([0, 0, 1, 1 / 3, 0, 0])
    assert table[2].tolist() == pytest.approx([0, 0, 0, 0, 1, 0.25])


def test_dinov3_periods():
    """Pitfall E5: head_dim 64 at base 100 has periods from 1 to 74.99."""
    periods = Periods(64).period_band(16)
    assert periods[0] == 1 and periods[-1].item() == pytest.approx(74.99, abs=0.005)
    table = Periods(64).frequencies()
    assert table[0, 15].item() == pytest.approx(2 * math.pi / 74.989, rel=1e-4)
    ranged = Periods(16, period_range=(0.5, 4.0)).period_band(4)
    assert ranged.tolist() == pytest.approx([0.5, 1, 2, 4])


def test_pixel_bands():
    log, linear = Pixels(16, max_frequency=16).frequencies(), Pixels(16, max_frequency=8, spacing="linear").frequencies()
    assert (log[0, :4] / math.pi).tolist() == pytest.approx([1, 2, 4, 8])
    assert (linear[0, :4] / math.pi).tolist() == pytest.approx([1, 2, 3, 4])


def test_mixed_directions_are_orthogonal_and_per_head():
    """Pitfall F7: every pair turns along all axes."""
    for axes in (2, 3):
        family = Mixed(12 * axes, heads=4, blocks=3, axes=axes)
        table = family.frequencies().unflatten(-1, (axes, -1))  # (axes, blocks, heads, directions, share)
        assert (table != 0).all()
        assert (table[:, 0, 0] != table[:, 1, 1]).any()
        frames = table[..., 0]
        gram = torch.einsum("ablm,abln->blmn", frames, frames)
        assert torch.allclose(gram, torch.eye(axes).expand_as(gram), atol=1e-6)
        assert torch.allclose(table.norm(dim=0)[0, 0, 0], 10.0 ** (-torch.arange(6) / 6.0), atol=1e-6)


def test_mixed_without_random_directions_is_axial():
    table = Mixed(8, heads=2, base=16.0, random_directions=False).frequencies()
    expected = torch.tensor([[0, 0, 1, 0.25], [1, 0.25, 0, 0]])
    assert torch.allclose(table, expected[:, None].expand(2, 2, 4), atol=1e-6)


@pytest.mark.parametrize("axes", [2, 3])
def test_directions_follow_no_default(axes):
    """Pitfalls A11, J10."""
    family = Mixed(24, heads=2, axes=axes, random_directions=False)
    exact = family.frequencies()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(family.frequencies(), exact) and exact.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(family.frequencies(), exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Axial(65), "head_dim must be even and at least 2: got head_dim=65"),
        (lambda: Axial(66), r"head_dim must be divisible by 2 \* axes = 4 for equal shares: got head_dim=66"),
        (lambda: Axial(64, axes=3), r"head_dim must be divisible by 2 \* axes = 6 for equal shares: got head_dim=64"),
        (lambda: Axial(64, axes=4), "axes must be 1, 2 or 3, or a string such as 'yx': got 4"),
        (lambda: Axial(64, axes="xz"), "axes must be an order of 'x', 'yx' or 'tyx': got 'xz'"),
        (lambda: Axial(64, axes="yy"), "axes must be an order of 'x', 'yx' or 'tyx': got 'yy'"),
        (lambda: Axial(64, pairs_per_axis=(16, 17)), r"between 1 and head_dim / 2 = 32 pairs: got \(16, 17\), 33 pairs"),
        (lambda: Axial(64, pairs_per_axis=(-1, 16)), "pairs_per_axis must hold between 1 and head_dim / 2 = 32 pairs"),
        (lambda: Axial(64, pairs_per_axis=(16,)), "pairs_per_axis must have one number per axis: got 1 numbers for 2 axes"),
        (lambda: Axial(64, base=0.0), "base must be positive: got 0.0"),
        (lambda: Axial(64, base=float("nan")), "base must be positive: got nan"),
        (lambda: Periods(64, base=0.0), "base must be positive: got 0.0"),
        (lambda: Axial(64, base=(1.0, 2.0, 3.0)), "base must be one number or one per axis: got 3 for 2 axes"),
        (lambda: Axial(64, layout="halves"), "layout must be one of interleaved, half, half_per_axis: got 'halves'"),
        (lambda: Periods(64, base=1.0, periods=(1.0,)), "must not be given together: got base and periods"),
        (lambda: Periods(64, period_range=(1.0,)), r"period_range must be \(shortest, longest\): got 1 numbers"),
        (lambda: Periods(64, periods=(1.0, 2.0)), r"periods must have one number per pair of an axis, \(16, 16\): got 2"),
        (lambda: Periods(8, periods=(1.0, -2.0)), "periods must be positive"),
        (lambda: Pixels(64, spacing="cubic"), 'spacing must be "log" or "linear": got \'cubic\''),
        (lambda: Pixels(64, max_frequency=1), "max_frequency must be at least 2: got 1"),
        (lambda: Mixed(66, heads=2), r"head_dim must be divisible by 2 \* axes = 4 for equal shares: got head_dim=66"),
        (lambda: Mixed(64, heads=0), "heads and blocks must be at least 1: got heads=0, blocks=None"),
        (lambda: Mixed(64, heads=2, axes=1), "axes must be 2 or 3: got 1"),
        (lambda: Mixed(64, heads=2, base=-1.0), "base must be positive: got -1.0"),
        (lambda: Mixed(64, heads=2, layout="half_per_axis"), 'layout must be "interleaved" or "half"'),
        (lambda: family_from_dict({"family": "Axiel"}), r"family must be one of \['Axial'.*\]: got 'Axiel'"),
        (
            lambda: family_from_dict({"family": "Axial", "head_dim": 8, "theta": 1}),
            "family must be given arguments of Axial",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Axial(64.0), "head_dim must be a whole number: got 64.0"),
        (lambda: Mixed(64.0, heads=2), "head_dim must be a whole number: got 64.0"),
        (lambda: Axial(64, pairs_per_axis=(16.0, 16)), "pairs_per_axis must be a whole number: got 16.0"),
        (lambda: MRope(12, sections=(2, 2, 2.0)), "sections must be a whole number: got 2.0"),
    ],
)
def test_parts_of_a_head_are_whole(call, message):
    with pytest.raises(TypeError, match=message):
        call()
