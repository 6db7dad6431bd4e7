"""Orders of tokens, packed and multimodal sequences, frame times, augmentation."""

import pytest
import torch

from axial_rope import (
    Axial,
    Image,
    MRope,
    RotaryAttention,
    RotaryEmbedding,
    Text,
    Video,
    augment_positions,
    axis_positions,
    block_order,
    centered_positions,
    cropped_positions,
    frame_times,
    grid_positions,
    merge_order,
    merged_positions,
    multimodal_parts,
    multimodal_positions,
    packed_mask,
    packed_positions,
    rotate,
    window_order,
)

# orders --------------------------------------------------------------------------------------------------------------


def test_merged_order_is_block_after_block():
    order = merge_order(4, 6, frames=2)
    blocks = order.reshape(2, 2, 3, 2, 2)
    for t in range(2):
        for h in range(2):
            for w in range(3):
                corner = t * 24 + 2 * h * 6 + 2 * w
                assert blocks[t, h, w].tolist() == [[corner, corner + 1], [corner + 6, corner + 7]]
    assert torch.equal(merged_positions(4, 6, frames=2), grid_positions(4, 6).repeat(2, 1)[order])
    assert torch.equal(merged_positions(5, 7, merge=1), grid_positions(5, 7))


def test_windows_cover_every_cell_once():
    """Also where the windows don't divide the grid; each window's cells are in row-major order."""
    order, lengths = window_order(2, 5, 7, window=(2, 3))
    assert order.sort().values.tolist() == list(range(70))
    assert lengths.tolist() == [6, 6, 2, 6, 6, 2, 3, 3, 1] * 2
    assert order[12:14].tolist() == [6, 13] and order[35:38].tolist() == [35, 36, 37]
    assert torch.equal(order[order.argsort()], torch.arange(70))


def test_windows_of_merged_blocks():
    """Qwen2.5-VL: tokens and positions are permuted alike, so that a window holds whole blocks of neighbours."""
    order, lengths = window_order(2, 3, window=2)
    positions = merged_positions(4, 6)[block_order(order, 4)]
    assert (lengths * 4).tolist() == [16, 8]
    first, second = positions.split([16, 8])
    assert first.amax(dim=0).tolist() == [3, 3] and second.amin(dim=0).tolist() == [0, 4]


def test_window_coordinates_may_be_those_of_the_image():
    """Pitfall L9: scores within a window are the same for window-local and global positions."""
    rope = RotaryEmbedding(Axial(16, base=100.0))
    q, k = torch.randn(2, 1, 1, 6, 16)
    local = grid_positions(2, 3)
    scores = [
        rotate(q, rope(positions)) @ rotate(k, rope(positions)).mT for positions in (local, local + torch.tensor([4.0, 9.0]))
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


# packing -------------------------------------------------------------------------------------------------------------


def test_packed_equals_one_by_one():
    """Pitfalls L4, L5, H7: table rows are those of each grid, and attention is that of separate calls; odd lengths too."""
    torch.manual_seed(0)
    grids = [(2, 2), (3, 3), (1, 5)]
    positions = packed_positions(grids)
    assert torch.equal(positions, torch.cat([grid_positions(*grid) for grid in grids]))
    rope, attend = RotaryEmbedding(Axial(8)), RotaryAttention(16, 2).requires_grad_(False)
    lengths = [h * w for h, w in grids]
    x = torch.randn(1, sum(lengths), 16)
    packed = attend(x, rotation=rope(positions), mask=packed_mask(lengths))
    alone = [
        attend(part, rotation=rope(grid_positions(*grid))) for part, grid in zip(x.split(lengths, dim=1), grids, strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


def test_packed_positions_by_another_rule():
    packed = packed_positions([(1, 3), (2, 1)], centered_positions)
    assert torch.equal(packed, torch.cat([centered_positions(1, 3), centered_positions(2, 1)]))


# time ----------------------------------------------------------------------------------------------------------------


def test_videos_of_different_speed_have_different_times():
    """Pitfall H3."""
    slow, fast = frame_times(4, fps=1.0), frame_times(4, fps=30.0)
    assert slow.tolist() == [0, 1, 2, 3] and fast[3].item() == pytest.approx(0.1)
    rope = RotaryEmbedding(Axial(12, 3))
    tables = [rope(axis_positions(times, torch.arange(2), torch.arange(2))).cos for times in (slow, fast)]
    assert not torch.equal(*tables)
    assert frame_times(3, fps=4.0, frames_per_token=2, start=1.0).tolist() == [1.0, 1.5, 2.0]


# training ------------------------------------------------------------------------------------------------------------


def test_augmentation_is_one_draw_for_all_tokens():
    torch.manual_seed(0)
    positions = centered_positions(5, 7)
    shifted = augment_positions(positions, shift=0.5) - positions
    torch.testing.assert_close(shifted, shifted[:1].expand(35, 2))
    assert shifted.abs().max() <= 0.5 and shifted[0, 0] != shifted[0, 1]
    jittered = augment_positions(positions, jitter=1.5) / positions
    ratio = jittered[(positions != 0).all(dim=1)][0]
    assert (ratio.log().abs() <= torch.tensor(1.5).log() + 1e-6).all() and ratio[0] != ratio[1]
    rescaled = augment_positions(positions, rescale=2.0) / positions
    ratio = rescaled[(positions != 0).all(dim=1)]
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert torch.equal(augment_positions(positions), positions)


def test_augmentation_draws_from_its_generator():
    generator = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    first = augment_positions(centered_positions(2, 2), shift=1.0, generator=generator)
    again = augment_positions(centered_positions(2, 2), shift=1.0, generator=generator.manual_seed(3))
    assert torch.equal(first, again) and torch.equal(torch.get_rng_state(), state)


# text, images, videos ------------------------------------------------------------------------------------------------


def test_text_after_an_image_goes_on_from_its_longer_side():
    """Pitfall H5: 2 x 3 tokens after four text tokens move the next text to 4 + 3 = 7."""
    positions, following = multimodal_positions([Text(4), Image(2, 3), Text(1)])
    assert positions[-1].tolist() == [7, 7, 7] and following == 8
    assert positions[4:10].T.tolist() == [[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]]


def test_text_alone_is_one_dimensional_rope():
    """Pitfall H5: to the bit, for both orders of sections."""
    positions, following = multimodal_positions([Text(50)])
    assert following == 50
    x = torch.randn(1, 2, 50, 32)
    expected = rotate(x, RotaryEmbedding(Axial(32, 1, 1e6, layout="half"))(grid_positions(50)))
    for order in ("contiguous", "strided"):
        rotation = RotaryEmbedding(MRope(32, (6, 5, 5), 1e6, order))(positions)
        assert torch.equal(rotate(x, rotation), expected)


def test_times_of_a_video_start_where_it_does_and_move_on():
    """Pitfall H2."""
    positions, following = multimodal_positions([Text(60), Video(3, 2, 2), Text(1)])
    assert positions[60::4, 0].tolist() == [60, 61, 62, 63] and following == 64


def test_times_in_seconds():
    """Pitfall H3: half a second per frame at 3 positions per second, floored or kept."""
    video = [Video(4, 1, 2, seconds_per_frame=0.5), Text(1)]
    whole, following = multimodal_positions(video, tokens_per_second=3)
    assert whole[::2, 0].tolist() == [0, 1, 3, 4, 5] and following == 6
    kept, following = multimodal_positions(video, tokens_per_second=3, whole_times=False)
    assert kept[::2, 0].tolist() == [0, 1.5, 3, 4.5, 5] and following == 6
    other, _ = multimodal_positions([Video(4, 1, 2, seconds_per_frame=1.0)], tokens_per_second=3)
    assert not torch.equal(other, whole[:8])


def test_left_padding_moves_nothing():
    """Pitfalls H7, H8: the same samples padded and not give the same attention; the module holds no state between calls."""
    torch.manual_seed(0)
    parts = [Text(2), Image(2, 2), Text(1)]
    alone, following = multimodal_positions(parts)
    padded, same = multimodal_positions(parts, left_padding=3)
    assert torch.equal(padded[3:], alone) and padded[:3].eq(1).all() and following == same
    rope, attend = RotaryEmbedding(MRope(12, (2, 2, 2), 100.0)), RotaryAttention(24, 2).requires_grad_(False)
    x = torch.randn(1, 7, 24)
    mask = (torch.arange(10) >= 3)[None]
    out = attend(torch.cat([torch.randn(1, 3, 24), x], dim=1), rotation=rope(padded[None]), mask=mask)
    torch.testing.assert_close(out[:, 3:], attend(x, rotation=rope(alone)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_changes_no_position_of_a_sequence(dtype):
    """Pitfall A11."""
    makers = [
        lambda: multimodal_positions([Text(2), Image(2, 3)], left_padding=2)[0],
        lambda: multimodal_positions([], left_padding=2)[0],
        lambda: packed_positions([(2, 2), (3, 3)]),
        lambda: cropped_positions(4, 4, start=(0, 0), stop=(2, 2)),
        lambda: frame_times(3, fps=3.0),
    ]
    before = [make() for make in makers]
    torch.set_default_dtype(dtype)
    try:
        after = [make() for make in makers]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(before, after, strict=True))


def test_grids_tell_adjacent_images_apart():
    types = [0, *[1] * 6, 0, *[2] * 8]
    parts = multimodal_parts(
        types, image_grids=[(1, 2, 4), (1, 4, 4)], video_grids=[(2, 4, 4)], seconds_per_frame=[0.5], merge=2
    )
    assert parts == [Text(1), Image(2, 4), Image(4, 4), Text(1), Video(2, 4, 4, 0.5)]
    positions, _ = multimodal_positions(parts, merge=2)
    assert len(positions) == len(types)


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: merge_order(4, 5), ValueError, "multiples of merge=2: got 4 and 5"),
        (lambda: window_order(4, window=2), ValueError, "got"),
        (lambda: window_order(4, 4, window=0), ValueError, "at least 1"),
        (lambda: packed_positions([(2, 2), (1, 2, 2)]), ValueError, "same number of axes"),
        (lambda: packed_positions([]), ValueError, "one or more"),
        (lambda: frame_times(3, fps=None), ValueError, "fps must be a positive number .* got None"),
        (lambda: frame_times(3), TypeError, "fps"),
        (lambda: frame_times(0, fps=1.0), ValueError, "at least 1: got 0"),
        (lambda: cropped_positions(4, 4, start=(0,), stop=4), ValueError, "start must have one value per axis"),
        (lambda: augment_positions(torch.zeros(1, 2), shift=-1.0), ValueError, "shift must not be negative: got -1"),
        (lambda: augment_positions(torch.zeros(1, 2), jitter=0.5), ValueError, "jitter must be at least 1: got 0.5"),
        (lambda: multimodal_positions([Image(3, 4)], merge=2), ValueError, "merge=2: got Image"),
        (lambda: multimodal_positions([Video(2, 2, 2)], tokens_per_second=2), ValueError, "seconds_per_frame must be given"),
        (lambda: multimodal_positions(["text"]), TypeError, "Text, Image or Video: got 'text'"),
        (lambda: multimodal_positions([Text(1)], left_padding=-1), ValueError, "got -1"),
        (lambda: multimodal_parts([1] * 4, image_grids=[(1, 2, 3)]), ValueError, "got 4 image tokens, .* of 6 tokens"),
        (lambda: multimodal_parts([2] * 4), ValueError, r"got 4 video tokens, and 0 grids"),
        (
            lambda: multimodal_parts([1, 0, 1], image_grids=[(1, 1, 2)]),
            ValueError,
            "the 2 tokens of grid .* got 1 of type 1",
        ),
        (lambda: multimodal_parts([3]), ValueError, r"got \[3\]"),
        (lambda: multimodal_parts([1], image_grids=[(1, 1)]), ValueError, "frames, height, width"),
        (
            lambda: multimodal_parts([2, 2], video_grids=[(2, 1, 1)], seconds_per_frame=[1.0, 2.0]),
            ValueError,
            "got 2 for 1 videos",
        ),
    ],
)
def test_wrong_sequences_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_ids_with_the_axes_in_front_raise():
    """Pitfall H10: transformers' (3, batch, tokens) isn't (batch, tokens, 3)."""
    rope = RotaryEmbedding(MRope(12, (2, 2, 2)))
    ids = multimodal_positions([Text(2), Image(2, 3)])[0].T[:, None]
    with pytest.raises(ValueError, match=r"\(batch, tokens, axes=3\): got \(3, 1, 8\)"):
        rope(ids)
    with pytest.raises(ValueError, match=r"got \(8,\)"):
        rope(torch.arange(8))
    rotation = rope(ids.permute(1, 2, 0))
    assert rotation.cos.shape == (1, 1, 8, 6)
    assert torch.equal(torch.cat([rotation.slice(0, 3).cos, rotation.slice(3, 8).cos], dim=-2), rotation.cos)
