"""The segmenter and its tracker: clips and streams agree, objects come and go, any size, any backbone."""

import pytest
import timm
import torch

from axial_rope import Axial, MemoryAttention, MemoryBank, make_rotary
from models.memory_segmenter import ConvStem, MemorySegmenter, ViTFeatures
from models.tracker import Tracker


def segmenter(channels=1, **options):
    torch.manual_seed(0)
    return MemorySegmenter(ConvStem(channels, (8, 16, 16)), MemoryAttention(32, 16, depth=1, heads=2, mlp_dim=32)).eval()


def square(height, width, y, x, side=8, label=1):
    labels = torch.zeros(height, width, dtype=torch.uint8)
    labels[y : y + side, x : x + side] = label
    return labels


def test_a_stream_gives_what_the_clip_gives():
    model, frames, first = segmenter(), torch.rand(1, 12, 1, 32, 48), square(32, 48, 4, 9)
    with torch.no_grad():
        logits, _ = model(frames, first[None, None].float(), bank=MemoryBank(pointers=0))
    maps = list(Tracker(model, vanish=False).track(frames[0], first))
    assert torch.equal(torch.stack(maps), (logits[0] > 0).long())
    assert 0 < torch.stack(maps)[1:].float().mean() < 1  # the comparison isn't of empty masks


def test_memory_matters_and_can_be_switched_off():
    model, frames = segmenter(), torch.rand(1, 4, 1, 32, 32)
    one, other = (square(32, 32, y, 9)[None, None].float() for y in (3, 20))
    with torch.no_grad():
        assert (model(frames, one)[0] - model(frames, other)[0])[:, 1:].abs().max() > 1e-4
        off = [model(frames, first, remember=False)[0][:, 1:] for first in (one, other)]
    assert torch.equal(*off)


def test_strides_are_time():
    model, frames, first = segmenter(), torch.rand(1, 4, 1, 32, 32), square(32, 32, 3, 9)[None, None].float()
    bank = MemoryBank(pointers=0)
    with torch.no_grad():
        difference = model(frames, first)[0] - model(frames, first, stride=3, bank=bank)[0]
    assert difference[:, 1].abs().max() > 1e-5
    assert bank.read(time=9.0).ages.unique().tolist() == [3, 6, 9]


def test_gradients_reach_every_part_through_the_memory():
    model, first = segmenter().train(), square(32, 32, 3, 9)[None, None].float()
    logits, present = model(torch.rand(1, 3, 1, 32, 32), first)
    (logits[:, -1].mean() + present[:, -1].mean()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == ["attention.no_memory"]
    assert model.encoder.down[0].weight.grad.abs().max() > 0


def test_several_objects_compete():
    model, frames = segmenter(), torch.rand(3, 1, 32, 32)
    first = square(32, 32, 3, 3, label=7) + square(32, 32, 20, 20, label=9)
    tracker = Tracker(model, vanish=False)
    maps = list(tracker.track(frames, first))
    assert torch.equal(maps[0], first.long())
    assert set(torch.stack(maps).unique().tolist()) <= {0, 7, 9}
    assert tracker.bank.objects == (7, 9)
    # where an object is, its logit is above the other's and above the background's, as of two runs with one each
    alone = [list(Tracker(model, vanish=False).track(frames, first * (first == label)))[1] for label in (7, 9)]
    assert torch.equal(maps[1] > 0, (alone[0] > 0) | (alone[1] > 0))


def test_objects_enter_and_leave():
    model, frames = segmenter(), list(torch.rand(6, 1, 32, 32))
    tracker = Tracker(model)
    prompts = {2: square(32, 32, 20, 20, label=5)}
    maps = list(tracker.track(frames, square(32, 32, 3, 3), prompts=prompts))
    assert (maps[2] == 5).equal(prompts[2] == 5)
    assert tracker.bank.objects == (1, 5)
    assert tracker.bank.frames(5) == (2, 3, 4, 5)
    tracker.bank.remove(1)
    assert set(tracker.step(frames[0]).unique().tolist()) <= {0, 5}


def test_a_prompt_takes_its_pixels_from_the_others(monkeypatch):
    """What is remembered of a tracked object leaves out what the user gave to another."""
    model, remembered = segmenter(), []
    encode = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda x, masks: remembered.append(masks) or encode(x, masks))
    prompt = square(32, 32, 4, 4, label=5)
    list(Tracker(model, vanish=False).track(torch.rand(2, 1, 32, 32), square(32, 32, 3, 3), prompts={1: prompt}))
    given, tracked = remembered[1][0, 0], remembered[2][0, 0]
    assert torch.equal(given, (prompt == 5).float())
    assert tracked[prompt == 5].max() == 0 < tracked[prompt == 0].min()


def test_starts_without_an_object():
    tracker = Tracker(segmenter())
    maps = list(tracker.track(torch.rand(3, 1, 32, 32), torch.zeros(32, 32), prompts={1: square(32, 32, 3, 3)}))
    assert maps[0].sum() == 0
    assert maps[1].sum() == 64


def test_hidden_objects_are_left_out():
    model, frames, first = segmenter(), torch.rand(3, 1, 32, 32), square(32, 32, 3, 3)
    with torch.no_grad():
        model.present.weight.zero_(), model.present.bias.fill_(-1.0)
        model.decoder.out.bias.fill_(100.0)
    assert torch.stack(list(Tracker(model).track(frames, first)))[1:].sum() == 0
    assert torch.stack(list(Tracker(model, vanish=False).track(frames, first)))[1:].all()


@pytest.mark.parametrize("size", [(30, 50), (17, 64), (33, 31)])
def test_any_size(size):
    maps = list(Tracker(segmenter()).track(torch.rand(3, 1, *size), square(*size, 3, 3)))
    assert [map_.shape for map_ in maps] == [size] * 3
    assert torch.equal(maps[0], square(*size, 3, 3).long())


def test_a_long_stream_keeps_its_memory_size():
    tracker = Tracker(segmenter())
    sizes = []
    for index, _ in enumerate(tracker.track((torch.rand(1, 16, 16) for _ in range(60)), square(16, 16, 3, 3))):
        sizes.append(tracker.bank.nbytes)
        assert len(tracker.bank) <= 8, index
    assert sizes[10] == sizes[-1]


@pytest.mark.parametrize("kind", ["convnext", "rope-vit"])
def test_timm_backbones(kind):
    if kind == "convnext":
        backbone = timm.create_model("convnext_atto", features_only=True, out_indices=(0, 1, 2))
    else:
        vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0, dynamic_img_size=True)
        backbone = ViTFeatures(make_rotary(vit, Axial(head_dim=64, base=100.0)))
    model = MemorySegmenter(backbone, MemoryAttention(32, 16, depth=1, heads=2, mlp_dim=32)).eval()
    assert model.reduction == 16
    assert model.mean.flatten().tolist() == pytest.approx(backbone.pretrained_cfg["mean"] if kind == "rope-vit" else MEAN)
    maps = list(Tracker(model).track(torch.rand(2, 3, 40, 72), square(40, 72, 3, 3)))
    assert maps[1].shape == (40, 72)


MEAN = [0.485, 0.456, 0.406]  # ImageNet's


def test_refusals():
    model = segmenter()
    with pytest.raises(ValueError, match="frames must have sides that are multiples of 4: got 30 x 32"):
        model(torch.rand(1, 2, 1, 30, 32), torch.zeros(1, 1, 30, 32))
    with pytest.raises(ValueError, match=r"frame must have the size \(32, 32\) of the first mask: got \(32, 36\)"):
        list(Tracker(model).track(torch.rand(2, 1, 32, 36), torch.zeros(32, 32)))
    with pytest.raises(ValueError, match=r"prompt must have the size \(32, 32\) of the first mask: got \(8, 8\)"):
        list(Tracker(model).track(torch.rand(2, 1, 32, 32), torch.zeros(32, 32), prompts={1: torch.zeros(8, 8)}))
    with pytest.raises(ValueError, match="prompts must be of later frames"):
        list(Tracker(model).track(torch.rand(2, 1, 32, 32), torch.zeros(32, 32), prompts={0: torch.zeros(32, 32)}))
    with pytest.raises(TypeError, match=r"frame must be floating, in \[0, 1\]: got torch\.uint8"):
        Tracker(model).step(torch.zeros(1, 32, 32, dtype=torch.uint8), torch.ones(32, 32))
    with pytest.raises(ValueError, match=r"first must have shape \(B, 1, H, W\) .*: got \(1, 1, 8, 8\) for"):
        model(torch.rand(1, 2, 1, 32, 32), torch.zeros(1, 1, 8, 8))
