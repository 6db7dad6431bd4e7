from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--golden", default=str(GOLDEN), help="folder of the references' numbers for test_references.py")


def pytest_generate_tests(metafunc):
    if "golden_path" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden"))
        files = sorted(folder.glob("*.npz"))
        # An empty folder must fail, not pass with nothing tested.
        paths = files or [folder / "no npz file found"]
        metafunc.parametrize("golden_path", paths, ids=[path.stem for path in paths])


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test draws the numbers that it draws alone, in whatever order tests run."""
    torch.manual_seed(0)
