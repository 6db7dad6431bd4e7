"""Videos with masks on disk: DAVIS 2017, YouTube-VOS and MOSE folders, palette PNGs, and files that PyAV decodes.

    DAVIS           ROOT/JPEGImages/480p/VIDEO/00000.jpg     ROOT/Annotations/480p/VIDEO/00000.png   every frame
                    ROOT/ImageSets/2017/val.txt              the videos of a split
    YouTube-VOS     ROOT/valid/JPEGImages/VIDEO/00000.jpg    ROOT/valid/Annotations/VIDEO/00000.png  every fifth frame
    MOSE            the same, every frame; of valid the first one only

A mask is a PNG with a palette whose values are the objects: 0 background, 255 void.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from train.checkpoint import write_atomic
from train.errors import Refusal

SPLITS = {"val": ("val", "valid"), "train": ("train",), "test": ("test", "test-dev")}
PICTURES = (".jpg", ".jpeg", ".png")


class Video(NamedTuple):
    """Frames of a video in order, and the masks of those that have one, by the frame's index."""

    name: str
    frames: tuple[Path, ...]
    masks: dict[int, Path]


def find_videos(root: str | Path, split: str = "val") -> list[Video]:
    """The videos of a split that have a mask to start from.

    Raises:
        Refusal: The folder has none of the layouts, the split lacks, or a mask belongs to no frame.
    """
    root = Path(root)
    if split not in SPLITS:
        raise Refusal(f"split must be one of {', '.join(SPLITS)}: got {split!r}")
    base = next((root / name for name in SPLITS[split] if (root / name / "JPEGImages").is_dir()), root)
    if not (base / "JPEGImages").is_dir():
        raise Refusal(
            f"data must hold JPEGImages and Annotations, itself or in {' or '.join(SPLITS[split])}: {root} has none"
        )
    pictures, masks = base / "JPEGImages", base / "Annotations"
    for size in ("480p", "Full-Resolution"):
        if (pictures / size).is_dir() and (masks / size).is_dir():
            pictures, masks = pictures / size, masks / size
            break
    lists = [path for name in SPLITS[split] for path in sorted(root.glob(f"ImageSets/*/{name}.txt"))]
    others = sorted(path.name for path in root.glob("ImageSets/*/*.txt"))
    if others and not lists:
        raise Refusal(f"data must list the videos of its split {split}: {root / 'ImageSets'} has {', '.join(others)}")
    folders = sorted(path.name for path in pictures.iterdir() if path.is_dir())
    names = lists[-1].read_text().split() if lists else folders
    videos = [read_folder(name, pictures / name, masks / name) for name in names]
    videos = [video for video in videos if video.masks]
    if not videos:
        raise Refusal(f"data must hold a video with masks in its split {split}: got {len(names)} without in {pictures}")
    return videos


def read_folder(name: str, pictures: Path, masks: Path) -> Video:
    """One video; masks are those of the frames with the same name."""
    if not pictures.is_dir():
        raise Refusal(f"data must hold a folder of frames for each video of its list: {pictures} isn't there")
    frames = sorted(path for path in pictures.iterdir() if path.suffix.lower() in PICTURES)
    index = {path.stem: number for number, path in enumerate(frames)}
    found = sorted(masks.glob("*.png")) if masks.is_dir() else []
    stray = [path for path in found if path.stem not in index]
    if stray:
        raise Refusal(f"masks must belong to frames: {stray[0]} has no frame among {len(frames)} in {pictures}")
    return Video(name, tuple(frames), {index[path.stem]: path for path in found})


def open_picture(path: Path) -> Image.Image:
    """A picture, decoded.

    Raises:
        Refusal: The file lacks, isn't a picture, or is cut short.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise Refusal(f"pictures must be files that can be read: {path} is not ({error})") from error


def read_frame(path: Path) -> Tensor:
    """A frame as (3, H, W) in [0, 1]."""
    with open_picture(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def read_labels(path: Path) -> Tensor:
    """A mask as labels (H, W), uint8.

    Raises:
        Refusal: It has colours instead of a palette.
    """
    with open_picture(path) as image:
        if image.mode not in ("P", "L", "1"):
            raise Refusal(f"masks must be PNGs with a palette or in grey: {path} has mode {image.mode}")
        return torch.from_numpy(np.array(image).astype(np.uint8))


def palette() -> list[int]:
    """Colours of the labels 0 .. 255 as PASCAL VOC deals them out, bit by bit, and DAVIS after it.

    >>> palette()[:9]
    [0, 0, 0, 128, 0, 0, 0, 128, 0]
    """
    colours = []
    for label in range(256):
        colour = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                colour[channel] |= (label >> 3 * bit + channel & 1) << 7 - bit
        colours += colour
    return colours


def write_labels(path: Path, labels: Tensor) -> None:
    """Labels (H, W) as a PNG with a palette, the format in which the benchmarks take results."""
    image = Image.fromarray(labels.to(torch.uint8).numpy())  # grey becomes palette with the same values
    image.putpalette(palette())
    data = io.BytesIO()
    image.save(data, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: file.write(data.getvalue()))


def decode(path: str | Path) -> Iterator[Tensor]:
    """Frames (3, H, W) in [0, 1] of a video file, one after another; PyAV decodes it.

    Raises:
        Refusal: The file lacks or isn't a video, or PyAV isn't installed.
    """
    try:
        import av
    except ImportError as error:
        raise Refusal('package av must be installed to decode a video file: pip install -e ".[video]"') from error
    if not Path(path).is_file():
        raise Refusal(f"video must be a file: got {path}")
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1).float() / 255
    except (av.FFmpegError, IndexError) as error:
        raise Refusal(f"video must be a file with a video stream: {path} is not ({error})") from error
