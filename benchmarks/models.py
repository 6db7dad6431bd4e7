"""Whole ViTs, forward and training step, against the same model without RoPE, and what they keep for the backward pass."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from axial_rope import Axial, Mixed, make_rotary
from benchmarks.timing import Timing, compare

__all__ = ["MODES", "SIZES", "peak_bytes", "saved_bytes", "time_models", "vits"]

# dim, depth, heads: of "An image is worth 16x16 words" (arXiv 2010.11929) and DeiT (arXiv 2012.12877); "tiny" is for tests
SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "tiny": (64, 2, 1)}
MODES = ("float32", "bf16 AMP", "bf16")


def vits(size: str, image: int, device: str) -> dict[str, nn.Module]:
    """One ViT/16 without RoPE, twice, ours made of its copies, and timm's own with RoPE.

    What the second of the two equal models differs from the first by is the noise of the measurement.
    """
    dim, depth, heads = SIZES[size]
    options = {"embed_dim": dim, "depth": depth, "num_heads": heads, "img_size": image}
    without = timm.create_model("vit_small_patch16_224", **options)
    head_dim = dim // heads
    models = {
        "no RoPE": without,
        "no RoPE, again": copy.deepcopy(without),
        "ours, axial": make_rotary(copy.deepcopy(without), Axial(head_dim, base=100.0)),
        "ours, mixed": make_rotary(copy.deepcopy(without), Mixed(head_dim, heads=heads, blocks=depth)),
        "timm, axial": timm.create_model("vit_small_patch16_rope_224", **options),
        "timm, mixed": timm.create_model("vit_small_patch16_rope_mixed_224", **options),
    }
    return {name: model.to(device) for name, model in models.items()}


def time_models(
    models: dict[str, nn.Module], x: Tensor, mode: str, *, training: bool, rounds: int, compiled: bool = False
) -> dict[str, Timing]:
    """Seconds of a forward pass, or of a training step without the optimizer; the model without RoPE is 1."""
    cases = {name: _case(model, x, mode, training, compiled) for name, model in models.items()}
    return compare(cases, reference="no RoPE", rounds=rounds)


def _case(model: nn.Module, x: Tensor, mode: str, training: bool, compiled: bool) -> Callable[[], object]:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}: got {mode!r}")
    if mode == "bf16":
        model, x = copy.deepcopy(model).bfloat16(), x.bfloat16()
    model.train(training)
    run = torch.compile(copy.deepcopy(model)) if compiled else model

    def step() -> None:
        model.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=mode == "bf16 AMP"):
            loss = run(x).float().square().mean()
        loss.backward()

    def forward() -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=mode == "bf16 AMP"):
            run(x)

    return step if training else forward


def saved_bytes(model: nn.Module, x: Tensor, mode: str) -> int:
    """Bytes of distinct memory that autograd keeps for the backward pass, the parameters aside."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(x.device.type, torch.bfloat16, enabled=mode == "bf16 AMP"),
    ):
        loss = model(x).float().square().mean()
    del loss
    return sum(kept.values())


def peak_bytes(model: nn.Module, x: Tensor, mode: str) -> int:
    """The most memory that a training step takes at a time, beyond what is there before it: gradients and activations."""
    step = _case(model, x, mode, training=True, compiled=False)
    step()
    model.zero_grad()
    if x.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [
        event["args"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if event["name"] == "[memory]"
    ]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return int(max(change["Total Allocated"] for change in changes) - before)
