"""Timing by turns: the alternatives of one comparison run interleaved, and what counts is the median of their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Timing", "compare"]


@dataclass(frozen=True)
class Timing:
    """One alternative's result.

    Attributes
    ----------
    seconds
        Median time of one call.
    ratio
        Median over the rounds of this alternative's time by the reference's in the same round.
    spread
        Half the distance between the quartiles of those ratios.
    """

    seconds: float
    ratio: float
    spread: float


def compare(
    cases: dict[str, Callable[[], object]], *, reference: str, rounds: int, seconds: float = 0.0
) -> dict[str, Timing]:
    """Time every case `rounds` times, in turns whose order changes from round to round.

    Parameters
    ----------
    cases
        Functions by name. Each is called once beforehand, which isn't timed.
    reference
        The case that the ratios refer to.
    rounds
        Rounds, each of which times every case once.
    seconds
        What one timing should last at least: short cases are called several times in a row, all equally often.
    """
    for case in cases.values():
        case()
    calls = max(1, round(seconds / max(1e-9, time_calls(cases[reference], 1))))
    names, times = list(cases), {name: [] for name in cases}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(time_calls(cases[name], calls))
    result = {}
    for name in names:
        ratios = [own / other for own, other in zip(times[name], times[reference], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else [ratios[0]] * 3
        result[name] = Timing(statistics.median(times[name]), statistics.median(ratios), (quartiles[2] - quartiles[0]) / 2)
    return result


def time_calls(case: Callable[[], object], calls: int) -> float:
    """Seconds of one call, from `calls` in a row, with the device's work in it."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        case()
    synchronize()
    return (time.perf_counter() - start) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
