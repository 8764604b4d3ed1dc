"""The paper's formulas for two groups, written out: Definition 3.1, Algorithms 1, 3 and 4."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    a: Tensor  # 0, 1, or -1 where the group is not recorded
    key: int


@dataclass(frozen=True)
class Method:
    name: str = "fedavg"
    metric: str = "sp"
    strength: float = 0.0  # lambda, or FairFed's beta
    penalty: str = "half"
    rule: str = "subtract"
    mu: float = 0.0


class Parts(NamedTuple):
    """Definition 3.1: expectations on {A=0} (a, b) and on {A=1} (c, d)."""

    a: Tensor
    b: float
    c: Tensor
    d: float


def parts(score: Tensor, y: Tensor, group: Tensor, metric: str) -> Parts:
    event = (y == 1) if metric == "eop" else torch.ones_like(y, dtype=torch.bool)
    zero = event & (group == 0)
    one = event & (group == 1)
    n = max(len(y), 1)
    return Parts(
        (score * zero).sum() / n,
        zero.sum().item() / n,
        (score * one).sum() / n,
        one.sum().item() / n,
    )


def gap(parts: Parts) -> float | None:
    """F~, the signed gap; None where a group has no row of the event."""
    return None if 0 in (parts.b, parts.d) else float(parts.a / parts.b - parts.c / parts.d)


def mean_parts(every: list[Parts], weights: list[float]) -> Parts:
    return Parts(*(sum(w * p[i] for w, p in zip(weights, every, strict=True)) for i in range(4)))


def slope(signed: float, penalty: str) -> float:
    """C = sign(F~) J'(|F~|)."""
    size = {"l1": 1.0, "l2": 2 * abs(signed), "half": abs(signed)}[penalty]
    return math.copysign(size, signed)


def measure(model: nn.Module, client: Client, metric: str) -> tuple[Parts, float | None]:
    """A client's parts and its accuracy."""
    with torch.no_grad():
        score = model.eval()(client.x).softmax(-1)[:, 1]
    right = ((score > 0.5).long() == client.y).double().mean().item() if len(client.y) else None
    return parts(score, client.y, client.a, metric), right


def row_weights(client: Client) -> Tensor:
    """Kamiran and Calders, by counting: n_a n_y / (n n_ay); one where the group is unknown."""
    known = [(a, y) for a, y in zip(client.a.tolist(), client.y.tolist(), strict=True) if a >= 0]

    def weight(a: int, y: int) -> float:
        same_group = sum(i == a for i, _ in known)
        same_label = sum(j == y for _, j in known)
        return same_group * same_label / (len(known) * known.count((a, y)))

    pairs = zip(client.a.tolist(), client.y.tolist(), strict=True)
    return torch.tensor([weight(a, y) if a >= 0 else 1.0 for a, y in pairs], dtype=torch.float64)


class FairFed:
    """The weights of Algorithm 3 and of the FairFed paper, as lists."""

    def __init__(self, method: Method, sizes: list[int]) -> None:
        self.method = method
        equal = method.rule == "authors"
        self.bar = [1 / len(sizes) if equal else n / sum(sizes) for n in sizes]

    def weights(self, cohort, received: list | None, trained: list) -> list[float]:
        if received is None:
            return normal([self.bar[k] for k, _ in cohort])
        shares = [w for _, w in cohort]
        beta = self.method.strength
        overall = gap(mean_parts([p for p, _ in received], shares))
        accuracy = sum(w * right for w, (_, right) in zip(shares, received, strict=True))
        local = trained if self.method.rule == "exp" else received
        delta = [
            abs(right - accuracy) if gap(p) is None or overall is None else abs(overall - gap(p))
            for p, right in local
        ]
        if self.method.rule == "exp":
            return normal([w * math.exp(-beta * x) for w, x in zip(shares, delta, strict=True)])
        average = sum(delta) / len(delta)
        for (k, _), x in zip(cohort, delta, strict=True):
            self.bar[k] = max(self.bar[k] - beta * (x - average), 0)
        weights = normal([self.bar[k] for k, _ in cohort])
        if self.method.rule == "authors":
            for (k, _), w in zip(cohort, weights, strict=True):
                self.bar[k] = w
        return weights


def normal(values: list[float]) -> list[float]:
    return [value / sum(values) for value in values]
