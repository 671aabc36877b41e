"""The published rules in the plainest form: loops over lists of Python floats, nothing shared.

`Margin` records how close a decision was, so that a test can tell a wrong choice from a tie that
float32 may break either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


class Margin:
    """Smallest gap seen between what was chosen and the best that was not."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def note(self, gap: float) -> None:
        self.smallest = min(self.smallest, gap)


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosines(points: Sequence[Vector]) -> list[list[float]]:
    """Cosine similarity of every pair; a zero vector has similarity 0 to everything."""
    norms = [math.sqrt(dot(point, point)) for point in points]
    similar = [[0.0] * len(points) for _ in points]
    for i, a in enumerate(points):
        for j in range(i + 1):
            if norms[i] and norms[j]:
                similar[i][j] = similar[j][i] = dot(a, points[j]) / (norms[i] * norms[j])
    return similar


def seed_criterion(similar: Sequence[Sequence[float]], index: int) -> float:
    """Mean cosine similarity of a point to the others."""
    others = [value for j, value in enumerate(similar[index]) if j != index]
    return math.fsum(others) / len(others)


def step_criterion(similar: Sequence[Sequence[float]], index: int, chosen: Sequence[int]) -> float:
    """Largest similarity of a point to the chosen set."""
    return max(similar[index][j] for j in chosen)


def farthest_points(
    points: Sequence[Vector], count: int, margin: Margin | None = None
) -> list[int]:
    """Indices in the order chosen; ties go to the lowest index."""
    if len(points) <= count:
        return list(range(len(points)))
    similar = cosines(points)
    chosen: list[int] = []
    while len(chosen) < count:
        value = {
            i: step_criterion(similar, i, chosen) if chosen else seed_criterion(similar, i)
            for i in range(len(points))
            if i not in chosen
        }
        best = min(value, key=lambda i: (value[i], i))
        if margin is not None:
            # A twin of the chosen point ties for ever, and is the same choice.
            rivals = [v for i, v in value.items() if list(points[i]) != list(points[best])]
            margin.note(min(rivals, default=math.inf) - value[best])
        chosen.append(best)
    return chosen


def rotate(
    vector: Vector, position: int, frequencies: Sequence[float], neox: bool = True
) -> list[float]:
    """Turn pair i of a vector by ``position * frequencies[i]`` radians; the rest stays.

    Pairs are (i, i + number of pairs) for ``neox``, else (2 i, 2 i + 1).
    """
    turned = list(vector)
    pairs = len(frequencies)
    for i, frequency in enumerate(frequencies):
        first, second = (i, i + pairs) if neox else (2 * i, 2 * i + 1)
        angle = position * frequency
        cos, sin = math.cos(angle), math.sin(angle)
        turned[first] = vector[first] * cos - vector[second] * sin
        turned[second] = vector[second] * cos + vector[first] * sin
    return turned


def attention(query: Vector, keys: Sequence[Vector], visible: int, scale: float) -> list[float]:
    """Softmax weights over the first ``visible`` keys, and 0 for the others."""
    logits = [scale * dot(query, key) for key in keys[:visible]]
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers] + [0.0] * (len(keys) - visible)


def top(scores: Sequence[float], count: int, margin: Margin | None = None) -> list[int]:
    """Ascending indices of the highest scores; ties go to the lower index."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if margin is not None and 0 < count < len(scores):
        margin.note(scores[order[count - 1]] - scores[order[count]])
    return sorted(order[:count])
