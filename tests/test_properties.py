"""The three tests that catch most silent faults of rotary code, for every family, layout and dtype, on any grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axial_rope import Axial, Mixed, MRope, Periods, Pixels, RotaryEmbedding, grid_positions, pair_channels, rotate

LAYOUTS = st.sampled_from(["interleaved", "half", "half_per_axis"])
AXES = st.sampled_from(["x", "yx", "xy", "tyx", "xty"])
TOLERANCE = {torch.float64: 2e-4, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.02}
CAST = st.sampled_from([lambda m: m, lambda m: m.half(), lambda m: m.bfloat16().float(), lambda m: m.double()])


@st.composite
def families(draw):
    axes, layout = draw(AXES), draw(LAYOUTS)
    columns = len(axes)
    split = tuple(draw(st.integers(0 if columns > 1 else 1, 4)) for _ in axes)
    split = split if sum(split) else (1,) * columns
    head_dim = 2 * sum(split) + 2 * draw(st.integers(0, 2))
    options = {"axes": axes, "pairs_per_axis": split, "layout": layout}
    kind = draw(st.sampled_from([Axial, Periods, Pixels, Mixed, MRope]))
    if kind is MRope and columns == 3:
        section = draw(st.integers(1, 4))
        order, base = draw(st.sampled_from(["contiguous", "strided"])), draw(st.floats(1.0, 1e5))
        return MRope(
            head_dim + 6 * section, (section,) * 3, base, order, 6 * section, draw(st.sampled_from(["half", "interleaved"]))
        )
    if kind is Mixed and columns > 1:
        return Mixed(2 * columns * draw(st.integers(1, 3)), heads=2, axes=columns, layout="half")
    if kind in (Axial, Mixed, MRope):
        dealt = len(set(split)) == 1 and draw(st.booleans())
        return Axial(head_dim, base=draw(st.floats(1.0, 1e5)), dealt=dealt, **options)
    return kind(head_dim, **options)


def draw_rope(data, family):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    rope = data.draw(CAST)(RotaryEmbedding(family))
    rope(grid_positions(*data.draw(st.tuples(*[st.integers(1, 5)] * family.columns))))  # another grid before
    return rope


@settings(max_examples=120, deadline=None)
@given(data=st.data(), family=families(), dtype=st.sampled_from(list(TOLERANCE)), prefix=st.integers(0, 3))
def test_scores_depend_on_differences_of_positions_alone(data, family, dtype, prefix):
    """Relative property, on non-square grids, after a prefix, after a cast and a change of grid."""
    rope = draw_rope(data, family)
    grid = data.draw(st.tuples(*[st.integers(2, 6)] * family.columns))
    shift = torch.tensor(data.draw(st.tuples(*[st.integers(-3, 3)] * family.columns)))
    positions = grid_positions(*grid)
    q, k = torch.randn(2, 1, 2, prefix + len(positions), family.head_dim).to(dtype)

    def scores(positions):
        rotation = rope(positions)
        a, b = (rotate(x, rotation, prefix_tokens=prefix)[..., prefix:, :].double() for x in (q, k))
        return a @ b.mT

    scale = 1 + float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    turns = 1e-6 * float(
        (positions.abs().max() + 3) * rope.frequencies.detach().abs().max()
    )  # float32 rounding of large angles
    difference = (scores(positions + shift) - scores(positions)).detach().abs().max()
    assert difference <= scale * (TOLERANCE[dtype] / 10 + turns)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), family=families(), dtype=st.sampled_from(list(TOLERANCE)))
def test_length_is_kept(data, family, dtype):
    rope = draw_rope(data, family)
    positions = grid_positions(*data.draw(st.tuples(*[st.integers(1, 6)] * family.columns)))
    x = torch.randn(1, 2, 2 + len(positions), family.head_dim).to(dtype)
    out = rotate(x, rope(positions), prefix_tokens=2)
    torch.testing.assert_close(
        out.detach().double().norm(dim=-1), x.double().norm(dim=-1), rtol=TOLERANCE[dtype] / 10 + 1e-5, atol=1e-3
    )
    assert torch.equal(out[..., :2, :], x[..., :2, :])


@settings(max_examples=80, deadline=None)
@given(data=st.data(), family=families())
def test_moving_along_an_axis_changes_the_pairs_of_that_axis_alone(data, family):
    """Axis isolation; in a mixed family every axis moves every pair (pitfall F7)."""
    rope = draw_rope(data, family)
    here = torch.tensor([data.draw(st.tuples(*[st.floats(-4, 4)] * family.columns))])
    x = torch.randn(1, 2, 1, family.head_dim)
    before = rotate(x, rope(here))
    pairs = pair_channels(family.layout, family.split)
    for axis in range(family.columns):
        step = torch.zeros(1, family.columns)
        step[0, axis] = 0.37
        changed = (rotate(x, rope(here + step)) != before).any(dim=1).flatten()  # (head_dim,)
        turned = changed[pairs].any(-1)
        assert not changed[2 * family.pairs :].any()
        if isinstance(family, Mixed):
            assert turned.float().mean() > 0.5
            continue
        if isinstance(family, MRope):
            own = torch.tensor(family.axis_of_pair) == axis
            assert turned[own].any() and not turned[~own].any()
            continue
        name = "tyx"[-family.columns :][axis]
        index = str(family.axes).index(name)
        start = sum(family.split[:index])
        own = torch.zeros(family.pairs, dtype=torch.bool)
        own[start : start + family.split[index]] = True
        assert not turned[~own].any()
        if isinstance(family, Axial) and family.split[index]:
            assert turned[start]


@pytest.mark.parametrize("layout", ["interleaved", "half", "half_per_axis"])
def test_scores_across_rows_and_columns(layout):
    """Pitfall D1: score(q at (0,2), k at (0,1)) == score((1,2), (1,1)), and row steps differ from column steps."""
    torch.manual_seed(0)
    rope = RotaryEmbedding(Axial(16, layout=layout))
    q, k = torch.randn(2, 1, 16)

    def score(a, b):
        return (rotate(q, rope(torch.tensor([a]))) @ rotate(k, rope(torch.tensor([b]))).mT).item()

    assert score((0, 2), (0, 1)) == pytest.approx(score((1, 2), (1, 1)), abs=1e-5)
    assert abs(score((0, 2), (0, 1)) - score((2, 0), (1, 0))) > 1e-2
