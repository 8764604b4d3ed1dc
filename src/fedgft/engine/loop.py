"""What the rounds of all simulations share: the clients that take part, and what they send."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedgft.algorithms import Algorithm, Cohort
from fedgft.engine import plan
from fedgft.engine.plan import RowIndex
from fedgft.settings import Settings
from fedgft.sums import Sums


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingLoop(ABC):
    """The rounds of a simulation. It is stateless: `step` takes a state and returns the next.

    `RoundLoop` trains parameters, and `BoostingLoop` grows trees; each has a state of its own.

    Parameters
    ----------
    index
        Rows of every client.
    algorithm, settings
        The method and its settings.
    seeds, lr
        One seed and one learning rate per run; the learning rates are those of round 0.
    """

    index: RowIndex
    algorithm: Algorithm
    settings: Settings
    seeds: np.ndarray  # (run,), uint64
    lr: np.ndarray  # (run,)

    @property
    @abstractmethod
    def name(self) -> str:
        """What trains: "trees", or the name of the executor."""

    @abstractmethod
    def init(self, params: np.ndarray | None) -> Any:
        """Return the state before round 0; `params` replaces random initial parameters."""

    @abstractmethod
    def step(self, state: Any, t: int) -> Any:
        """Return the state after round t; rounds are counted from zero."""

    @abstractmethod
    def finish(self, state: Any) -> Any:
        """Return the state with the final model, after the last round."""

    @abstractmethod
    def measure(self, state: Any, cohort: Cohort) -> Sums:
        """Return the sums of the global model over the rows of each client."""

    @abstractmethod
    def evaluate(self, state: Any) -> tuple[Any, Sums]:
        """Measure the test rows and, unless `eval_on` is "test", all clients."""

    @abstractmethod
    def parameters(self, state: Any) -> np.ndarray:
        """Return the global models, (run, p)."""

    @abstractmethod
    def restore(self, array: np.ndarray, on_host: bool) -> Any:
        """Return an array of a snapshot, which the next round may change."""

    def scores(self, state: Any) -> tuple[np.ndarray, ...] | None:
        """Return scores of the clients' rows that are not those of the model; see `History`."""
        return None

    @cached_property
    def all_clients(self) -> Cohort:
        """The cohort of all clients."""
        return plan.full_cohort(self.index.federations)

    @property
    def samples_clients(self) -> bool:
        """Whether cohorts are sampled; a uniform cohort of all clients counts as not sampled."""
        settings = self.settings
        every = settings.cohort == self.index.num_clients and settings.sampling == "uniform"
        return settings.cohort is not None and not every

    def draw_cohort(self, t: int) -> Cohort:
        """Return the clients that take part in round t."""
        settings = self.settings
        if settings.cohort is None or not self.samples_clients:
            return self.all_clients
        return plan.sample_cohort(
            self.index.federations, settings.cohort, settings.sampling, seeds=self.seeds, round=t
        )

    def collect_sums(self, state: Any, cohort: Cohort, t: int) -> tuple[Sums | None, Sums | None]:
        """Return the cohort's sums of the received model: what clients measure, and what they send.

        Only the second ones have noise. Both are None if no slot uses them.
        """
        objective = self.algorithm.objective
        is_used = objective.penalties or objective.local_controllers or objective.loss_rules
        if not is_used and self.algorithm.weighting.sees == "nothing":
            return None, None
        sums = self.measure(state, cohort)
        if not self.settings.noise:
            return sums, sums
        noise = self.settings.noise
        return sums, plan.add_noise(sums, cohort, noise, seeds=self.seeds, round=t)
