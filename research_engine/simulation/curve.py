"""Tables that cost models look up: linear between points, and smooth beyond them; nothing is ever off the table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


class Curve:
    """A function of one number, given at points.

    Below the first point it is constant. Above the last one it goes on with the mean slope of the table's upper half
    (from half the last x on), which tile edges and noise disturb less than the last two points would; never downwards.

    Args:
        points: (x, y) pairs, at least one; x >= 0 and no two alike.

    Raises:
        ValueError: no point, a number that is negative or not finite, or an x given twice.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self.points = sorted((float(x), float(y)) for x, y in points)
        if not self.points:
            raise ValueError("a curve needs at least one point")
        self._x, self._y = [x for x, _ in self.points], [y for _, y in self.points]
        for value in (*self._x, *self._y):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"a curve holds {value!r}; its numbers must be finite and >= 0")
        for left, right in pairwise(self._x):
            if left == right:
                raise ValueError(f"a curve holds two points at {left:g}")
        half = max(0, min(len(self._x) - 2, bisect_right(self._x, self._x[-1] / 2) - 1))
        run = self._x[-1] - self._x[half]
        self._beyond = max(0.0, (self._y[-1] - self._y[half]) / run) if run else 0.0

    def __call__(self, x: float) -> float:
        xs, ys = self._x, self._y
        at = bisect_right(xs, x)
        if at == 0:
            return ys[0]
        if at == len(xs):
            return ys[-1] + (x - xs[-1]) * self._beyond
        left = xs[at - 1]
        share = (x - left) / (xs[at] - left)
        return ys[at - 1] * (1.0 - share) + ys[at] * share


class Grid:
    """A function of several numbers, given at points that need not fill a box: each x has its own points of the rest.

    Interpolates along the first number between what the two neighbouring sub-tables give for the rest, and so on down;
    the ends of each table are continued as `Curve` continues them.

    Args:
        values: (x1, ..., xk) -> y, at least one, all of the same k.
    """

    def __init__(self, values: Mapping[tuple[float, ...], float]) -> None:
        if not values:
            raise ValueError("a grid needs at least one point")
        if any(not 0.0 <= number < math.inf for point, y in values.items() for number in (*point, y)):
            raise ValueError("a grid's numbers must be finite and >= 0")
        self.values = dict(values)
        parts: dict[float, dict[tuple[float, ...], float]] = {}
        for (x, *rest), y in values.items():
            parts.setdefault(float(x), {})[tuple(rest)] = y
        self._x = sorted(parts)
        self._below: list[Any] = []
        for x in self._x:
            part = parts[x]
            if len(next(iter(part))) == 1:
                self._below.append(Curve((point[0], y) for point, y in part.items()))
            else:
                self._below.append(Grid(part))

    def __call__(self, x: float, *rest: float) -> float:
        xs, below = self._x, self._below
        at = bisect_right(xs, x)
        if at == 0:
            return float(below[0](*rest))
        if xs[at - 1] == x:
            return float(below[at - 1](*rest))
        if at < len(xs):
            left = xs[at - 1]
            share = (x - left) / (xs[at] - left)
            return float(below[at - 1](*rest) * (1.0 - share) + below[at](*rest) * share)
        last = float(below[-1](*rest))
        half = bisect_right(xs, xs[-1] / 2) - 1
        if not 0 <= half < len(xs) - 1:
            half = len(xs) - 2
        if half < 0:
            return last
        slope = (last - below[half](*rest)) / (xs[-1] - xs[half])
        return last + (x - xs[-1]) * max(0.0, slope)
