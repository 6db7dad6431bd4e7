"""Following objects through a stream of frames with a `MemorySegmenter`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from axial_rope import MemoryBank
from models.memory_segmenter import MemorySegmenter

__all__ = ["Tracker"]


class Tracker:
    """Follows objects through a stream of frames of any size, one after another, in constant memory.

    Args:
        model: A trained segmenter.
        bank: Settings of the memory, an empty bank; by default of six recent frames, with prompted ones kept.
        vanish: Objects that the model takes for hidden are left out of the label map.

    >>> from axial_rope import MemoryAttention
    >>> from models.memory_segmenter import ConvStem
    >>> model = MemorySegmenter(ConvStem(3), MemoryAttention(64, 32, depth=1, heads=2, mlp_dim=128))
    >>> first = torch.zeros(30, 50, dtype=torch.uint8)
    >>> first[4:9, 5:20] = 7
    >>> maps = list(Tracker(model).track(torch.rand(3, 3, 30, 50), first))
    >>> [map.shape for map in maps], maps[0].unique().tolist()
    ([torch.Size([30, 50]), torch.Size([30, 50]), torch.Size([30, 50])], [0, 7])
    """

    def __init__(self, model: MemorySegmenter, bank: MemoryBank | None = None, *, vanish: bool = True) -> None:
        self.model = model.eval()
        self.bank = MemoryBank(pointers=0) if bank is None else bank
        self.vanish = vanish
        self._frame = -1

    def track(
        self, frames: Iterable[Tensor], first: Tensor, *, prompts: Mapping[int, Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Label maps (H, W) of the frames, 0 where there is no object, as soon as each frame comes.

        Args:
            frames: (channels, H, W) each, in [0, 1]: a list, a file's decoder, a camera.
            first: (H, W), the labels of the objects in the first frame.
            prompts: Label maps of later frames, by their number: objects that enter there, or corrections.

        Raises:
            ValueError: A label map hasn't the frame's size, a frame another size than the first, or prompts are given for
                frame 0.
            TypeError: A frame isn't floating.
        """
        if prompts and 0 in prompts:
            raise ValueError("prompts must be of later frames, since first is that of frame 0: got one for frame 0")
        self.bank.reset()
        self._frame = -1
        size = first.shape
        for number, frame in enumerate(frames):
            prompt = first if number == 0 else (prompts or {}).get(number)
            for name, shape in (("frame", frame.shape[-2:]), ("prompt", size if prompt is None else prompt.shape)):
                if tuple(shape) != tuple(size):
                    raise ValueError(f"{name} must have the size {tuple(size)} of the first mask: got {tuple(shape)}")
            yield self.step(frame, prompt)

    @torch.no_grad()
    def step(self, frame: Tensor, prompt: Tensor | None = None) -> Tensor:
        """The label map of the next frame; labels of `prompt` are taken as they are, objects that it lacks are tracked."""
        model, bank = self.model, self.bank
        height, width = frame.shape[-2:]
        if not frame.is_floating_point():
            raise TypeError(f"frame must be floating, in [0, 1]: got {frame.dtype}")
        if prompt is not None and prompt.shape != (height, width):
            raise ValueError(f"prompt must have the size {(height, width)} of the frame: got {tuple(prompt.shape)}")
        self._frame += 1
        padding = (0, -width % model.reduction, 0, -height % model.reduction)
        device = model.mean.device
        features, maps = model.features(F.pad(frame.to(device)[None], padding, mode="replicate"))
        probability = features.new_zeros(0, height + padding[3], width + padding[1])
        tracked = list(bank.objects)
        if tracked:
            many = features.expand(len(tracked), -1, -1, -1)
            fine = {scale: finer.expand(len(tracked), -1, -1, -1) for scale, finer in maps.items()}
            logits, present = model.segment(many, fine, bank.read(self._frame, objects=tracked))
            if self.vanish:
                logits = torch.where((present > 0)[:, None, None], logits, -10.0)
            # Objects compete for each pixel, among themselves and with the background, whose logit is 0.
            probability = F.pad(logits, (0, 0, 0, 0, 1, 0)).softmax(dim=0)[1:]
        given = [] if prompt is None else [label for label in prompt.unique().tolist() if label not in (0, 255)]
        if prompt is not None and given:
            shown = F.pad(prompt.to(device)[None], padding)
            probability = probability * (shown == 0)
            fresh = torch.cat([(shown == label).to(probability.dtype) for label in given])
            kept = [index for index, label in enumerate(tracked) if label not in given]
            self._remember(features, fresh, given, conditioning=True)
            tracked, probability = [tracked[index] for index in kept], probability[kept]
            self._remember(features, probability, tracked, conditioning=False)
            tracked, probability = given + tracked, torch.cat([fresh, probability])
        else:
            self._remember(features, probability, tracked, conditioning=False)
        if not tracked:
            return torch.zeros(height, width, dtype=torch.int64)
        score, winner = probability[:, :height, :width].max(dim=0)
        labels = torch.tensor(tracked, device=device)[winner]
        background = 1 - probability[:, :height, :width].sum(dim=0)
        return torch.where(score > background, labels, 0).cpu()

    def _remember(self, features: Tensor, masks: Tensor, labels: Sequence[int], *, conditioning: bool) -> None:
        if labels:
            tokens = self.model.encoder(features.expand(len(labels), -1, -1, -1), masks[:, None])
            self.bank.write(tokens, grid=features.shape[-2:], frame=self._frame, objects=labels, conditioning=conditioning)
