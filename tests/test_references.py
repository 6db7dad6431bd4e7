"""Our numbers against those that the references gave, file by file; `--golden DIR` reads another folder."""

import pytest
import torch
from conftest import GOLDEN
from golden_files import by_column, find, load
from golden_modules import MODULES
from golden_precision import PRECISION
from golden_rotations import ROTATIONS
from golden_tables import TABLES

from axial_rope import RotaryEmbedding, angles, pair_channels, rotate


def within(x, largest_angle):
    """The promised tolerance: float32 rounding of an angle, in units of a vector of about three standard deviations."""
    return (2e-6 + 1e-7 * float(largest_angle)) * float(x.abs().max()) / 3


def close(found, expected, tolerance):
    difference = (found.double() - expected.double()).abs().max().item()
    assert found.shape == expected.shape and difference <= tolerance, f"{difference:.3g} > {tolerance:.3g}"


def check_rotation_file(golden, reader):
    said = reader(golden)
    rope = RotaryEmbedding(said.family)
    if said.frequencies is not None:
        with torch.no_grad():
            rope.frequencies.copy_(said.frequencies)
    rope.requires_grad_(False)
    rotation = rope(said.positions)
    largest = angles(said.positions.float(), rope.frequencies).abs().max()

    # what the file says in the one notation
    family = said.family
    axes = said.axes or (golden.axes if "axis_order" in golden.config else "x")
    torch.testing.assert_close(said.positions.float(), by_column(golden.array("u_pos"), axes, dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rope.frequencies, by_column(golden.array("u_freq"), axes), rtol=2e-6, atol=1e-9)
    assert torch.equal(pair_channels(family.layout, family.split), golden.array("u_pairs").long())
    assert golden.config.get("layout", family.layout) == family.layout
    golden.read |= {"layout", "axis_order", "axis_dims", "head_dim"}
    unified = golden.config["unified"]
    assert (said.prefix, said.suffix) == (unified.get("prefix_tokens", 0), unified.get("suffix_tokens", 0))
    if "u_scale" in golden.arrays:
        assert family.scale == pytest.approx(golden.array("u_scale").item())

    q = golden.array("q")
    ends = {"prefix_tokens": said.prefix, "suffix_tokens": said.suffix}
    if rotation.blocks is None:
        turned = rotate(q, rotation, **ends)
    else:
        turned = torch.stack([rotate(part, rotation.block(index), **ends) for index, part in enumerate(q)])
    close(turned, golden.array("q_rot"), within(q, largest))
    if said.keys is not None:
        positions, suffix = said.keys
        k = golden.array("k")
        close(rotate(k, rope(positions), suffix_tokens=suffix), golden.array("k_rot"), within(k, largest))


def check_file(golden):
    if reader := find(ROTATIONS, golden):
        check_rotation_file(golden, reader)
    elif reader := find(MODULES, golden):
        for found, expected, x in reader(golden):
            close(found, expected, within(x, 0.0))
    elif reader := find(TABLES, golden) or find(PRECISION, golden):
        for found, expected, tolerance in reader(golden):
            close(found, expected, tolerance)
    else:
        raise AssertionError(f"no reader for {golden.name}, reference {golden.reference!r}")
    assert not golden.left_over(), f"{golden.name} states what its reader doesn't use: {golden.left_over()}"


def test_reference(golden_path):
    check_file(load(golden_path))


def changed(name, **config):
    golden = load(GOLDEN / f"{name}.npz")
    golden.config |= config
    return golden


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ropevit_axial", {"reference": "a new reference"}, "no reader for ropevit_axial.npz"),
        ("ropevit_axial", {"a_new_option": 1}, "doesn't use: {'a_new_option'}"),
        ("ropevit_axial", {"grid_hw": [7, 5]}, None),
        ("ropevit_axial", {"theta": 101.0}, None),
        ("neox_half_1d", {"layout": "interleaved"}, None),
        ("dinov3_min_base", {"normalize_coords": "max"}, None),
        ("sam2_rope_attention_cross", {"feat_sizes_wh": [5, 7]}, None),
        ("qwen25vl_rope_index", {"tokens_per_second": 1}, None),
    ],
)
def test_a_file_that_says_something_else_fails(name, change, message):
    with pytest.raises(AssertionError, match=message):
        check_file(changed(name, **change))
