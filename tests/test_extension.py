"""Extensions against transformers' own functions, over random configurations, and axis by axis."""

import random

import pytest
import torch
from golden_tables import plain, stretched

from axial_rope import (
    Axial,
    Extended,
    Mixed,
    MRope,
    Periods,
    Pixels,
    RotaryEmbedding,
    centered_positions,
    family_from_dict,
    grid_positions,
)
from axial_rope.extension import (
    dynamic_ntk,
    interpolate,
    llama3,
    longrope,
    ntk,
    proportional,
    reference_grid,
    turns,
    unseen,
    yarn,
)

COUNT = 40


def draw(kind, seed):
    """A random configuration: head_dim, longest position, present length, transformers' rope_parameters."""
    r = random.Random(f"{kind} {seed}")
    head_dim, original = r.choice([16, 32, 48, 64, 80, 96, 128]), r.choice([512, 2048, 4096, 8192, 32768])
    factor = r.choice([1.0, 1.5, 2.0, 4.0, 8.0, 32.0, round(r.uniform(1, 40), 3)])
    part = r.choice([1.0, 1.0, 0.5])
    parameters = {"rope_type": kind, "rope_theta": r.choice([100.0, 10000.0, 500000.0, 1e6]), "factor": factor}
    longest, length = original, r.choice([None, r.randint(1, 4 * original)])
    if part != 1.0 or kind == "proportional":
        parameters["partial_rotary_factor"] = part
    if kind in ("yarn", "llama3", "longrope"):
        longest = int(original * factor)
        parameters["original_max_position_embeddings"] = original
    if kind == "yarn":
        optional = {
            "beta_fast": r.choice([16, 32, 64]),
            "beta_slow": r.choice([1, 2, 4]),
            "truncate": r.choice([True, False]),
            "attention_factor": round(r.uniform(0.5, 2), 3),
            "mscale": r.choice([0.707, 1.0]),
            "mscale_all_dim": r.choice([0.0, 0.5, 1.0]),
        }
        parameters |= {key: value for key, value in optional.items() if r.random() < 0.4}
    if kind == "llama3":
        low = r.choice([1.0, 2.0])
        parameters |= {"low_freq_factor": low, "high_freq_factor": low * r.choice([1.5, 4.0])}
    if kind == "longrope":
        pairs = int(head_dim * part) // 2
        for name, most in (("short_factor", 2), ("long_factor", 30)):
            parameters[name] = [round(r.uniform(1, most), 3) for _ in range(pairs)]
        if r.random() < 0.5:
            del parameters["factor"]
        if r.random() < 0.3:
            parameters["attention_factor"] = round(r.uniform(0.5, 2), 3)
    return head_dim, longest, length, parameters


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"])
def test_one_axis_is_that_of_transformers(kind):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        pytest.skip(f"this version of transformers has no {kind}")
    changed = 0
    for seed in range(COUNT):
        head_dim, longest, length, parameters = draw(kind, seed)
        config = LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rope_parameters=dict(parameters),
        )
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        family = plain(head_dim, parameters)
        found = stretched(family, parameters, longest, length)
        torch.testing.assert_close(found.frequencies()[0], expected, rtol=6e-7, atol=0, msg=str((seed, parameters)))
        assert found.scale == pytest.approx(scale, abs=1e-9), parameters
        changed += not torch.equal(found.frequencies(), family.frequencies())
    assert changed > COUNT // 5


def test_ntk_is_that_of_lucidrains():
    """theta * factor ** (dim / (dim - 2)), the last frequency divided by the factor."""
    r = random.Random(0)
    for _ in range(COUNT):
        pairs, base, factor = r.randint(2, 64), r.choice([100.0, 256.0, 10000.0]), r.uniform(1, 16)
        dim = 2 * pairs
        family = Axial(dim, 1, base)
        expected = 1.0 / ((base * factor ** (dim / (dim - 2))) ** (torch.arange(0, dim, 2).float() / dim))
        found = ntk(family, factor).frequencies()[0]
        torch.testing.assert_close(found, expected, rtol=6e-7, atol=0)
        assert found[-1].item() == pytest.approx(family.frequencies()[0, -1].item() / factor, rel=1e-5)


RULES = {
    "interpolate": lambda family, factor: interpolate(family, factor),
    "ntk": lambda family, factor: ntk(family, factor),
    "dynamic": lambda family, factor: dynamic_ntk(family, factor, length=60, original_length=40),
    "yarn": lambda family, factor: yarn(family, factor, 40.0),
    "llama3": lambda family, factor: llama3(family, factor, 40.0),
    "proportional": lambda family, factor: proportional(family, 0.5, factor),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("axes", ["yx", "xy", "tyx", "xty"])
def test_each_axis_is_stretched_as_it_would_be_alone(rule, axes):
    """Frequencies and scale of every band, with one factor per column, equal those of the band as a 1-D family."""
    split = (5, 3, 8)[: len(axes)]
    family = Axial(40, axes, (100.0, 50.0, 1000.0)[: len(axes)], split)
    factors = [2.0, 3.0, 1.5][: len(axes)]
    found = RULES[rule](family, factors)
    scales = found.scale if isinstance(found.scale, tuple) else (found.scale,) * family.pairs
    start = 0
    for axis, base, pairs in zip(axes, family.base, split, strict=True):
        column = "tyx"[-len(axes) :].index(axis)
        alone = RULES[rule](Axial(2 * pairs, 1, base), factors[column])
        assert torch.equal(found.frequencies()[column, start : start + pairs], alone.frequencies()[0])
        assert set(scales[start : start + pairs]) == {alone.scale}
        start += pairs


@pytest.mark.parametrize("rule", RULES)
def test_one_factor_is_that_factor_on_every_axis(rule):
    family = Axial(24, "tyx", 100.0)
    assert RULES[rule](family, 2.0) == RULES[rule](family, (2.0, 2.0, 2.0))


@pytest.mark.parametrize("order", ["contiguous", "strided"])
@pytest.mark.parametrize("rule", RULES)
def test_mrope_is_stretched_as_its_one_series(rule, order):
    """As transformers does for Qwen-VL: the series first, then its pairs are dealt."""
    family = MRope(32, (6, 5, 5), 10000.0, order)
    alone = RULES[rule](Axial(32, 1, 10000.0, layout="half"), 3.0)
    found = RULES[rule](family, 3.0)
    assert torch.equal(found.frequencies().sum(dim=0), alone.frequencies()[0]) and found.scale == alone.scale


def test_pixtral_is_stretched_as_its_one_series():
    found = yarn(Axial(32, dealt=True), 4.0, 40.0).frequencies()
    alone = yarn(Axial(32, 1), 4.0, 40.0).frequencies()[0]
    assert torch.equal(found[0, :8], alone[0::2]) and torch.equal(found[1, 8:], alone[1::2])


def test_longrope_per_axis():
    family = Axial(12, "yx", pairs_per_axis=(2, 4))
    lists = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]
    options = {"length": 10, "original_length": 5, "factor": 4}
    found = longrope(family, lists, lists, **options)
    divisor = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    torch.testing.assert_close(found.frequencies() * divisor, family.frequencies())
    one = longrope(family, [None, lists[1]], [None, lists[1]], **options).frequencies()
    assert torch.equal(one[0], family.frequencies()[0]) and torch.equal(one[1], found.frequencies()[1])
    with pytest.raises(ValueError, match="one number per frequency of the axis, 2: got 4"):
        longrope(family, lists[1], lists[1], **options)


def test_reference_grid_is_the_rule_of_positions():
    """Pitfalls E7, E8: 24 x 48 over 24 x 24: rows unscaled, columns by one half."""
    family = Axial(32, base=100.0)
    found = RotaryEmbedding(reference_grid(family, (24, 48), (24, 24)))(grid_positions(24, 48))
    expected = RotaryEmbedding(family)(grid_positions(24, 48, reference=(24, 24)))
    torch.testing.assert_close(found.cos, expected.cos, rtol=0, atol=5e-6)
    torch.testing.assert_close(found.sin, expected.sin, rtol=0, atol=5e-6)


def test_yarn_scales_the_rotated_channels_alone():
    family = yarn(Axial(8, 1, pairs_per_axis=(3,)), 4.0, 40.0)
    x = torch.ones(1, 2, 8)
    from axial_rope import rotate

    out = rotate(x, RotaryEmbedding(family)(grid_positions(2)))
    assert family.scale == pytest.approx(1.1386294)
    torch.testing.assert_close(out[..., :6].norm(dim=-1), x[..., :6].norm(dim=-1) * family.scale)
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_a_scale_per_axis_is_applied_to_its_pairs():
    family = yarn(Axial(8, "yx"), (4.0, 1.0), 40.0)
    rotation = RotaryEmbedding(family)(torch.zeros(1, 2))
    assert rotation.cos.tolist() == [pytest.approx([1.1386294] * 2 + [1.0] * 2)]


def test_extensions_of_periods():
    """NTK keeps the shortest period and stretches the longest; a range is a base in other words."""
    family = Periods(24, period_range=(0.5, 4.0))
    before, after = family.frequencies(), ntk(family, 3.0).frequencies()
    assert after[0, 0] == before[0, 0] and after[0, 5].item() == pytest.approx(before[0, 5].item() / 3)
    slow = interpolate(Periods(24), 2.0)
    rope, twice = RotaryEmbedding(slow), RotaryEmbedding(Periods(24))
    positions = centered_positions(3, 5)
    torch.testing.assert_close(rope(positions).sin, twice(positions / 2).sin, rtol=0, atol=2e-6)


FAMILIES = [
    yarn(Axial(32, "xy", layout="half"), (2.0, 4.0), 16.0),
    longrope(MRope(12, (2, 2, 2)), [1.0] * 6, [2.0] * 6, length=9, original_length=4, factor=4),
    ntk(interpolate(Periods(32), 2.0), (1.0, 3.0)),
    llama3(Pixels(32), 2.0, 4.0),
    proportional(Axial(8, 1), 0.5),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.as_dict()["rules"][-1]["rule"])
def test_an_extended_family_is_plain_data(family):
    import json
    import pickle

    again = family_from_dict(json.loads(json.dumps(family.as_dict())))
    assert again == family and hash(again) == hash(family)
    assert pickle.loads(pickle.dumps(family)) == family
    assert torch.equal(again.frequencies(), family.frequencies())
    assert (again.head_dim, again.layout, again.split) == (family.head_dim, family.layout, family.split)


def test_what_was_seen_before_changes_nothing():
    family = Axial(16, 1)
    short = dynamic_ntk(family, 4.0, length=100, original_length=100)
    dynamic_ntk(family, 4.0, length=1000, original_length=100)
    assert torch.equal(short.frequencies(), family.frequencies())
    assert short == dynamic_ntk(family, 4.0, length=100, original_length=100)
    assert family == Axial(16, 1)


def test_turns_of_dinov3():
    """Pitfall E5: periods 1.0 to 74.99 on head_dim 64, and 5 of 16 bands make less than a tenth of a turn over an image."""
    family = Periods(64, base=100.0)
    found = turns(family, centered_positions(224, 224))[0, :16]
    assert found[0].item() == pytest.approx(2.0, rel=0.01) and found[-1].item() == pytest.approx(2 / 74.99, rel=0.01)
    assert int((found < 0.1).sum()) == 5
    assert turns(Mixed(16, heads=2, blocks=3), grid_positions(4, 4)).shape == (2, 3, 2, 8)


def test_unseen_pairs_are_those_that_yarn_slows():
    family = Axial(32, base=100.0)
    trained, larger = grid_positions(14, 14), grid_positions(14, 56)
    beyond = unseen(family, trained, larger)
    assert not beyond[0].any() and beyond[1, 8:].tolist() == (turns(family, trained)[1, 8:] < 1).tolist()
    assert beyond[1, -1] and not beyond[1, 8]
    assert not unseen(interpolate(family, (1.0, 56 / 14)), trained, larger)[0].any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: interpolate(Mixed(16, heads=2), 2.0), TypeError, "fixed frequencies"),
        (lambda: interpolate(Axial(16), (2.0,)), ValueError, "one number or one per axis: got 1 for 2 axes"),
        (lambda: interpolate(Axial(16), 0.0), ValueError, "factor must be positive: got 0.0"),
        (lambda: ntk(Pixels(16), 2.0), ValueError, "geometric series with base > 1 on axis y for Ntk: got base=None"),
        (lambda: ntk(Axial(4), 2.0), ValueError, "at least 2 frequencies on an axis: got 1"),
        (lambda: yarn(Axial(16, base=1.0), 2.0, 10.0), ValueError, "got base=1.0"),
        (lambda: yarn(llama3(Axial(16)), 2.0, 10.0), ValueError, "geometric series"),
        (lambda: yarn(Axial(16), 2.0, 0.0), ValueError, "original_length must be positive"),
        (lambda: llama3(Axial(16), low_freq_factor=4.0, high_freq_factor=1.0), ValueError, "at most high_freq_factor=1.0"),
        (lambda: proportional(Axial(16), 1.5), ValueError, "part must be between 0 and 1: got 1.5"),
        (lambda: reference_grid(Axial(16), (4,), (4, 4)), ValueError, "2 axes"),
        (lambda: Extended(Axial(16), [None]), ValueError, "got 1 rules for 2 axes"),
        (lambda: Extended(Axial(16), [None, 2.0]), TypeError, "got 2.0"),
        (lambda: turns(Axial(16), torch.zeros(4, 3)), ValueError, "2 columns: got 3"),
    ],
)
def test_wrong_extensions_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
