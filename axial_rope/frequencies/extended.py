"""Extended: a family whose frequencies are stretched, axis by axis, by the rules of `axial_rope.extension`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from axial_rope.frequencies.base import COLUMNS, Family, Series, check_positive, family_from_dict, geometric


class Rule(ABC):
    """What one rule does to the frequencies of one axis: plain data, as families are."""

    factor: float
    geometric_only = False

    @abstractmethod
    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        """The new frequencies of the pairs of `series`."""

    def after(self, series: Series) -> Series:
        """The series that the rule makes of `series`."""
        return series._replace(base=None)

    @property
    def scale(self) -> float:
        """Factor on the rotated channels of these pairs."""
        return 1.0


@dataclass(frozen=True)
class Interpolation(Rule):
    """``f / factor``."""

    factor: float

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        return frequencies / self.factor

    def after(self, series: Series) -> Series:
        return series._replace(first=series.first / self.factor)


@dataclass(frozen=True)
class Ntk(Rule):
    """``base * factor ** (n / (n - 1))`` for a series of n frequencies: the first stays, the last is divided by `factor`."""

    factor: float
    geometric_only = True

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        stretched = self.after(series)
        return stretched.first * geometric(float(stretched.base or 1.0), series.length)[list(series.places)]

    def after(self, series: Series) -> Series:
        if series.length < 2:
            raise ValueError(f"ntk must have at least 2 frequencies on an axis: got {series.length}")
        return series._replace(base=float(series.base or 1.0) * self.factor ** (series.length / (series.length - 1)))


@dataclass(frozen=True)
class Yarn(Rule):
    """``f / factor`` for slow pairs, ``f`` for fast ones, a ramp in between; see `axial_rope.extension.yarn`."""

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    geometric_only = True

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        index = torch.tensor(series.places, dtype=torch.float32, device="cpu")
        low, high = self.place(self.beta_fast, series), self.place(self.beta_slow, series)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound is in channels, not pairs, in the references too.
        low, high = max(low, 0), min(high, 2 * series.length - 1)
        ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def place(self, turns: float, series: Series) -> float:
        """Where in the series a pair makes that many turns over the original length."""
        log_base = math.log(float(series.base or 1.0))
        return series.length * math.log(series.first * self.original_length / (2 * math.pi * turns)) / log_base

    @property
    def scale(self) -> float:
        return self.attention_factor


@dataclass(frozen=True)
class Llama3(Rule):
    """``f / factor`` for long waves, ``f`` for short ones, a blend in between; see `axial_rope.extension.llama3`."""

    factor: float
    original_length: float = 8192.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        waves = 2 * math.pi / frequencies
        slow = frequencies / self.factor
        kept = torch.where(waves > self.original_length / self.low_freq_factor, slow, frequencies)
        if self.high_freq_factor == self.low_freq_factor:
            return kept
        blend = (self.original_length / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (waves <= self.original_length / self.low_freq_factor) & (
            waves >= self.original_length / self.high_freq_factor
        )
        return torch.where(between, (1 - blend) * slow + blend * frequencies, kept)


@dataclass(frozen=True)
class LongRope(Rule):
    """``f[i] / factors[i]``; see `axial_rope.extension.longrope`."""

    factors: Sequence[float]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(float(factor) for factor in self.factors))
        if not self.factors:
            raise ValueError("factors must be one or more numbers: got none")
        check_positive("factors", *self.factors)

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        if len(self.factors) != series.length:
            raise ValueError(
                f"factors must have one number per frequency of the axis, {series.length}: got {len(self.factors)}"
            )
        return frequencies / torch.tensor(self.factors, dtype=torch.float32, device="cpu")[list(series.places)]

    @property
    def scale(self) -> float:
        return self.attention_factor


@dataclass(frozen=True)
class Proportional(Rule):
    """``f / factor`` for the first `part` of the series and 0 for the rest; see `axial_rope.extension.proportional`."""

    part: float
    factor: float = 1.0

    def apply(self, frequencies: Tensor, series: Series) -> Tensor:
        index = torch.tensor(series.places, device="cpu")
        return torch.where(index < int(self.part * series.length), frequencies / self.factor, 0.0)


RULES: dict[str, type[Rule]] = {rule.__name__: rule for rule in (Interpolation, Ntk, Yarn, Llama3, LongRope, Proportional)}


@dataclass(frozen=True)
class Extended(Family):
    """A family with a rule for each axis; made by the functions of `axial_rope.extension`.

    Parameters
    ----------
    original
        The family that is stretched; its frequencies must be fixed.
    rules
        One rule, or None, per position column (t, y, x).

    Raises
    ------
    TypeError
        If the frequencies are learned, or a rule isn't one.
    ValueError
        If there isn't one rule per column, or a rule needs a geometric series where there is none.
    """

    original: Family
    rules: Sequence[Rule | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        series = self.original.series()
        if len(self.rules) != self.columns:
            raise ValueError(f"rules must be one per axis: got {len(self.rules)} rules for {self.columns} axes")
        for rule in self.rules:
            if not isinstance(rule, Rule | None):
                raise TypeError(f"rules must be rules of axial_rope.extension or None: got {rule!r}")
        for one in series:
            rule = self.rules[one.row]
            if rule is not None and rule.geometric_only and one.pairs and (one.base is None or one.base <= 1):
                axis = COLUMNS[-self.columns :][one.row]
                raise ValueError(
                    f"family must have a geometric series with base > 1 on axis {axis} for {type(rule).__name__}: "
                    f"got base={one.base} in {self.original}"
                )
        self.frequencies()  # raises what only the numbers tell

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.original.head_dim

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.original.layout

    @property
    def columns(self) -> int:
        return self.original.columns

    @property
    def split(self) -> tuple[int, ...]:
        return self.original.split

    @property
    def scale(self) -> float | tuple[float, ...]:
        before = self.original.scale
        scales = list(before) if isinstance(before, tuple) else [before] * self.pairs
        for series in self.original.series():
            rule = self.rules[series.row]
            for pair in series.pairs:
                scales[pair] *= 1.0 if rule is None else rule.scale
        return scales[0] if len(set(scales)) == 1 else tuple(scales)

    def series(self) -> list[Series]:
        found = []
        for series in self.original.series():
            rule = self.rules[series.row]
            found.append(rule.after(series) if rule is not None and series.pairs else series)
        return found

    def frequencies(self) -> Tensor:
        table = self.original.frequencies()
        for series in self.original.series():
            rule, own = self.rules[series.row], list(series.pairs)
            if rule is not None and own:
                table[series.row, own] = rule.apply(table[series.row, own], series)
        return table

    def as_dict(self) -> dict[str, Any]:
        rules = [None if rule is None else {"rule": type(rule).__name__, **asdict(rule)} for rule in self.rules]  # type: ignore[call-overload]
        return {"family": "Extended", "original": self.original.as_dict(), "rules": rules}

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Extended:
        return cls(family_from_dict(arguments["original"]), [_rule_from_dict(data) for data in arguments["rules"]])


def _rule_from_dict(data: dict[str, Any] | None) -> Rule | None:
    if data is None:
        return None
    arguments = dict(data)
    name = arguments.pop("rule", None)
    if name not in RULES:
        raise ValueError(f"rule must be one of {sorted(RULES)}: got {name!r}")
    return RULES[name](**arguments)
