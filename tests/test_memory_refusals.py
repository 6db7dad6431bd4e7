"""What memory attention refuses, with both numbers."""

import pytest
import torch

from axial_rope import Axial, Memory, Mixed, memory_from_frames, pool_frame
from tests.test_memory_properties import block, picture


def test_refusals():
    attend, x = block(pointer_span=15.0), picture(6, 8, 16).flatten(1, 2)
    tokens = torch.zeros(2, 100, 8)
    with pytest.raises(ValueError, match=r"whole frames of grid \(6, 8\) = 48 tokens, or have positions: got 100 tokens"):
        attend(x, Memory(tokens, ages=torch.ones(100)), grid=(6, 8))
    with pytest.raises(ValueError, match=r"x must have shape \(batch, 6 \* 9 = 54, dim=16\): got \(2, 48, 16\)"):
        attend(x, grid=(6, 9))
    with pytest.raises(ValueError, match=r"tokens of the batch 2 of x and memory_dim=8: got shape \(3, 48, 8\)"):
        attend(x, Memory(torch.zeros(3, 48, 8)), grid=(6, 8))
    with pytest.raises(TypeError, match=r"memory must have the dtype torch.float32 of x: got torch.bfloat16"):
        attend(x, Memory(torch.zeros(2, 48, 8).bfloat16()), grid=(6, 8))
    with pytest.raises(ValueError, match="memory must have ages, since time is an axis of the rotation: got none"):
        attend(x, Memory(torch.zeros(2, 48, 8)), grid=(6, 8))
    with pytest.raises(ValueError, match=r"and a multiple of memory_dim=8 channels: got shape \(2, 1, 12\)"):
        attend(x, Memory(torch.zeros(2, 0, 8), pointers=torch.zeros(2, 1, 12)), grid=(6, 8))
    with pytest.raises(ValueError, match="memory must have pointer_ages"):
        attend(x, Memory(torch.zeros(2, 0, 8), pointers=torch.zeros(2, 1, 8)), grid=(6, 8))
    with pytest.raises(ValueError, match="memory must have slots, since there is an age embedding: got none"):
        block(age_slots=7)(x, Memory(torch.zeros(2, 48, 8), ages=torch.ones(48)), grid=(6, 8))
    with pytest.raises(
        ValueError, match=r"frames must have shape \(batch, latents \+ 2 \* 3 = 6, channels\): got \(2, 7, 8\)"
    ):
        memory_from_frames([torch.zeros(2, 7, 8)], grids=[(2, 3)])
    with pytest.raises(ValueError, match="frames must be one or more with a grid each: got 1 frames and 2 grids"):
        memory_from_frames([torch.zeros(2, 6, 8)], grids=[(2, 3)] * 2)
    with pytest.raises(ValueError, match=r"ages must have one value for each of 1 frames: got shape \(2,\)"):
        memory_from_frames([torch.zeros(2, 6, 8)], grids=[(2, 3)], ages=[1, 2])
    with pytest.raises(ValueError, match="family must have head_dim=8 and 2 or 3 axes: got head_dim=16 and 2 axes"):
        block(family=Axial(16))
    with pytest.raises(ValueError, match="sine must hold input, self, queries, keys only: got 'values'"):
        block(sine=("values",))
    with pytest.raises(ValueError, match="age_slots must be 0, or at least 2"):
        block(age_slots=1)
    with pytest.raises(ValueError, match="depth must be at least 1: got 0"):
        block(depth=0)
    with pytest.raises(ValueError, match=r"grid must be \(height, width\), at least 1 each: got \(1, 6, 8\)"):
        attend(x, grid=(1, 6, 8))
    with pytest.raises(TypeError, match="memory must be a Memory or None: got Tensor"):
        attend(x, tokens, grid=(6, 8))
    with pytest.raises(ValueError, match="activation must be one of relu, gelu: got 'tanh'"):
        block(activation="tanh")
    with pytest.raises(ValueError, match=r"kernel must divide the grid \(3, 4\): got \(2, 2\)"):
        pool_frame(torch.zeros(1, 12, 8), (3, 4), 2)
    with pytest.raises(ValueError, match="head_dim must be at least 6 for time, rows and columns: got 4"):
        block(head_dim=4)
    with pytest.raises(ValueError, match="family must have heads=2 and blocks=2 or none: got heads=4 and blocks=5"):
        block(family=Mixed(8, heads=4, blocks=5))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"ages": torch.ones(1)}, ValueError, r"ages must have shape \(48,\) or \(2, 48\): got \(1,\)"),
        ({"slots": torch.ones(3, 48)}, ValueError, r"slots must have shape \(48,\) or \(2, 48\): got \(3, 48\)"),
        ({"counts": torch.ones(47)}, ValueError, r"counts must have shape .*: got \(47,\)"),
        ({"positions": torch.ones(1, 2)}, ValueError, r"positions must have shape \(48, 2\) or .*: got \(1, 2\)"),
        ({"mask": torch.ones(1, 48, dtype=torch.bool)}, ValueError, r"mask must have shape \(2, 48\): got \(1, 48\)"),
        ({"mask": torch.ones(2, 48)}, TypeError, r"mask must be boolean: got torch\.float32"),
        ({"placed": torch.ones(4, dtype=torch.bool)}, ValueError, r"placed must have shape \(48,\): got \(4,\)"),
        ({"key_position": torch.ones(4, 8)}, ValueError, r"key_position must have shape .*: got \(4, 8\)"),
        ({"pointers": torch.ones(3, 1, 8)}, ValueError, r"pointers must have the batch 2 of x .*: got shape \(3, 1, 8\)"),
        (
            {"pointers": torch.ones(2, 1, 8).half()},
            TypeError,
            r"pointers must have the dtype torch\.float32 .* torch\.float16",
        ),
        (
            {"pointers": torch.ones(2, 3, 8), "pointer_ages": torch.ones(2)},
            ValueError,
            r"pointer_ages must have shape \(3,\) or \(2, 3\): got \(2,\)",
        ),
        (
            {"pointers": torch.ones(2, 3, 8), "pointer_mask": torch.ones(2, 2, dtype=torch.bool)},
            ValueError,
            r"pointer_mask must have shape \(2, 3\): got \(2, 2\)",
        ),
    ],
)
def test_what_stands_beside_the_tokens_is_of_their_number(fields, error, message):
    attend, x = block(), picture(6, 8, 16).flatten(1, 2)
    with pytest.raises(error, match=message):
        attend(x, Memory(**{"tokens": torch.zeros(2, 48, 8), "ages": torch.ones(48)} | fields), grid=(6, 8))


def test_an_empty_batch():
    attend, pointers = block(pointer_span=15.0), torch.zeros(0, 3, 16)
    memory = Memory(torch.zeros(0, 48, 8), ages=torch.ones(48), pointers=pointers, pointer_ages=torch.ones(3))
    assert attend(torch.zeros(0, 48, 16), memory, grid=(6, 8)).shape == (0, 48, 16)
