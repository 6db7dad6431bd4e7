"""Every code block of the README runs; commands that train for long, or need data, as far as their flags are read."""

import re
import shlex
from pathlib import Path

import pytest

from axial_rope import presets
from train.arguments import parse
from train.video.program import make_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_block(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_first_python_line_is_in_the_first_screen():
    lines = README.splitlines()
    assert lines.index("```python") < 20


def test_no_block_is_of_an_unknown_kind():
    assert {language for language, _ in BLOCKS} <= {"python", "bash", "text"}
    assert README.count("```") == 2 * len(BLOCKS)


def test_table_of_schemes_is_what_its_command_prints():
    assert presets.table().strip() in README


SHELL = "\n".join(code for language, code in BLOCKS if language == "bash")
COMMANDS = re.findall(r"-m train (--.*)", SHELL)
VIDEO_COMMANDS = re.findall(r"-m train video (.*)", SHELL)


@pytest.mark.parametrize("words", COMMANDS)
def test_flags_of_a_command(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("epochs: 100\nlr: 0.001\naa: 3a\n")
    settings = parse(shlex.split(words.replace("$rope", "mixed").replace("$seed", "1")))
    assert settings.rope in ("axial", "mixed") and settings.epochs in (38, 90, 100, 300)


@pytest.mark.parametrize("words", VIDEO_COMMANDS)
def test_flags_of_a_video_command(words):
    words = shlex.split(words, comments=True)
    command = words.pop(0) if words[0] in ("evaluate", "track") else "train"
    assert make_parser(command).parse_args(words).output


def test_there_are_commands():
    assert len(COMMANDS) >= 4 and len(VIDEO_COMMANDS) >= 3
