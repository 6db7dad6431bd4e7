import pytest
import torch

from axial_rope import axis_positions, centered_positions, grid_positions, pixel_positions


def test_rows_before_columns_and_row_major():
    """Pitfalls D1, D2: on a 2 x 3 grid y is [0,0,0,1,1,1] and x is [0,1,2,0,1,2]."""
    y, x = grid_positions(2, 3).unbind(-1)
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    assert x.tolist() == [0, 1, 2, 0, 1, 2]
    y, x = grid_positions(3, 4)[:4].unbind(-1)
    assert y.tolist() == [0, 0, 0, 0] and x.tolist() == [0, 1, 2, 3]


def test_frames_first():
    positions = grid_positions(2, 3, 5)
    assert positions.shape == (30, 3)
    assert positions[3 * 5 + 2 * 5 + 4].tolist() == [1, 2, 4]


def test_a_transposed_grid_is_transposed_not_stretched():
    """Pitfall D5."""
    landscape = grid_positions(30, 45).unflatten(0, (30, 45))
    portrait = grid_positions(45, 30).unflatten(0, (45, 30))
    assert torch.equal(portrait, landscape.transpose(0, 1).flip(-1))


def test_offset_before_the_reference():
    assert grid_positions(2, 2, offset=1)[0].tolist() == [1, 1]
    assert grid_positions(2, 2, offset=(0.5, 0))[-1].tolist() == [1.5, 1]
    # timm's order: (k + offset) / n * reference
    assert grid_positions(4, 2, offset=1, reference=(2, 4))[-1].tolist() == [2.0, 4.0]


def test_reference_is_per_axis():
    """Pitfalls E7, E8: 28 x 14 onto 14 x 14 has half steps in y alone, 24 x 48 onto 24 x 24 in x alone."""
    half = grid_positions(28, 14, reference=(14, 14)).unflatten(0, (28, 14))
    assert half[3, 5].tolist() == [1.5, 5]
    wide = grid_positions(24, 48, reference=(24, 24)).unflatten(0, (24, 48))
    assert wide[23, 47].tolist() == [23, 23.5]


@pytest.mark.parametrize("n", [13, 19, 22, 29, 37])
def test_reference_divides_even_when_equal(n):
    """k / n * n isn't k in float32; the references divide, so we do."""
    k = torch.arange(n, dtype=torch.float32)
    assert torch.equal(grid_positions(n, reference=(n,))[:, 0], k / n * n)
    assert not torch.equal(k / n * n, k)


@pytest.mark.parametrize(
    ("normalize", "last"), [("separate", (1 - 1 / 2, 1 - 1 / 4)), ("max", (0.75 - 1, 0.75)), ("min", (0.5, 2.5))]
)
def test_centered_normalization(normalize, last):
    assert centered_positions(2, 4, normalize=normalize)[-1].tolist() == pytest.approx(last)


def test_pixel_positions_reach_both_ends():
    assert pixel_positions(2, 5)[:5, 1].tolist() == [-1, -0.5, 0, 0.5, 1]


def test_axis_positions_takes_any_coordinates():
    positions = axis_positions(torch.tensor([0.0, 0.04]), torch.arange(2), torch.arange(3))
    assert positions.dtype == torch.float32
    assert positions[-1].tolist() == pytest.approx([0.04, 1, 2])


def test_default_dtype_changes_nothing():
    """Pitfall A11."""
    expected = grid_positions(3, 300), centered_positions(3, 300), pixel_positions(3, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = grid_positions(3, 300), centered_positions(3, 300), pixel_positions(3, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == torch.float32 and torch.equal(a, b)


def test_512_centres_are_distinct():
    """Pitfall A9: in bfloat16 there would be 385."""
    assert centered_positions(512).unique().numel() == 512


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid_positions(), r"size must be \(length,\), .*: got \(\)"),
        (lambda: grid_positions(1, 2, 3, 4), r"size must be .*: got \(1, 2, 3, 4\)"),
        (lambda: grid_positions(3, 0), r"size must have at least one cell on every axis: got \(3, 0\)"),
        (lambda: grid_positions(3, 4, offset=(1,)), "offset must have one value per axis: got 1 values for 2 axes"),
        (
            lambda: grid_positions(3, 4, reference=(1, 2, 3)),
            "reference must have one value per axis: got 3 values for 2 axes",
        ),
        (lambda: grid_positions(3, 4, reference=(0, 2)), r"reference must be positive on every axis: got \(0, 2\)"),
        (lambda: centered_positions(3, normalize="mean"), 'normalize must be "separate", "max" or "min": got \'mean\''),
        (lambda: axis_positions(), "coordinates must hold one tensor per axis: got none"),
        (lambda: axis_positions(torch.zeros(2, 2)), r"coordinates must be 1-D: those of axis 0 have shape \(2, 2\)"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("size", [(2.5, 3), ((2, 3),), ("2", 3)])
def test_sizes_are_whole_numbers(size):
    for positions in (grid_positions, centered_positions):
        with pytest.raises(TypeError, match="size must be whole numbers, one for each axis: got"):
            positions(*size)
