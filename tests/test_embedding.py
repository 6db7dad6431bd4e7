import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from axial_rope import Axial, Mixed, Periods, RotaryEmbedding, grid_positions
from axial_rope.extension import interpolate, yarn

KINDS = [
    Axial(32, base=100.0),
    Axial(32, dealt=True, layout="half"),
    Periods(32),
    Periods(32, period_range=(0.05, 3.0)),
    yarn(Axial(32, base=100.0), (1.0, 2.0), 16.0),
    Mixed(32, heads=2),
    Mixed(32, heads=2, blocks=3),
]


def table(rope, *grid):
    rotation = rope(grid_positions(*grid))
    return torch.stack([rotation.cos, rotation.sin]).detach()


@pytest.mark.parametrize("family", KINDS, ids=repr)
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16().float(),
        lambda m: torch.nn.Sequential(m).half()[0],
    ],
)
def test_casting_the_model_changes_no_angle(family, cast):
    """Pitfalls A1, A3, A4, A12, J13: the table is bitwise the same on a 64 x 64 grid."""
    rope = RotaryEmbedding(family)
    expected = table(rope, 64, 64)
    rope = cast(rope)
    assert rope.frequencies.dtype == torch.float32
    assert torch.equal(table(rope, 64, 64), expected)


@pytest.mark.parametrize("family", KINDS, ids=repr)
def test_autocast_and_default_dtype_change_nothing(family):
    """Pitfalls A10, A11."""
    rope = RotaryEmbedding(family)
    expected = table(rope, 5, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(table(rope, 5, 300), expected)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(table(rope, 5, 300), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_double_makes_learned_angles_double():
    rope = RotaryEmbedding(Mixed(8, heads=2)).double()
    rotation = rope(grid_positions(2, 3))
    assert rotation.cos.dtype == torch.float64
    rotation.cos.sum().backward()
    assert rope.frequencies.grad.dtype == torch.float64


def test_gradients_survive_a_cast():
    rope = RotaryEmbedding(Mixed(8, heads=2))
    rope(grid_positions(2, 3)).cos.sum().backward()
    grad = rope.frequencies.grad.clone()
    rope.bfloat16()
    assert rope.frequencies.requires_grad and torch.equal(rope.frequencies.grad, grad)


@pytest.mark.parametrize("family", KINDS, ids=repr)
def test_state_dict_holds_learned_frequencies_alone(family):
    """Pitfalls E1, E2, E3, J9, J13: nothing of the size of a grid, the same keys after any grid."""
    rope = RotaryEmbedding(family)
    for grid in [(14, 14), (7, 9), (3, 30)]:
        rope(grid_positions(*grid))
    assert list(rope.state_dict()) == (["frequencies"] if family.learned else [])
    assert [name for name, _ in rope.named_parameters()] == list(rope.state_dict())
    assert not any(buffer.is_complex() for buffer in rope.buffers())
    tensors = [name for name, value in vars(rope).items() if isinstance(value, torch.Tensor)]
    assert tensors == []


def test_grids_change_between_calls():
    """Pitfall E1: 14 x 14, 7 x 9, 14 x 14: the second 14 x 14 is bitwise the first."""
    rope = RotaryEmbedding(Axial(32))
    first = table(rope, 14, 14)
    assert rope(grid_positions(7, 9)).cos.shape == (63, 16)
    assert torch.equal(table(rope, 14, 14), first)


def test_equal_shapes_with_other_positions_never_mix():
    """Pitfall J6."""
    rope = RotaryEmbedding(Axial(8))
    for step in range(100):
        rotation = rope(torch.full((2, 2), float(step)))
        assert rotation.cos[0, 0].item() == pytest.approx(torch.tensor(float(step)).cos().item(), abs=1e-6)


def test_models_of_different_kinds_side_by_side():
    """Pitfalls B5, J5: alternating models give what each gives alone."""
    a, b = RotaryEmbedding(Axial(32, base=100.0)), RotaryEmbedding(Axial(32, base=10000.0)).half()
    alone = table(a, 4, 5), table(b, 4, 5)
    for _ in range(3):
        assert torch.equal(table(a, 4, 5), alone[0]) and torch.equal(table(b, 4, 5), alone[1])
    assert not torch.equal(*alone)


def test_threads():
    """Pitfall J15."""
    rope = RotaryEmbedding(Axial(16))
    grids = [(1 + i % 7, 1 + i % 11) for i in range(400)]
    serial = [table(rope, *grid) for grid in grids]
    with ThreadPoolExecutor(8) as pool:
        for found, expected in zip(pool.map(lambda grid: table(rope, *grid), grids), serial, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("family", KINDS, ids=repr)
def test_deepcopy_and_pickle_after_a_forward(family):
    """Pitfall J14."""
    rope = RotaryEmbedding(family).train()
    expected = table(rope, 3, 4)
    for twin in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(table(twin, 3, 4), expected)
        assert twin.frequencies.data_ptr() != rope.frequencies.data_ptr()


@pytest.mark.parametrize("family", KINDS, ids=repr)
def test_meta_device(family):
    """Pitfall J10: made on the meta device, filled from a checkpoint, it equals the normal build."""
    source = RotaryEmbedding(family)
    for assign in (False, True):
        with torch.device("meta"):
            rope = RotaryEmbedding(family)
        assert rope.frequencies.is_meta
        if not assign:
            rope.to_empty(device="cpu")
        rope.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(table(rope, 5, 6), table(source, 5, 6))


def test_learned_frequencies_get_a_gradient_on_every_step():
    """Pitfall J8."""
    rope = RotaryEmbedding(Mixed(8, heads=2))
    for _ in range(2):
        rope.zero_grad()
        rope.train()(grid_positions(2, 3)).sin.sum().backward()
        assert rope.frequencies.grad.abs().min() > 0
        with torch.no_grad():
            rope.eval()(grid_positions(2, 3))


def test_inference_mode_leaves_nothing_behind():
    rope = RotaryEmbedding(Mixed(8, heads=2))
    with torch.inference_mode():
        rope(grid_positions(2, 3))
    rope(grid_positions(2, 3)).cos.sum().backward()
    assert rope.frequencies.grad is not None


def test_forward_changes_no_attribute():
    """Pitfalls J16, I4."""
    rope = RotaryEmbedding(Mixed(8, heads=2))
    before = {name: id(value) for name, value in vars(rope).items()}
    rope(grid_positions(2, 3))
    assert {name: id(value) for name, value in vars(rope).items()} == before


def test_per_block():
    rope = RotaryEmbedding(Mixed(8, heads=2, blocks=3))
    whole = rope(grid_positions(2, 3))
    for index, rotation in enumerate(rope.per_block(grid_positions(2, 3), 3)):
        assert torch.equal(rotation.cos, whole.cos[index]) and rotation.cos.shape == (2, 6, 4)
    assert len(rope.per_block(grid_positions(2, 3), 2)) == 2
    with pytest.raises(ValueError, match="family must have frequencies for 4 blocks: got blocks=3"):
        rope.per_block(grid_positions(2, 3), 4)
    shared = RotaryEmbedding(Axial(8)).per_block(grid_positions(2, 3), 2)
    assert shared[0] is shared[1]


def test_legacy_tables_are_dropped_with_a_message():
    """Pitfalls E2, E3, J11: known names only."""
    rope = RotaryEmbedding(Axial(8))
    with pytest.warns(UserWarning, match="dropped tables that follow from the grid: freqs_cos, freqs_sin_1600, inv_freq"):
        rope.load_state_dict(
            {"freqs_cos": torch.zeros(256, 64), "freqs_sin_1600": torch.zeros(9, 2), "inv_freq": torch.ones(2)}
        )
    for key in ("freqs", "my_inv_freq"):
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{key}"'):
            rope.load_state_dict({key: torch.zeros(4)})


def test_periods_of_a_checkpoint_are_not_lost():
    """Pitfall A8: the user chooses between the checkpoint's rounded periods and the formula."""
    formula = Periods(32)
    rounded = formula.period_band(8).bfloat16()
    with pytest.raises(ValueError, match=r"periods differs from the family's by 0\.00\d+ \(relative\)"):
        RotaryEmbedding(formula).load_state_dict({"periods": rounded})
    taken = RotaryEmbedding(Periods(32, periods=rounded.tolist()))
    with pytest.warns(UserWarning, match="dropped tables"):
        taken.load_state_dict({"periods": rounded})
    assert not torch.equal(taken.frequencies, RotaryEmbedding(formula).frequencies)
    stretched = RotaryEmbedding(interpolate(Periods(32, periods=rounded.tolist()), 2.0))
    with pytest.warns(UserWarning, match="dropped tables"):
        stretched.load_state_dict({"periods": rounded})
    with pytest.raises(ValueError, match="periods must be those of the checkpoint"):
        RotaryEmbedding(interpolate(formula, 2.0)).load_state_dict({"periods": rounded})


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.zeros(5, 3), ValueError, r"positions must have shape \(tokens, axes=2\) .*: got \(5, 3\)"),
        (torch.zeros(2), ValueError, r"positions must have shape .*: got \(2,\)"),
        (torch.zeros(5, 2, dtype=torch.bfloat16), TypeError, "positions must be float32, .*: got torch.bfloat16"),
        ([[0.0, 1.0]], TypeError, "positions must be a tensor: got list"),
        (torch.zeros(5, 2, dtype=torch.bool), TypeError, "positions must be float32, .*: got torch.bool"),
    ],
)
def test_messages(positions, error, message):
    with pytest.raises(error, match=message):
        RotaryEmbedding(Axial(8))(positions)


def test_a_family_is_needed():
    with pytest.raises(TypeError, match=r"family must be a family of frequencies such as .*: got 'axial'"):
        RotaryEmbedding("axial")
