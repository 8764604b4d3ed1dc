"""Measure how fast the gradient of FedGFT's objective vanishes.

Theorem 5.2 and Corollary 5.3 of the paper say: for L(theta) = cross-entropy + lam J(F) with
J = x^2, one local step per round and step sizes eta_t,

    min_{t<T} E ||grad L(theta^t)||^2  <=  C (1 / sum eta_t + sum eta_t^2 / sum eta_t),

hence O(1/T) for gradient descent with a constant step, O(log T / sqrt T) for eta_t ~ t^(-1/2) and
O(1/log T) for eta_t ~ 1/t. The engine trains the models. Their gradients are computed here, without
the engine: in closed form and double precision, on the pooled rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from fedgft.algorithms import fedgft
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.partition import partition
from fedgft.engine import Settings, simulate
from fedgft.engine.plan import Schedule, learning_rate
from fedgft.metrics import get_metric
from fedgft.optimizers import Optimizer

Mode = Literal["full", "stochastic"]
SMALL = 1e-10  # the smallest squared gradient that B is divided by
RESIDUE = 1e-20  # a squared gradient below this is only rounding error
MODES: tuple[Mode, ...] = ("full", "stochastic")
# The promised rate as a function of T; the paper promises none for a constant step with noise.
RATES: dict[tuple[Mode, Schedule], Callable[[np.ndarray], np.ndarray] | None] = {
    ("full", "constant"): lambda t: 1 / t,
    ("full", "inverse-sqrt"): lambda t: np.log(t) / np.sqrt(t),
    ("full", "inverse"): lambda t: 1 / np.log(t),
    ("stochastic", "constant"): None,
    ("stochastic", "inverse-sqrt"): lambda t: np.log(t) / np.sqrt(t),
    ("stochastic", "inverse"): lambda t: 1 / np.log(t),
}


@dataclass(frozen=True)
class Descent:
    """The experiment as data.

    Attributes
    ----------
    data, alpha, clients
        The data set, and how its rows are dealt to clients.
    lam
        The strength of the penalty.
    rounds
        The largest T.
    rate
        The largest step; it must not exceed 1 / smoothness.
    batch_size
        Number of rows in a client's step in a stochastic round.
    points
        Number of rounds at which gradients are taken, evenly spread in log t.
    rules
        The rules of the step size.
    """

    data: str = "compas"
    alpha: float = 5.0
    clients: int = 10
    lam: float = 20.0
    rate: float = 0.03
    rounds: int = 1000
    batch_size: int = 32
    points: int = 60
    rules: tuple[Schedule, ...] = ("constant", "inverse-sqrt", "inverse")

    def measured_rounds(self) -> np.ndarray:
        """Return the rounds t = 0, 1, 2, ... at which the gradient is taken."""
        late = np.geomspace(1, self.rounds, self.points).round().astype(int)
        return np.unique(np.concatenate(([0], late)))


class Evaluation(NamedTuple):
    """The objective at one model.

    Attributes
    ----------
    value, gradient
        L, and its gradient (2d,) by both rows of the linear layer.
    dissimilarity
        sum_k w_k ||grad H_k||^2 / ||grad L||^2, the paper's B^2; the denominator is at least SMALL.
    noise, mean_noise
        The largest E ||g_k - grad H_k||^2 over the clients, the paper's sigma^2; and that of their
        mean, sum_k w_k^2 E ||g_k - grad H_k||^2.
    """

    value: float
    gradient: np.ndarray
    dissimilarity: float
    noise: float
    mean_noise: float


@dataclass(frozen=True, eq=False)
class Pooled:
    """Rows of all clients in double precision.

    Attributes
    ----------
    x
        (row, feature): scaled features, and a last column of ones for the bias.
    y, a, client
        (row,): the label, the group and the client.
    """

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    client: np.ndarray

    @classmethod
    def of(cls, federation: Federation) -> "Pooled":
        """Return the training rows of a federation, scaled as its model sees them."""
        data = federation.dataset
        rows = federation.rows
        x = federation.scale_rows(rows)
        client = np.repeat(np.arange(federation.num_clients), federation.sizes)
        return cls(np.c_[x, np.ones(len(x))], data.labels[rows], data.groups[rows], client)

    def evaluate(self, params: np.ndarray, *, lam: float, batch_size: int) -> Evaluation:
        """Return L, its gradient and the constants of the assumptions at one model (SP, J = x^2).

        With logit difference z = x u the score is s = 1/(1 + e^-z), and each row's share of the
        local objectives H_k has the gradient (s - y + lam C (1_0/b - 1_1/d) s (1 - s)) x, where
        C = 2 F~ is the constant the server sends and b, d are the groups' shares of all rows.
        """
        width = self.x.shape[1] - 1
        u = np.append(params[width : 2 * width] - params[:width], params[-1] - params[-2])
        z = self.x @ u
        s = 1 / (1 + np.exp(-z))
        share = np.where(self.a == 0, 1 / (self.a == 0).mean(), -1 / (self.a == 1).mean())
        gap = float((share * s).mean())
        pull = s - self.y + lam * 2 * gap * share * s * (1 - s)
        gradient = pull @ self.x / len(s)
        clients = np.bincount(self.client)
        by_client = (
            np.stack([np.bincount(self.client, pull * c) for c in self.x.T], 1) / clients[:, None]
        )
        loss = float(np.logaddexp(0, z).mean() - (z * self.y).mean())
        norms = (by_client**2).sum(1)
        square = np.bincount(self.client, pull**2 * (self.x**2).sum(1)) / clients
        # of a batch drawn without replacement; both rows of the layer move, hence the factor 2
        taken = np.minimum(batch_size, clients)
        noise = 2 * (square - norms) * (clients - taken) / np.maximum(clients - 1, 1) / taken
        return Evaluation(
            value=loss + lam * gap**2,
            gradient=np.concatenate((-gradient, gradient)),
            dissimilarity=float(clients @ norms / clients.sum() / max(gradient @ gradient, SMALL)),
            noise=float(noise.max()),
            mean_noise=float((clients / clients.sum()) ** 2 @ noise),
        )


@dataclass(frozen=True)
class DescentPath:
    """One step rule in one mode, averaged over the replicates at the measured rounds.

    Attributes
    ----------
    mode, rule
        With all rows or some of them in each step, and the rule of the step size.
    rounds, square, loss
        Measured rounds, ||grad L||^2 and L, each (e,).
    dissimilarity, noise, mean_noise
        The largest values along the path (see `Evaluation`).
    smoothness
        The largest |grad L(theta) - grad L(theta')| / |theta - theta'| along the path.
    """

    mode: Mode
    rule: Schedule
    rounds: np.ndarray
    square: np.ndarray
    loss: np.ndarray
    dissimilarity: float
    noise: float
    mean_noise: float
    smoothness: float

    def to_json(self) -> dict[str, Any]:
        """Return the path as JSON."""
        return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in asdict(self).items()}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "DescentPath":
        """Read what `to_json` returned."""
        values: dict[str, Any] = {f.name: kept[f.name] for f in fields(cls)}
        values |= {n: np.array(kept[n]) for n in ("rounds", "square", "loss")}
        return cls(**values)


def descend(
    dataset: Dataset,
    spec: Descent,
    mode: Mode,
    rule: Schedule,
    *,
    seeds: Sequence[int],
    on_round: Callable[[int, int], None] | None = None,
) -> DescentPath:
    """Train all replicates, and take the exact gradient at the measured rounds.

    Parameters
    ----------
    dataset, spec
        The rows, and the experiment.
    mode, rule
        With all rows of a client in each step, or some of them; and the rule of the step size.
    seeds
        One per replicate.
    on_round
        Called with the number of finished rounds and the total number of rounds.
    """
    federations = [
        standardize(partition(dataset, clients=spec.clients, alpha=spec.alpha, seed=s))
        for s in seeds
    ]
    settings = Settings(
        rounds=spec.rounds,
        optimizer=Optimizer("sgd"),
        schedule=rule,
        precision="fp64",
        batch_size=spec.batch_size if mode == "stochastic" else len(dataset),
        steps=1,
        eval_on="test",
    )
    measured = set(spec.measured_rounds().tolist())
    models = []

    def keep_model(t: int, params: np.ndarray) -> None:
        if t in measured:
            models.append(params.copy())

    simulate(
        federations,
        "logistic",
        fedgft(get_metric("sp"), spec.lam, penalty="l2"),
        settings,
        seeds=list(seeds),
        lr=spec.rate,
        on_round=on_round,
        on_model=keep_model,
    )
    return _path(spec, mode, rule, [Pooled.of(f) for f in federations], np.stack(models, 1))


def _path(
    spec: Descent, mode: Mode, rule: Schedule, pooled: list[Pooled], models: np.ndarray
) -> DescentPath:
    """The path of models (replicate, measured round, parameter)."""
    evaluations = [
        [rows.evaluate(params, lam=spec.lam, batch_size=spec.batch_size) for params in path]
        for rows, path in zip(pooled, models, strict=True)
    ]
    gradient = np.array([[at.gradient for at in path] for path in evaluations])
    moved = np.linalg.norm(np.diff(models, axis=1), axis=2)
    turned = np.linalg.norm(np.diff(gradient, axis=1), axis=2)
    noisy = float(mode == "stochastic")
    return DescentPath(
        mode=mode,
        rule=rule,
        rounds=spec.measured_rounds(),
        square=(gradient**2).sum(2).mean(0),
        loss=np.array([[at.value for at in path] for path in evaluations]).mean(0),
        dissimilarity=max(at.dissimilarity for path in evaluations for at in path),
        noise=noisy * max(at.noise for path in evaluations for at in path),
        mean_noise=noisy * max(at.mean_noise for path in evaluations for at in path),
        # leave out steps near 0, where the quotient is only rounding error
        smoothness=float((turned[moved > 1e-6] / moved[moved > 1e-6]).max()),
    )


def bounds(spec: Descent, path: DescentPath) -> np.ndarray:
    """Return the bound on the smallest squared gradient of T rounds, for T = 1, 2, ...

    With eta_t <= 1 / smoothness, smoothness S and the noise V of the mean gradient, the proof of
    Theorem 5.2 gives for full participation

        2 (L(theta^0) - L*) / sum eta_t + S V sum eta_t^2 / sum eta_t.

    The smallest measured loss takes the place of L*, which makes the bound smaller than needed.
    """
    eta = np.array(
        [
            learning_rate(np.array(spec.rate), path.rule, round=t, rounds=spec.rounds)
            for t in range(spec.rounds)
        ]
    )
    noise = path.smoothness * path.mean_noise * np.cumsum(eta**2)
    return (2 * (path.loss[0] - path.loss.min()) + noise) / np.cumsum(eta)


def summarize(spec: Descent, path: DescentPath, *, seeds: int) -> list[dict[str, Any]]:
    """Return rows at T = 10, 100, 1000, ... with the smallest squared gradient so far.

    `decline` is the factor by which the last tenfold of rounds changed it, `promised` the factor of
    Corollary 5.3. Both are None at T = 10, and where no rate is promised.
    """
    rate = RATES[path.mode, path.rule]
    bound = bounds(spec, path)

    def smallest(t: int) -> float:
        return max(float(path.square[path.rounds < t].min()), RESIDUE)

    out = []
    for t in (10 ** np.arange(1, int(np.log10(spec.rounds)) + 1)).tolist():
        promised = None if rate is None or t == 10 else rate(np.array(t)) / rate(np.array(t // 10))
        out.append(
            {
                "experiment": "convergence",
                "data": spec.data,
                "lam": spec.lam,
                "mode": path.mode,
                "rule": path.rule,
                "seeds": seeds,
                "rounds": t,
                "rate": spec.rate,
                "gradient": smallest(t),
                "bound": float(bound[t - 1]),
                "decline": None if promised is None else smallest(t) / smallest(t // 10),
                "promised": None if promised is None else float(promised),
                "smoothness": path.smoothness,
                "sigma": float(np.sqrt(path.noise)),
                "dissimilarity": float(np.sqrt(path.dissimilarity)),
            }
        )
    return out
