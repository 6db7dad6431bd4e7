"""Which frames are read, and that an endless stream reads what an unbounded bank would, in constant memory."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from axial_rope import MemoryAttention, MemoryBank, pool_frame, select_frames

FROZEN = Path(__file__).parent / "frozen" / "sam2_memory.npz"
OPTIONS = ("recent", "stride", "max_conditioning", "pointers", "reverse", "future_pointers")


def schedules():
    with np.load(FROZEN) as file:
        return json.loads(str(file["schedules"]))


def test_choice_equals_sam2s_over_300_schedules():
    total = 0
    for schedule in schedules():
        options = {name: schedule[name] for name in OPTIONS} | {"clip_length": schedule["length"]}
        chosen = select_frames(schedule["frame"], schedule["stored"], schedule["conditioning"], **options)
        assert [list(pair) for pair in chosen.frames] == schedule["frames_read"], schedule
        assert [list(pair) for pair in chosen.pointers] == schedule["pointers_read"], schedule
        total += len(chosen.frames) + len(chosen.pointers)
    assert total > 2000


def test_a_bank_reads_what_sam2_reads_over_300_schedules():
    for schedule in schedules():
        names = ("recent", "stride", "max_conditioning", "pointers")
        bank = MemoryBank(**{name: schedule[name] for name in names}, evict="never")
        conditioning = schedule["conditioning"]
        for frame in [*conditioning, *schedule["stored"]]:
            write(bank, frame, conditioning=frame in conditioning)
        frames, pointers = ([t for t, _ in schedule[name]] for name in ("frames_read", "pointers_read"))
        options = {"reverse": schedule["reverse"], "future_pointers": schedule["future_pointers"]}
        memory = bank.read(schedule["frame"], clip_length=schedule["length"], **options)
        assert (([], []) if memory is None else numbers(memory)) == (frames, pointers), schedule


def test_choice_equals_the_installed_sam2s():
    pytest.importorskip("sam2", reason="sam2 comes as source only and builds against a second torch")
    from tests.freeze_sam2 import make_schedule, sam2_choice

    rng = np.random.default_rng(1)
    for _ in range(20):
        schedule = make_schedule(rng)
        options = {name: schedule[name] for name in OPTIONS} | {"clip_length": schedule["length"]}
        chosen = select_frames(schedule["frame"], schedule["stored"], schedule["conditioning"], **options)
        theirs = sam2_choice(schedule)
        assert [[list(pair) for pair in part] for part in chosen] == [theirs["frames_read"], theirs["pointers_read"]]


def write(bank, frame, *, conditioning=False, objects=(0,), pointers=True, **options):
    """A frame of two tokens that carry its number, and a pointer that does."""
    tokens = torch.full((len(objects), 2, 4), float(frame))
    pointer = torch.full((len(objects), 4), float(frame)) if pointers else None
    bank.write(tokens, grid=(1, 2), frame=frame, pointers=pointer, conditioning=conditioning, objects=objects, **options)


def numbers(memory, row=0):
    """Frames and pointers that a memory holds for a sample, told by their tokens."""
    keep = slice(None) if memory.mask is None else memory.mask[row]
    shown = slice(None) if memory.pointer_mask is None else memory.pointer_mask[row]
    pointers = [] if memory.pointers is None else memory.pointers[row, shown, 0].tolist()
    return memory.tokens[row, keep][::2, 0].tolist(), pointers


def rows(memory, names):
    """What a memory of one sample says of each key, one row each, sorted: the order of keys means nothing."""
    columns = [getattr(memory, name) for name in names]
    if columns[0] is None:
        return []
    return sorted(torch.cat([column.reshape(columns[0].shape[1], -1) for column in columns], dim=1).tolist())


def same(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        for names in (("tokens", "positions", "ages", "slots"), ("pointers", "pointer_ages")):
            assert rows(one, names) == rows(other, names)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"stride": 5, "recent": 3},
        {"pointers": 0},
        {"recent": 2, "pointers": 4, "max_conditioning": 2},
        {"fill_gaps": True, "min_score": 0.5},
        {"fill_gaps": True, "min_score": 0.5, "stride": 3},
        {"min_score": 0.5},
        {"recent": 0},
    ],
    ids=str,
)
def test_window_reads_what_an_unbounded_bank_reads(options):
    bounded, unbounded = MemoryBank(**options), MemoryBank(evict="never", **options)
    rng = np.random.default_rng(3)
    sizes = []
    for frame in range(150):
        for again in (frame, frame - 1) if frame else (frame,):  # the next frame, and once more the one just written
            same(bounded.read(again), unbounded.read(again))
        prompt = frame == 0 or (frame % 40 == 7 and "max_conditioning" in options)
        score = float(rng.random())
        for bank in (bounded, unbounded):
            write(bank, frame, conditioning=prompt, score=score)
        sizes.append(bounded.nbytes)
    assert len(bounded) < len(unbounded) or options.get("recent") == 0
    if "min_score" not in options:
        assert max(sizes[100:]) == max(sizes[50:100]) < unbounded.nbytes / 3


def test_two_thousand_frames_in_constant_memory():
    bank = MemoryBank()
    for frame in range(2000):
        bank.read()
        write(bank, frame, conditioning=frame == 0)
        if frame == 30:
            full = bank.nbytes, len(bank)
    assert (bank.nbytes, len(bank)) == full
    # frame 0, and the six before the newest with itself, which may be read once more; pointers of 15 frames besides 0
    assert bank.frames(0) == (0, *range(1993, 2000))
    assert bank.nbytes == (8 * 2 * 4 + 17 * 4) * 4


def test_ages():
    def ages(**options):
        bank = MemoryBank(recent=3, evict="never", **options)
        for frame in range(12):
            write(bank, frame, conditioning=frame in (0, 20))
        write(bank, 20, conditioning=True)
        return bank.read(10).ages[::2].tolist()

    assert ages() == [10, -10, 3, 2, 1]
    assert ages(max_age=2.5) == [2.5, -2.5, 2.5, 2, 1]
    assert ages(conditioning_age=4) == [4, 4, 3, 2, 1]


def test_ages_are_exact_after_weeks():
    """Frame numbers of weeks of video would be rounded in float32; ages are not."""
    bank = MemoryBank()
    for frame in range(10**9, 10**9 + 10):
        write(bank, frame)
    assert bank.read().ages[::2].tolist() == [6, 5, 4, 3, 2, 1]


def test_seconds():
    bank = MemoryBank(recent=2)
    for frame, time in enumerate([0.0, 0.04, 0.5]):
        write(bank, frame, time=time)
    assert bank.read(time=0.75).ages[::2].tolist() == pytest.approx([0.71, 0.25])
    with pytest.raises(ValueError, match="time must be given to read as it was to write: got None"):
        bank.read()
    with pytest.raises(ValueError, match="time must be given for all frames or for none: got None"):
        write(bank, 3)


def test_reverse():
    bank = MemoryBank(recent=3, evict="never")
    write(bank, 20, conditioning=True)
    for frame in range(19, 10, -1):
        write(bank, frame)
    memory = bank.read(10, reverse=True)
    assert numbers(memory) == ([20, 13, 12, 11], [20, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    assert memory.ages[::2].tolist() == [10, 3, 2, 1]


def test_objects_come_and_go():
    bank = MemoryBank(recent=3)
    write(bank, 0, conditioning=True, objects=["a"])
    write(bank, 1, objects=["a"])
    write(bank, 2, objects=["a"])
    write(bank, 2, conditioning=True, objects=["b"])  # for b it is a conditioning frame, for a it isn't
    memory = bank.read(3, objects=["b", "a"])
    assert numbers(memory, 0) == ([2], [2])
    assert numbers(memory, 1) == ([0, 1, 2], [0, 2, 1])
    assert memory.slots[0, :2].tolist() == [0, 0]
    assert memory.slots[1].tolist() == [0, 0, 2, 2, 1, 1]
    assert memory.mask.tolist() == [[True] * 2 + [False] * 4, [True] * 6]
    write(bank, 3, objects=["a", "b"])
    bank.remove("a")
    assert bank.objects == ("b",)
    assert bank.frames("b") == (2, 3)
    bank.add("c")
    assert numbers(bank.read(4), 0) == ([2, 3], [2, 3])
    assert bank.read(4).mask[1].tolist() == [False] * 4


def test_objects_together_equal_each_alone():
    """Rows of a padded batch give what the object alone gives; one without any memory is passed by."""
    torch.manual_seed(0)
    attend = MemoryAttention(16, 4, depth=2, heads=2, mlp_dim=16, age_slots=7, sine=("keys",), pointer_span=15.0).eval()
    bank = MemoryBank(evict="never")
    for frame in range(5):
        names = ["a", "b"] if frame >= 2 else ["a"]
        bank.write(
            torch.randn(len(names), 6, 4),
            grid=(2, 3),
            frame=frame,
            objects=names,
            pointers=torch.randn(len(names), 16),
            conditioning=frame in (0, 3),
        )
    bank.add("c")
    x = torch.randn(3, 24, 16)
    together = attend(x, bank.read(5, objects="abc"), grid=(4, 6))
    for row, name in enumerate("abc"):
        alone = attend(x[row : row + 1], bank.read(5, objects=name), grid=(4, 6))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=2e-6)
    assert torch.equal(together[2], x[2] + attend.no_memory)


def test_scores():
    bank = MemoryBank(recent=2, min_score=0.5)
    write(bank, 0, conditioning=True, objects=[0, 1], score=0.0)  # the user's frame is kept, whatever its score
    write(bank, 1, objects=[0, 1], score=[0.9, 0.1])
    write(bank, 2, objects=[0, 1], score=torch.tensor([0.2, 0.5]))
    assert (bank.frames(0), bank.frames(1)) == ((0, 1), (0, 2))
    assert bank.newest == 2
    with pytest.raises(ValueError, match=r"score must be one number or one for each of 2 objects: got \(3,\)"):
        write(bank, 3, objects=[0, 1], score=[1.0, 2.0, 3.0])


def test_frames_of_several_grids():
    """A pooled frame stands at the centres of what it pools; the reader's grid is another one still."""
    bank = MemoryBank()
    tokens = torch.randn(1, 24, 8)
    bank.write(tokens, grid=(4, 6))
    pooled, grid, count = pool_frame(tokens, (4, 6), 2)
    bank.write(pooled, grid=grid, count=count)
    memory = bank.read()
    places = memory.positions_on((8, 12))
    assert places[0].tolist() == [0.5, 0.5]
    assert places[1].tolist() == [0.5, 2.5]
    assert places[24:27].tolist() == [[1.5, 1.5], [1.5, 5.5], [1.5, 9.5]]
    assert memory.counts.tolist() == [1.0] * 24 + [4.0] * 6


def test_dtype_and_device_of_the_store():
    bank = MemoryBank(dtype=torch.bfloat16, device="cpu")
    tokens = torch.randn(1, 6, 8)
    bank.write(tokens, grid=(2, 3))
    assert bank.nbytes == 6 * 8 * 2
    memory = bank.read()
    assert memory.tokens.dtype == torch.float32
    assert torch.equal(memory.tokens, tokens.bfloat16().float())


def test_what_is_stored_is_a_copy():
    bank = MemoryBank()
    tokens = torch.zeros(2, 6, 4)
    bank.write(tokens, grid=(2, 3))
    tokens += 1
    assert bank.read().tokens.abs().max() == 0


def test_gradients_flow_through_the_bank():
    bank = MemoryBank()
    tokens = torch.randn(2, 6, 4, requires_grad=True)
    bank.write(tokens, grid=(2, 3))
    bank.read().tokens.sum().backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))


def test_save_and_go_on():
    bank, other = MemoryBank(stride=2), MemoryBank(stride=2)
    for frame in range(9):
        write(bank, frame, conditioning=frame == 0, objects=["a", 7])
    file = io.BytesIO()
    torch.save(bank.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for frame in range(9, 20):
        for name in ("a", 7):
            same(bank.read(objects=[name]), other.read(objects=[name]))
        for each in (bank, other):
            write(each, frame, objects=["a", 7])
    assert bank.nbytes == other.nbytes


def test_an_empty_bank_reads_nothing():
    bank = MemoryBank()
    assert bank.read() is None
    bank.add("a")
    assert bank.read(objects=["a"]) is None
    write(bank, 0)
    assert bank.read(objects=["a"]) is None
    bank.reset()
    assert (bank.read(), len(bank), bank.nbytes) == (None, 0, 0)


def test_refusals():
    bank = MemoryBank(recent=2, stride=3)
    write(bank, 10)
    with pytest.raises(ValueError, match="frame must be from the newest = 10 to 16, as far as the window reaches: got 17"):
        bank.read(17)
    with pytest.raises(ValueError, match="frame must be from the newest = 10 to 16, as far as the window reaches: got 9"):
        bank.read(9)
    with pytest.raises(ValueError, match='reverse must be used with evict="never"'):
        bank.read(11, reverse=True)
    with pytest.raises(ValueError, match=r"object must be one of the bank's \[0\]: got 'cat'"):
        bank.read(objects=["cat"])
    with pytest.raises(ValueError, match="got 1"):
        bank.remove(0, 1)
    assert bank.objects == (0,)
    with pytest.raises(ValueError, match="object must be new: got 0"):
        bank.add(0)
    with pytest.raises(ValueError, match=r"tokens must have shape \(objects, 2 \* 3 = 6, channels\): got \(1, 5, 4\)"):
        bank.write(torch.zeros(1, 5, 4), grid=(2, 3))
    with pytest.raises(ValueError, match=r"objects must be 2 different names, one for each row: got \[1, 1\]"):
        bank.write(torch.zeros(2, 2, 4), grid=(1, 2), objects=[1, 1])
    with pytest.raises(ValueError, match=r"pointers must have shape \(1, channels\): got \(2, 4\)"):
        bank.write(torch.zeros(1, 2, 4), grid=(1, 2), pointers=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="max_conditioning must be at least 2, one before and one after: got 1"):
        MemoryBank(max_conditioning=1)
    with pytest.raises(ValueError, match="stride must be at least 1: got 0"):
        MemoryBank(stride=0)
    with pytest.raises(TypeError, match=r"recent must be a whole number: got 2\.5"):
        MemoryBank(recent=2.5)
    with pytest.raises(ValueError, match='evict must be "window" or "never": got \'fifo\''):
        MemoryBank(evict="fifo")


def test_frames_unlike_those_before_are_refused():
    bank = MemoryBank(recent=2)
    bank.write(torch.zeros(2, 6, 4), grid=(2, 3), objects=["cat", "dog"])
    bank.write(torch.ones(2, 6, 4), grid=(2, 3))
    assert bank.objects == ("cat", "dog") and bank.read().tokens[:, ::6, 0].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(ValueError, match=r"objects must be named unless all 2 are written, \['cat', 'dog'\]: got 3 rows"):
        bank.write(torch.zeros(3, 6, 4), grid=(2, 3))
    with pytest.raises(TypeError, match=r"tokens must have the dtype torch.float32 of those before: got torch.bfloat16"):
        bank.write(torch.zeros(2, 6, 4).bfloat16(), grid=(2, 3))
    with pytest.raises(ValueError, match="tokens must have the 4 channels of those before: got 5"):
        bank.write(torch.zeros(2, 6, 5), grid=(2, 3))
    with pytest.raises(ValueError, match=r"grid must be \(height, width\), at least 1 each: got 6"):
        bank.write(torch.zeros(2, 6, 4), grid=6)
    with pytest.raises(ValueError, match=r"grid must be \(height, width\), at least 1 each: got \(-2, -3\)"):
        bank.write(torch.zeros(2, 6, 4), grid=(-2, -3))
    with pytest.raises(ValueError, match="count must be at least 1, the tokens that each stands for: got 0"):
        bank.write(torch.zeros(2, 6, 4), grid=(2, 3), count=0)
    with pytest.raises(TypeError, match="objects must be names, such as a list of numbers: got a Tensor"):
        bank.write(torch.zeros(2, 6, 4), grid=(2, 3), objects=torch.tensor([3, 7]))
    with pytest.raises(ValueError, match="recent must be 2, as in the bank that was saved: got 3"):
        MemoryBank(recent=3).load_state_dict(bank.state_dict())
    assert bank.newest == 1


def test_numbers_of_frames_may_be_tensors_and_scores_may_be_missing():
    bank = MemoryBank(min_score=0.5)
    for frame in (torch.tensor(1), np.int64(1), 1):
        write(bank, frame, score=1.0)
    assert bank.frames(0) == (1,) and type(bank.newest) is int
    write(bank, 2, score=float("nan"))
    assert bank.frames(0) == (1,)
    write(bank, 1, score=0.1)  # written again, and not good enough
    assert bank.frames(0) == ()
    with pytest.raises(ValueError, match="pointers must have the 4 channels of those before: got 5"):
        write(bank, 3, score=1.0)
        bank.write(torch.zeros(1, 2, 4), grid=(1, 2), pointers=torch.zeros(1, 5))


def test_pointers_may_outlive_the_tokens():
    """Of a stream whose frames after the first are hidden, the pointers alone are left."""
    bank = MemoryBank(recent=1, pointers=4)
    bank.write(torch.zeros(1, 6, 4), grid=(2, 3), pointers=torch.ones(1, 8))
    bank.write(torch.zeros(1, 6, 4), grid=(2, 3), pointers=torch.ones(1, 8), objects=["other"])
    memory = bank.read(objects=[0])
    assert (tuple(memory.tokens.shape), tuple(memory.pointers.shape)) == ((1, 0, 4), (1, 1, 8))
    attend = MemoryAttention(16, 4, depth=1, heads=2, mlp_dim=16).eval()
    assert attend(torch.zeros(1, 6, 16), memory, grid=(2, 3)).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_memory_comes_back():
    bank, tokens = MemoryBank(device="cpu"), list(torch.randn(4, 1, 12, 8, device="cuda"))
    for number, frame in enumerate(tokens, start=1):
        bank.write(frame, grid=(3, 4))
        if number > 1:
            bank.prefetch()
        memory = bank.read()
        assert memory.tokens.device.type == "cuda"
        assert torch.equal(memory.tokens, torch.cat(tokens[:number], 1))
