"""The program from its words to its files: digits, image folders, resuming, several processes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from train_helpers import image_tree, picture, settings, small

from models.rope_vit import rope_vit
from train.checkpoint import write_atomic
from train.data import digits, eval_loader
from train.program import main
from train.training import Training

FILES = ["best.safetensors", "last.pt", "metrics.csv", "resolution.png", "summary.json", "training.png"]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return image_tree(tmp_path_factory.mktemp("data"), train=8)


def load(path):
    return torch.load(path, weights_only=True)


def summary_of(output):
    return json.loads((output / "summary.json").read_text())


@pytest.fixture(scope="module")
def short_digits(tmp_path_factory):
    """Output of two epochs on the digits."""
    output = tmp_path_factory.mktemp("digits")
    assert main(["--epochs", "2", "--seed", "3", "--output", str(output)]) == 0
    return output


def test_files_and_summary(short_digits):
    assert sorted(path.name for path in short_digits.iterdir()) == FILES
    summary = summary_of(short_digits)
    told = {key: summary[key] for key in ("data", "model", "encoding", "seed", "epochs", "steps", "skipped_images")}
    assert told == {
        "data": "digits",
        "model": "N/2",
        "encoding": "axial",
        "seed": 3,
        "epochs": 2,
        "steps": 2 * (1347 // 64),
        "skipped_images": [],
    }
    assert list(summary["top1"]) == ["raw", "interpolated"]
    for rule in summary["top1"].values():
        assert list(rule) == ["6", "8", "10", "12", "16"]
    assert summary["top1"]["raw"]["8"] == summary["top1"]["interpolated"]["8"]
    assert summary["seconds"] > 0
    for name in ("resolution.png", "training.png"):
        assert (short_digits / name).read_bytes().startswith(b"\x89PNG")


def test_metrics(short_digits):
    rows = list(csv.DictReader((short_digits / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert [bool(row["top1"]) for row in rows] == [False, True]  # val-interval 2
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) < 2.4
    assert float(rows[-1]["lr"]) == 0
    assert round(float(rows[-1]["top1"]), 2) == summary_of(short_digits)["top1"]["raw"]["8"]


def test_best_weights_are_usable_alone(short_digits):
    """The metadata has what rope_vit needs; the weights give the accuracy they were kept for."""
    with safe_open(short_digits / "best.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["axial_rope"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    assert about["classes"] == [str(digit) for digit in range(10)]
    options = {key: about[key] for key in ("image_size", "channels", "class_token")}
    model = rope_vit(about["model"], about["rope"], num_classes=len(about["classes"]), **options).eval()
    model.load_state_dict(weights)
    right = 0
    with torch.no_grad():
        for images, labels in eval_loader(digits(), 8, settings(), torch.device("cpu")):
            right += (model(images).argmax(1) == labels).sum().item()
    assert 100 * right / 450 == pytest.approx(about["top1"]) == pytest.approx(summary_of(short_digits)["best"]["top1"])


def test_weights_of_the_best_epoch_are_kept(tree, tmp_path, monkeypatch):
    measured = iter([50.0, 40.0, 60.0, 60.0])
    monkeypatch.setattr("train.training.evaluate", lambda *_: {"loss": 1.0, "top1": next(measured), "top5": 100.0})
    assert main(small(tree, tmp_path, "--epochs", "4")) == 0
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["axial_rope"])
    assert {"epoch": about["epoch"], "top1": about["top1"]} == summary_of(tmp_path)["best"] == {"epoch": 3, "top1": 60.0}


def test_checkpoint_holds_classes_and_settings(short_digits):
    state = load(short_digits / "last.pt")
    assert state["classes"] == [str(digit) for digit in range(10)]
    assert (state["epoch"], state["args"]["rope"], state["args"]["seed"]) == (2, "axial", 3)
    assert "head.weight" in state["state_dict"] and "state_dict_ema" not in state


@pytest.mark.slow
def test_default_run_is_as_good_as_the_readme_says(tmp_path, capsys):
    assert main(["--output", str(tmp_path)]) == 0
    top1 = summary_of(tmp_path)["top1"]
    assert top1["raw"]["8"] >= 92
    assert top1["interpolated"]["16"] >= 75
    printed = capsys.readouterr()
    assert f"interpolated{top1['interpolated']['6']:8.1f}" in printed.out
    assert "798/798" in printed.err


@pytest.mark.parametrize("rope", ["axial", "mixed", "learned", "none"])
def test_folder_of_images_is_learned(tree, tmp_path, rope):
    words = small(tree, tmp_path, "--rope", rope, "--epochs", "12", "--eval-sizes", "16", "24", "--lr", "5e-3")
    assert main(words) == 0
    summary = summary_of(tmp_path)
    rules = {"learned": ["resampled"], "none": ["none"]}.get(rope, ["raw", "interpolated"])
    assert list(summary["top1"]) == rules
    assert summary["classes"] == ["cat", "dog", "emu"]
    assert (summary["train_images"], summary["val_images"], summary["steps"]) == (24, 12, 48)
    for top1 in summary["top1"].values():
        assert top1["16"] >= 75, summary["top1"]


def test_whole_recipe(tree, tmp_path):
    """Every ingredient at once, from a YAML file."""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "rope: mixed\nmixup: 0.2\ncutmix: 1.0\nreprob: 0.25\naa: rand-m9-mstd0.5-inc1\ncolor-jitter: 0.3\n"
        "drop_path: 0.1\nlayer_decay: 0.8\nclip_grad: 1.0\ngrad_accum_steps: 3\nmodel_ema: true\namp: bf16\n"
        "opt: lamb\nsched: wsd\nclass_token: true\n"
    )
    output = tmp_path / "out"
    assert main(small(tree, output, "--config", str(file))) == 0
    summary = summary_of(output)
    assert (summary["encoding"], summary["precision"], summary["steps"]) == ("mixed", "bfloat16", 4)
    state = load(output / "last.pt")
    assert state["state_dict_ema"].keys() == state["state_dict"].keys() >= {"rope.frequencies", "cls_token"}


def test_broken_images_are_counted_and_named(tree, tmp_path, capsys):
    """N10: the run goes on without them."""
    data = image_tree(tmp_path / "data")
    picture((9, 9, 9), 20, 20, 0).convert("CMYK").save(data / "train" / "dog" / "cmyk.JPEG")
    (data / "val" / "emu" / "bad.png").write_text("no image")
    assert main(small(data, tmp_path / "out")) == 0
    assert f"skipped 1 unreadable images: {data / 'val' / 'emu' / 'bad.png'}\n" in capsys.readouterr().err
    summary = summary_of(tmp_path / "out")
    assert [Path(path).name for path in summary["skipped_images"]] == ["bad.png"]
    assert (summary["train_images"], summary["val_images"]) == (19, 12)


def test_broken_image_without_verification_stops_with_its_name(tmp_path, capsys):
    data = image_tree(tmp_path / "data")
    (data / "train" / "emu" / "bad.png").write_text("no image")
    assert main(small(data, tmp_path / "out", "--no-verify", "-b", "18")) in (0, 1)
    assert main(small(data, tmp_path / "out", "--no-verify", "-b", "19")) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m train: image must be readable: ")


def test_a_diverging_run_stops_with_one_sentence(tmp_path, capsys):
    assert (
        main(["--lr", "1e30", "--warmup-epochs", "0", "--opt", "sgd", "--epochs", "1", "--output", str(tmp_path / "out")])
        == 1
    )
    assert "python -m train: loss must be finite: step " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


RECIPES = {
    "plain": "--amp none",
    "all": "--amp fp16 --model-ema --mixup 0.4 --cutmix 1 --reprob 0.3 --aa augmix-m3 --drop-path 0.2 --grad-accum-steps 3",
    "workers": "--workers 2 --reprob 0.3 --model-ema",
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.parametrize("recipe", RECIPES)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tree, tmp_path, monkeypatch, recipe):
    """N4, N6: weights, averaged weights, optimizer, scaler, learning rate and metrics."""
    words = [*RECIPES[recipe].split(), "--epochs", "4", "--warmup-epochs", "1"]
    assert main(small(tree, tmp_path / "whole", *words)) == 0

    record = Training.record

    def interrupted(training, epoch, *rest):
        record(training, epoch, *rest)
        if epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Training, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(small(tree, tmp_path / "parts", *words))
    monkeypatch.setattr(Training, "record", record)
    assert load(tmp_path / "parts" / "last.pt")["epoch"] == 2
    assert main(small(tree, tmp_path / "parts", *words, "--resume", "auto")) == 0

    whole, parts = load(tmp_path / "whole" / "last.pt"), load(tmp_path / "parts" / "last.pt")
    for state in (whole, parts):
        for row in state["history"]:
            del row["seconds"]
    for key in ("state_dict", "state_dict_ema", "trainer", "history", "epoch", "classes"):
        assert_same(whole.get(key), parts.get(key), key)
    assert whole["history"][-1]["lr"] == 0  # the schedule counts steps, not batches
    assert summary_of(tmp_path / "parts")["top1"] == summary_of(tmp_path / "whole")["top1"]


def assert_same(one, other, where):
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}.{index}")
    elif isinstance(one, torch.Tensor):
        assert one.equal(other), where
    else:
        assert one == other, where


def test_resuming_a_finished_run_only_evaluates(tree, tmp_path, capsys):
    assert main(small(tree, tmp_path, "--resume", "auto")) == 0  # there is nothing to resume yet
    before = load(tmp_path / "last.pt")
    assert main(small(tree, tmp_path, "--resume", "auto", "--eval-sizes", "32")) == 0
    assert "continues after epoch 2, changed: eval_sizes None -> [32]\n" in capsys.readouterr().out
    assert_same(load(tmp_path / "last.pt"), before, "last")
    assert list(summary_of(tmp_path)["top1"]["raw"]) == ["32"]


def test_a_run_killed_between_two_files_keeps_its_best_weights(tree, tmp_path, monkeypatch):
    def killed(*rest):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("train.training.save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            main(small(tree, tmp_path))
    assert (tmp_path / "best.safetensors").exists() and not (tmp_path / "last.pt").exists()
    assert main(small(tree, tmp_path, "--resume", "auto")) == 0
    assert set(FILES) <= {path.name for path in tmp_path.iterdir()}


def test_a_run_that_goes_on_in_another_folder_takes_its_best_weights_along(tree, tmp_path):
    assert main(small(tree, tmp_path / "one")) == 0
    last = str(tmp_path / "one" / "last.pt")
    assert main(small(tree, tmp_path / "two", "--resume", last, "--weight-decay", "0.5")) == 0
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == FILES
    assert (tmp_path / "two/best.safetensors").read_bytes() == (tmp_path / "one/best.safetensors").read_bytes()


def test_a_changed_setting_takes_effect_in_a_resumed_run(tree, tmp_path):
    assert main(small(tree, tmp_path)) == 0
    assert main(small(tree, tmp_path, "--resume", "auto", "--epochs", "3", "--weight-decay", "0.5")) == 0
    groups = load(tmp_path / "last.pt")["trainer"]["optimizer"]["param_groups"]
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.5]


def test_an_earlier_run_is_not_written_over(tree, tmp_path, capsys):
    output = tmp_path / "out"
    for seed in ("0", "1", "2"):
        assert main(small(tree, output, "--seed", seed)) == 0
    assert [summary_of(output / name)["seed"] for name in ("earlier-1", "earlier-2", ".")] == [0, 1, 2]
    assert sorted(path.name for path in (output / "earlier-2").iterdir()) == FILES
    assert f"results of an earlier run moved to {output / 'earlier-2'}\n" in capsys.readouterr().out
    assert main(small(tree, output, "--seed", "2", "--resume", "auto")) == 0
    assert sorted(path.name for path in output.iterdir()) == sorted(["earlier-1", "earlier-2", *FILES])


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "last.pt"
    write_atomic(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_importing_the_program_loads_no_plotting_and_no_data_package():
    code = "import sys, train.program; print([m for m in ('matplotlib', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DDP on two CPU processes; their evaluation equals that of one process (N7)."""
    words = [*small(image_tree(tmp_path / "data", train=9, val=5), tmp_path / "out"), "-b", "4", "--model-ema"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *words, "--device", "cpu"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1 in %") == 1
    two = summary_of(tmp_path / "out")
    assert two["steps"] == 2 * (27 // 2 // 4)
    assert not any(name.startswith("module.") for name in load(tmp_path / "out" / "last.pt")["state_dict"])
    assert main([*words, "--resume", "auto"]) == 0
    assert summary_of(tmp_path / "out")["top1"] == two["top1"]
