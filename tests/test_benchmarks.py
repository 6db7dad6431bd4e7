"""The benchmark runs, and counts and compares rightly; no test here looks at a time."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import memory, models, rotation, timing
from benchmarks.__main__ import main


def test_quick_run_writes_all_parts(tmp_path, capsys):
    threads = torch.get_num_threads()
    main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    report = json.loads((tmp_path / "benchmarks.json").read_text())
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    assert report["machine"]["device"] == "cpu" and torch.__version__ in report["machine"]["versions"]
    assert {title.split(",")[0] for title in report["parts"]} == {
        "rotation of q and k",
        "tables of 12 blocks",
        "rotation against attention",
        "ViT-tiny",
    }
    for mode in ("float32", "bf16 AMP"):
        kept = report["parts"][f"ViT-tiny, {mode}: kept for backward"]
        assert kept["ours, axial"]["ratio"] == 1.0
        assert kept["timm, axial"]["ratio"] > 1.01
        for kind in ("peak of a step", "forward", "training step"):
            rows = report["parts"][f"ViT-tiny, {mode}: {kind}"]
            assert rows["no RoPE"]["ratio"] == 1.0 and len(rows) == 6
    assert "ViT-tiny, bf16 AMP: training step" in capsys.readouterr().out


def test_every_rotation_gives_the_same():
    table = rotation.RotaryEmbedding(rotation.Axial(64, base=100.0))(rotation.grid_positions(2, 3))
    q, k = torch.randn(2, 2, 3, 7, 64).unbind(0)
    for name, turn in rotation.others(table, "cpu").items():
        own = replace(table, layout="half") if "half" in name else table
        for got, x in zip(turn(q, k), (q, k), strict=True):
            assert torch.allclose(got, rotation.rotate(x, own, prefix_tokens=1), atol=2e-6), name


def test_ratios_are_medians_of_rounds(monkeypatch):
    seconds = {"a": iter([1.0, 1.0, 2.0, 1.0]), "b": iter([3.0, 2.0, 2.0])}
    monkeypatch.setattr(timing, "time_calls", lambda case, calls: next(seconds[case()]))
    result = timing.compare({"a": lambda: "a", "b": lambda: "b"}, reference="a", rounds=3)
    assert result["b"].ratio == 2.0 and result["b"].seconds == 2.0 and result["a"].spread == 0.0


def test_saved_bytes_and_modes():
    layer = torch.nn.Linear(8, 4)
    x = torch.randn(2, 8)
    assert models.saved_bytes(layer, x, "float32") == x.numel() * 4 + 2 * 4 * 4  # the input, and the output squared
    wide = torch.nn.Sequential(torch.nn.Linear(8, 1000, bias=False), torch.nn.Flatten(0))
    peak = models.peak_bytes(wide, x, "float32")
    assert 0 <= peak - (8000 + 2000) * 4 < 100  # the gradients of the weight and of the output, and a few numbers
    with pytest.raises(ValueError, match="mode must be one of float32, bf16 AMP, bf16: got 'fp8'"):
        models.time_models({"no RoPE": layer}, x, "fp8", training=False, rounds=1)


def test_memory_attention_is_measured_by_parts():
    result = memory.run(4, frames=2, pointers=4, rounds=1, device="cpu")
    assert (result["tokens"], result["frames"], result["pointers"]) == (16, 2, 4)
    assert list(result["cross-attention"]) == ["angles, once a frame", "projection", "rotation", "attention"]
    assert result.get("largest difference", 0.0) < 1e-5
