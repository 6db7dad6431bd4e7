"""Reads the files of tests/golden: what the references gave, and how it is said in our words.

A file is an npz: `config` (JSON), inputs (`q`, `k`, `x`, weights `sd/...`) and outputs (`q_rot`, `out`, ...). A rotation
file also holds positions, frequencies and pairs in one notation for all references (`u_pos`, `u_freq`, `u_pairs`).

A reader turns the config, and arrays that nobody can compute (weights, tokens' positions), into our family and positions;
`u_*` and outputs are only compared with. Which reader a reference has is said by the tables `ROTATIONS`, `MODULES`, `TABLES`
and `PRECISION` of golden_rotations.py, golden_modules.py, golden_tables.py and golden_precision.py. A file without a reader,
and a config with an entry that its reader doesn't use, are failures.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Entries of a config that tell where numbers come from, or repeat what follows from other entries.
INFORMATION = {
    "reference",
    "note",
    "set",
    "version",
    "versions",
    "commit",
    "unified",
    "state_dict",
    "state_dict_key",
    "q_layout",
    "tensors",
    "formula",
    "formula_err_float64",
    "k_err_float64",
    "agreement_on_unmasked",
    "axis_of_pair",
}
COLUMN = {"t": "t", "id": "t", "y": "y", "h": "y", "H": "y", "x": "x", "w": "x", "W": "x"}


@dataclass
class Golden:
    """A file: its config, which notes what was read of it, and its arrays."""

    name: str
    config: dict[str, Any]
    arrays: dict[str, torch.Tensor]
    read: set[str] = field(default_factory=set)

    def __getitem__(self, key):
        """What the config states under the first of these names that it has: "theta|temperature"."""
        for name in key.split("|"):
            if name in self.config:
                self.read.add(name)
                return self.config[name]
        raise KeyError(f"{self.name} states no {key}: it has {sorted(self.config)}")

    def get(self, key, default):
        return self[key] if any(name in self.config for name in key.split("|")) else default

    def array(self, name):
        return self.arrays[name]

    @property
    def weights(self):
        return {name.removeprefix("sd/"): array for name, array in self.arrays.items() if name.startswith("sd/")}

    @property
    def reference(self):
        reference = self.config["reference"]
        return reference if isinstance(reference, str) else reference["official"]

    @property
    def head_dim(self):
        return self.get("head_dim", None) or self.array("q").shape[-1]

    @property
    def axes(self):
        """The axes in the order of the reference's pairs, and of its columns: "xy", "yx", "tyx"."""
        return "".join(COLUMN[name] for name in self["axis_order"])

    def left_over(self):
        return set(self.config) - self.read - INFORMATION


def load(path):
    with np.load(Path(path)) as data:
        config = json.loads(str(data["config"]))
        arrays = {name: torch.from_numpy(np.asarray(data[name])) for name in data.files if name != "config"}
    return Golden(Path(path).name, config, arrays)


def find(readers, golden):
    """The reader whose reference the file's begins with; the longest, where several do."""
    matches = [name for name in readers if golden.reference.startswith(name)]
    return readers[max(matches, key=len)] if matches else None


def by_column(rows, axes, dim=0):
    """Rows or columns in the order of the letters of `axes`, brought to our order (t, y, x)."""
    return rows.index_select(dim, torch.tensor([axes.index(name) for name in "tyx" if name in axes]))


def based(scheme, golden, name="theta|temperature|base"):
    """The family of a preset, with the base that the file states, or else the reference's default: the preset's."""
    return replace(scheme.family, base=golden.get(name, scheme.family.base))
