import json

import pytest

from train.compare import main


def write(folder, **summary):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"data": "digits", "model": "N/2", "image_size": 8} | summary))
    return str(folder)


def test_means_over_seeds(tmp_path, capsys):
    folders = [
        write(
            tmp_path / "a", encoding="axial", top1={"raw": {"6": 60.0, "16": 30.0}, "interpolated": {"6": 62.0, "16": 80.0}}
        ),
        write(
            tmp_path / "b", encoding="axial", top1={"raw": {"6": 61.0, "16": 34.0}, "interpolated": {"6": 64.0, "16": 84.0}}
        ),
        write(tmp_path / "c", encoding="none", top1={"none": {"6": 36.0, "16": 40.0}}),
    ]
    main(folders)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| axial | raw | 2 | 60.5 (60.0 - 61.0) | 32.0 (30.0 - 34.0) |",
        "| axial | interpolated | 2 | 63.0 (62.0 - 64.0) | 82.0 (80.0 - 84.0) |",
        "| none | none | 1 | 36.0 (36.0 - 36.0) | 40.0 (40.0 - 40.0) |",
    ]


def test_refusals(tmp_path, capsys):
    folder = write(tmp_path / "a", encoding="axial", top1={})
    other = write(tmp_path / "b", encoding="axial", top1={}, model="S/16")
    for folders, sentence in [
        ([str(tmp_path)], f"folders must hold a finished run's summary.json: {tmp_path} has none"),
        ([folder, other], "folders must hold runs of one model: got N/2 and S/16"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(folders)
        assert end.value.code == 2 and capsys.readouterr().err == f"python -m train.compare: {sentence}\n"
