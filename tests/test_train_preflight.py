"""What is refused before training: one sentence on stderr, exit code 2, and nothing written."""

import shutil

import pytest
import torch
from PIL import Image
from train_helpers import COLOURS, image_tree, small

from train.arguments import parse
from train.preflight import fingerprint, scan
from train.program import main

SHA256_CAT_DOG = "3a450eb155d6a4c6"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return image_tree(tmp_path_factory.mktemp("data"))


@pytest.fixture
def own_tree(tree, tmp_path):
    return shutil.copytree(tree, tmp_path / "tree")


@pytest.fixture
def refused(capsys, tmp_path):
    """Run the program, expect its refusal, and return the sentence."""

    def run(words):
        output = tmp_path / "never" / "made"
        before = sorted(tmp_path.rglob("*"))
        try:
            code = main([*words, "--output", str(output)] if "--output" not in words else words)
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        assert printed.err.count("\n") == 1 and printed.err.startswith("python -m train: "), printed.err
        assert sorted(tmp_path.rglob("*")) == before
        return printed.err.removeprefix("python -m train: ").rstrip("\n")

    return run


def without_output(words):
    index = words.index("--output")
    return words[:index] + words[index + 2 :]


def test_missing_split(own_tree, refused):
    shutil.rmtree(own_tree / "val")
    words = without_output(small(own_tree, "unused"))
    assert refused(words) == f"data must hold the folder val or validation: {own_tree} has none"
    shutil.rmtree(own_tree / "train")
    assert refused(words) == f"data must hold the folder train: {own_tree} has none"


def test_missing_data_folder(tmp_path, refused):
    words = ["--data", str(tmp_path / "nowhere")]
    assert refused(words) == f"data must be a folder with train and val in it: got {tmp_path / 'nowhere'}"


@pytest.mark.parametrize("split", ["train", "val"])
def test_empty_class(own_tree, refused, split):
    for path in (own_tree / split / "dog").iterdir():
        path.unlink()
    (own_tree / split / "dog" / "notes.txt").write_text("no image")
    sentence = refused(without_output(small(own_tree, "unused")))
    assert sentence == f"each class must hold a readable image in {split}: dog has none"


def test_class_whose_images_are_all_broken(own_tree, refused):
    for path in (own_tree / "val" / "emu").iterdir():
        path.write_bytes(path.read_bytes()[:300])
    sentence = refused(without_output(small(own_tree, "unused")))
    assert sentence == "each class must hold a readable image in val: emu has none"


def test_class_of_one_split_only(own_tree, refused):
    shutil.copytree(own_tree / "val" / "dog", own_tree / "val" / "yak")
    words = without_output(small(own_tree, "unused"))
    assert refused(words) == "val must hold the classes of train: train has no yak"
    shutil.rmtree(own_tree / "val" / "yak")
    shutil.rmtree(own_tree / "val" / "cat")
    assert refused(words) == "train must hold the classes of val: val has no cat"


def test_a_single_class(own_tree, refused):
    sentence = refused(without_output(small(own_tree, "unused", "--subset", "cat")))
    assert sentence == f"train must hold at least 2 class folders: got 1 in {own_tree / 'train'}"


def test_fewer_images_than_a_batch(tree, refused):
    """N11: timm drops the last batch, so that an epoch would be empty."""
    words = without_output(small(tree, "unused", "-b", "19"))
    assert refused(words) == "batch-size must be at most the 18 training images of a process: got 19"


def test_unknown_class_in_the_subset(tree, tmp_path, refused):
    (tmp_path / "list.txt").write_text("cat\nowl, bird\nfox\n")
    words = without_output(small(tree, "unused", "--subset", str(tmp_path / "list.txt")))
    assert refused(words) == f"subset must name classes of train: {tree} has no fox, owl"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--learning-rate 1", "unrecognized arguments: --learning-rate 1"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--rope spiral", "argument --rope: invalid choice: 'spiral' (choose from axial, mixed, learned, none)"),
        ("--lr 0", "argument --lr: must be a number above 0: got '0'"),
        ("--lr fast", "argument --lr: must be a number above 0: got 'fast'"),
        ("--lr nan", "argument --lr: must be a number above 0: got 'nan'"),
        ("-b 1.5", "argument -b/--batch-size: must be a whole number at least 1: got '1.5'"),
        ("--hflip 2", "argument --hflip: must be a number at least 0 and at most 1: got '2'"),
        ("--model M/2", "model must be one of N, Ti, S, B, L, a slash and the patch such as 'S/16': got 'M/2'"),
        ("--img-size 9", "img-size must be a multiple of the patch 2 of N/2: got 9"),
        ("--eval-sizes 8 11", "eval-sizes must be a multiple of the patch 2 of N/2: got 11"),
        ("--scale 1 0.5", "scale must be a range from low to high: got 1.0 0.5"),
        ("--mixup 0.2 -b 31", "batch-size must be even for mixup and cutmix: got 31"),
        ("--epochs 2 --warmup-epochs 3", "warmup-epochs must be at most epochs = 2: got 3.0"),
        ("-b 1348", "batch-size must be at most the 1347 training images of a process: got 1348"),
        ("--subset cat", "subset must come with a data folder: got none"),
        ("--resume gone.pt", "resume must be a checkpoint file: got gone.pt, which isn't there"),
        ("--opt adamm", "opt must be an optimizer of timm: got adamm"),
        ("--aa foo", "aa must be an augmentation of timm: got foo"),
        ("--device quantum", "device must be usable: got quantum"),
        ("--config gone.yaml", "config must be a readable YAML file: gone.yaml is not"),
    ],
)
def test_wrong_words(refused, words, sentence):
    given = refused(words.split()).replace("'axial', 'mixed', 'learned', 'none'", "axial, mixed, learned, none")
    assert given.startswith(sentence), given


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 0.1\nlearn_rate: 1\nzeal: 2\n", "config must hold known flags only: FILE also has learn_rate, zeal"),
        ("config: other.yaml\n", "config must hold known flags only: FILE also has config"),
        ("rope: spiral\n", "argument --rope: invalid choice: 'spiral'"),
        ("lr: fast\n", "argument --lr: must be a number above 0: got 'fast'"),
        ("model_ema: 3\n", "config must give model_ema as true or false: got 3 in FILE"),
        ("lr: null\n", "config must give lr a value: got null in FILE"),
        ("- lr\n", "config must hold 'flag: value' lines: FILE holds a list"),
        ("lr: [\n", "config must be a readable YAML file: FILE is not (while parsing"),
    ],
)
def test_wrong_config(refused, tmp_path, text, sentence):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    given = refused(["--config", str(file)]).replace(str(file), "FILE")
    assert given.startswith(sentence), given


def test_output_that_is_a_file(refused, tmp_path):
    (tmp_path / "taken").write_text("")
    assert (
        refused(["--output", str(tmp_path / "taken" / "run")]) == f"output must be a folder: {tmp_path / 'taken'} is a file"
    )


def test_output_that_cannot_be_written(refused, tmp_path, monkeypatch):
    (tmp_path / "out" / "last.pt").mkdir(parents=True)
    given = refused(["--output", str(tmp_path / "out")])
    assert given == f"output must not hold folders of the names of results: {tmp_path / 'out'} has last.pt"

    def full(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    given = refused(["--output", str(tmp_path / "deep" / "er")])
    assert given == f"output must be a folder that can be written: {tmp_path} can't (Read-only file system)"
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("device", ["meta", "nowhere"])
def test_device_that_holds_no_numbers(refused, device):
    assert refused(["--device", device]).startswith(f"device must be usable: got {device} (")


def test_none_switches_off(tmp_path):
    (tmp_path / "run.yaml").write_text("aa: null\nclip_grad: null\n")
    for words in (["--config", str(tmp_path / "run.yaml")], ["--aa", "none", "--clip-grad", "none"]):
        args = parse(["--data", "folder", *words])
        assert (args.aa, args.clip_grad) == (None, None)


def test_missing_package(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sklearn" else name)
    assert refused([]) == 'packages must be installed: scikit-learn lack, get them with pip install -e ".[train]"'


@pytest.fixture(scope="module")
def checkpoint(tree, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    assert main(small(tree, output, "--epochs", "1")) == 0
    return output / "last.pt"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rope mixed", "resume must fit rope=mixed: FILE was trained with axial"),
        ("--model N/4", "resume must fit model=N/4: FILE was trained with N/8"),
        ("--img-size 32", "resume must fit img-size=32: FILE was trained with 16"),
        ("--opt lion", "resume must fit opt=lion: FILE was trained with adamw"),
        ("--model-ema", "resume must fit model-ema=True: FILE was trained with False"),
        ("--subset cat dog", "resume must have the 2 classes of the data: FILE has 3, among them emu"),
    ],
)
def test_wrong_checkpoint(tree, checkpoint, refused, words, sentence):
    given = refused(without_output(small(tree, "unused", "--resume", str(checkpoint), *words.split())))
    assert given.replace(str(checkpoint), "FILE") == sentence


def test_checkpoint_of_other_classes(checkpoint, tmp_path_factory, refused):
    """N9: as many classes of other names are other classes."""
    other = image_tree(tmp_path_factory.mktemp("other"), {"ant": (9, 9, 9), "dog": (99, 9, 9), "emu": (9, 99, 9)})
    given = refused(without_output(small(other, "unused", "--resume", str(checkpoint))))
    assert given == f"resume must have the 3 classes of the data: {checkpoint} has 3, among them cat"


def test_fewer_epochs_than_are_done(tree, tmp_path, refused, capsys):
    assert main(small(tree, tmp_path)) == 0
    capsys.readouterr()
    given = refused(without_output(small(tree, "unused", "--resume", str(tmp_path / "last.pt"), "--epochs", "1")))
    assert given == f"epochs must be at least the 2 that {tmp_path / 'last.pt'} has behind it: got 1"


def test_files_that_are_no_checkpoint(tree, checkpoint, tmp_path_factory, refused):
    folder = tmp_path_factory.mktemp("files")
    torch.save({"state_dict": {}}, folder / "foreign.pt")
    (folder / "cut.pt").write_bytes(checkpoint.read_bytes()[:5000])
    (folder / "text.pt").write_text("weights")
    state = torch.load(checkpoint, weights_only=True)
    torch.save({key: value for key, value in state.items() if key != "epoch"}, folder / "no_epoch.pt")
    torch.save(state | {"args": "none"}, folder / "no_args.pt")
    torch.save(state | {"args": {"model": "N/8"}}, folder / "few_args.pt")
    for name in ("foreign.pt", "cut.pt", "text.pt", "no_epoch.pt", "no_args.pt", "few_args.pt"):
        given = refused(without_output(small(tree, "unused", "--resume", str(folder / name))))
        assert given == f"resume must be a last.pt of this program: {folder / name} can't be read as one"


def test_classes_are_the_folder_names_sorted_as_text(tmp_path):
    """N9: 0, 1, 10, 11, 2, ...: class "10" has index 2."""
    image_tree(tmp_path, {str(number): (number, 0, 0) for number in range(12)}, train=1, val=1)
    images = scan(str(tmp_path), None)
    assert images.classes == ("0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9")
    assert {path.parent.name: index for path, index in images.train}["10"] == 2
    assert {path.parent.name: index for path, index in images.val} == {n: i for i, n in enumerate(images.classes)}


def test_subset_by_names_file_and_named_list(own_tree, tmp_path):
    (tmp_path / "two.txt").write_text("# two of three\nemu, a bird\n\ncat 17\n")
    (own_tree / "mine.txt").write_text("dog\nemu\n")
    assert scan(str(own_tree), ["dog", "cat"]).classes == ("cat", "dog")
    assert scan(str(own_tree), [str(tmp_path / "two.txt")]).classes == ("cat", "emu")
    assert scan(str(own_tree), ["mine", "cat"]).classes == ("cat", "dog", "emu")
    images = scan(str(own_tree), ["dog", "emu"])
    assert len(images.train) == 12 and {path.parent.name for path, _ in images.train} == {"dog", "emu"}


def test_class_names_with_spaces_and_nested_images(own_tree, tmp_path):
    for split in ("train", "val"):
        (own_tree / split / "dog").rename(own_tree / split / "sea lion")
        (own_tree / split / ".cache").mkdir()
        (own_tree / split / "cat" / "more").mkdir()
        Image.new("RGB", (8, 8)).save(own_tree / split / "cat" / "more" / "x.PNG")
    (tmp_path / "list.txt").write_text("sea lion\ncat\n")
    assert scan(str(own_tree), [str(tmp_path / "list.txt")]).classes == ("cat", "sea lion")
    images = scan(str(own_tree), None)
    assert images.classes == ("cat", "emu", "sea lion")
    assert sum(label == 0 for _, label in images.train) == 7


def test_validation_is_another_name_for_val(own_tree):
    (own_tree / "val").rename(own_tree / "validation")
    assert len(scan(str(own_tree), None).val) == 4 * len(COLOURS)


def test_fingerprint_is_that_of_the_sorted_names():
    """From the shell: printf 'cat\\ndog' | sha256sum."""
    assert fingerprint(("dog", "cat")) == fingerprint(("cat", "dog")) == SHA256_CAT_DOG
    assert fingerprint(("cat", "do")) != SHA256_CAT_DOG


def test_precedence_of_flag_file_and_data(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nepochs: 5\nweight-decay: 0.2\nmodel_ema: true\neval_sizes: [6, 8]\nresume: null\n")
    args = parse(["--epochs", "7", "--config", str(file)])
    assert (args.lr, args.epochs, args.weight_decay, args.model_ema) == (1e-3, 7, 0.2, True)
    assert (args.eval_sizes, args.resume, args.img_size, args.model) == ([6, 8], None, 8, "N/2")
    assert parse(["--config", str(file), "--no-model-ema"]).model_ema is False
    assert parse(["--data", "x"]).model == "S/16"
