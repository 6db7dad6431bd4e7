"""train/data.py: the digits, folders with odd files, and loaders that lose or replace nothing."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from train_helpers import COLOURS, image_tree, picture, settings

from train.data import SampleDataset, digits, eval_loader, is_broken, read_image, train_loader, without_broken
from train.errors import Stopped
from train.preflight import scan

CPU = torch.device("cpu")


def odd_files(folder):
    """Files as they are found in ImageNet and worse; returns the names of those that can't be read."""
    folder.mkdir(parents=True, exist_ok=True)
    image = picture((200, 60, 40), 40, 24, seed=7)
    image.convert("CMYK").save(folder / "cmyk.JPEG")
    image.convert("L").save(folder / "gray.jpg")
    image.convert("LA").save(folder / "gray_alpha.png")
    image.convert("RGBA").save(folder / "alpha.png")
    image.save(folder / "progressive.jpg", progressive=True)
    image.convert("P").save(folder / "palette.JPEG", format="PNG", transparency=bytes(range(256)))
    Image.fromarray(np.full((30, 20), 40000, dtype="uint16")).save(folder / "deep.png")
    image.save(folder / "exif.jpg", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff")
    for name, kind in (("cut.jpg", "JPEG"), ("cut.png", "PNG")):
        image.save(folder / name, format=kind)
        (folder / name).write_bytes((folder / name).read_bytes()[:-200])
    (folder / "text.jpg").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    return ["cut.jpg", "cut.png", "empty.png", "text.jpg"]


def test_broken_files_are_skipped_and_named_and_odd_ones_read(tmp_path):
    """N10."""
    image_tree(tmp_path)
    broken = odd_files(tmp_path / "train" / "cat")
    images = scan(str(tmp_path), None)
    assert len(images.train) == 18 + 12
    kept = without_broken(images, threads=2)
    assert [path.split("/")[-1] for path in kept.skipped] == broken
    assert len(kept.train) == 18 + 8 and len(kept.val) == 12
    for path, _ in kept.train:
        picture = read_image(path)
        assert picture.mode == "RGB" and np.asarray(picture).any()


def test_odd_files_keep_their_colours(tmp_path):
    odd_files(tmp_path)
    for name in ("cmyk.JPEG", "alpha.png", "palette.JPEG", "progressive.jpg"):
        mean = np.asarray(read_image(tmp_path / name), dtype=float).mean((0, 1))
        assert np.abs(mean - (200, 60, 40)).max() < 12, (name, mean)


def test_processes_share_the_verification(tmp_path, monkeypatch):
    image_tree(tmp_path)
    odd_files(tmp_path / "val" / "dog")
    images, whole = scan(str(tmp_path), None), None
    read = []
    monkeypatch.setattr("train.data.is_broken", lambda path: read.append(path) or is_broken(path))
    whole = without_broken(images, threads=1)
    assert len(read) == 42
    shares = {}

    def gather(into, mine):
        shares[len(shares)] = mine
        into[:] = [mine] * len(into)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    read.clear()
    parts = [without_broken(images, 1, rank, 3) for rank in range(3)]
    assert len(read) == 42 and max(Counter(read).values()) == 1
    assert sorted(set().union(*(part.skipped for part in parts))) == list(whole.skipped)


def test_a_broken_file_is_never_replaced_by_its_neighbour(tmp_path):
    """timm's ImageDataset would count the next image in its place."""
    image_tree(tmp_path)
    target = tmp_path / "val" / "dog" / "2.JPEG"
    target.write_bytes(target.read_bytes()[:300])
    images = scan(str(tmp_path), None)
    with pytest.raises(Stopped, match=r"image must be readable: .*dog/2.JPEG is not, leave out --no-verify"):
        list(eval_loader(images, 16, settings(crop_pct=0.875), CPU))


def test_digits_are_split_alike_for_every_seed_with_all_classes():
    torch.manual_seed(1)
    first = digits()
    random.seed(5)
    np.random.seed(5)
    again = digits()
    assert (len(first.train), len(first.val)) == (1347, 450)
    assert [np.asarray(image).tolist() for image, _ in first.val] == [np.asarray(image).tolist() for image, _ in again.val]
    assert set(Counter(label for _, label in first.val).values()) <= {43, 44, 45, 46}
    shown = {np.asarray(image).tobytes() for image, _ in first.train}
    assert not shown & {np.asarray(image).tobytes() for image, _ in first.val}


def test_digits_are_normalized_to_mean_0_and_deviation_1():
    pixels = torch.cat([batch for batch, _ in eval_loader(digits_of_training(), 8, settings(), CPU)])
    assert pixels.shape == (1347, 1, 8, 8)
    assert abs(pixels.mean().item()) < 0.01 and abs(pixels.std().item() - 1) < 0.01


def digits_of_training():
    images = digits()
    return dataclasses.replace(images, val=images.train)


def test_evaluation_sees_every_image_once_in_order():
    images = digits()
    labels = torch.cat([labels for _, labels in eval_loader(images, 8, settings(batch_size=64), CPU)])
    assert labels.tolist() == [label for _, label in images.val]
    pixels, _ = next(iter(eval_loader(images, 8, settings(), CPU)))
    exact = torch.tensor(np.array(images.val[0][0]), dtype=torch.float32) / 255
    torch.testing.assert_close(pixels[0, 0], (exact - 0.3053) / 0.3761, rtol=1e-5, atol=1e-5)


def test_sixteen_bits_keep_their_shades(tmp_path):
    Image.fromarray(np.linspace(0, 65535, 100).astype("uint16")[None].repeat(4, 0)).save(tmp_path / "deep.png")
    for mode in ("L", "RGB"):
        shades = np.asarray(read_image(tmp_path / "deep.png", mode)).reshape(4, 100, -1)[..., 0]
        assert np.abs(shades - np.linspace(0, 255, 100)).max() <= 1


def test_links_in_a_circle_count_once(tmp_path):
    image_tree(tmp_path)
    few = len(scan(str(tmp_path), None).train)
    (tmp_path / "train" / "cat" / "self").symlink_to(tmp_path / "train" / "cat", target_is_directory=True)
    assert len(scan(str(tmp_path), None).train) == few


def test_images_that_are_not_square_fill_the_size(tmp_path):
    images = scan(str(image_tree(tmp_path)), None)
    pixels, labels = next(iter(eval_loader(images, 32, settings(crop_pct=0.875, batch_size=12), CPU)))
    assert pixels.shape == (12, 3, 32, 32)
    mean, std = torch.tensor(images.mean), torch.tensor(images.std)
    colours = (pixels.mean((2, 3)) * std + mean) * 255
    expected = torch.tensor(list(COLOURS.values()), dtype=torch.float32)[labels]
    assert (colours - expected).abs().max() < 12


def test_training_batches_are_whole_shuffled_and_repeatable():
    args = settings(batch_size=100)

    def labels(seed):
        torch.manual_seed(seed)
        return torch.cat([labels for _, labels in train_loader(digits(), args, CPU)]).tolist()

    assert len(labels(0)) == 1300
    assert labels(0) == labels(0) != labels(1)
    assert Counter(labels(0)).most_common(1)[0][1] < 150


def test_mixed_batches_have_soft_labels_smoothed_once():
    args = settings(mixup=0.5, cutmix=1.0, smoothing=0.2)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    _, labels = next(iter(train_loader(digits(), args, CPU)))
    assert labels.shape == (64, 10)
    torch.testing.assert_close(labels.sum(1), torch.ones(64))
    torch.testing.assert_close(labels.min().item(), 0.02)
    assert 1 < (labels > 0.021).sum(1).float().mean() <= 2


def test_posterize_keeps_one_bit():
    """With Pillow 13 the strongest setting of RandAugment's Posterize, 0 bits, ends the run."""
    plain = rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert {op.level_fn(10, {}) for op in plain.ops if op.name.startswith("Posterize")} == {(0,)}
    loader = train_loader(digits(), settings(aa="rand-m9-mstd0.5-inc1"), CPU)
    policies = [policy for policy in loader.dataset.transform.transforms if hasattr(policy, "ops")]
    ops = [op for op in policies[0].ops if op.name.startswith("Posterize")]
    assert ops[0].level_fn(10, {}) == (1,)
    assert ops[0].level_fn(2.5, {}) == (3,)
    image = picture((200, 60, 40), 8, 8, seed=0)
    for op in ops:
        op.prob, op.magnitude, op.magnitude_std = 1.0, 10, 0
        assert op(image).size == (8, 8)


def test_dataset_reads_the_mode_of_its_channels(tmp_path):
    picture((200, 60, 40), 8, 8, seed=0).save(tmp_path / "a.png")
    for channels, mode in ((1, "L"), (3, "RGB")):
        dataset = SampleDataset([(tmp_path / "a.png", 4)], channels)
        dataset.transform = lambda image: image.mode
        assert dataset[0] == (mode, 4)
