"""How a simulation runs: everything that is the same for all its runs."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from fedgft.arguments import instance, real_number, whole_number
from fedgft.engine.schedule import Sampling, Schedule
from fedgft.errors import FedgftError
from fedgft.optim import Optimizer

State = Literal["keep", "reset", "reset-first", "shared"]
Start = Literal["common", "own"]
Batches = Literal["reshuffled", "fixed"]
ExecutorName = Literal["auto", "fused", "stacked", "sequential"]
Precision = Literal["fp32", "fp64", "bf16"]
Norms = Literal["shared", "local"]
Augment = Literal["none", "flip"]
EvalOn = Literal["both", "test"]
MOST = 2**31 - 1  # of any number of things
DTYPES: dict[str, Literal["float32", "float64"]] = {"fp64": "float64"}  # of what is kept


@dataclass(frozen=True)
class Settings:
    """How a simulation runs: everything that is the same for all its runs.

    The defaults are those of the protocol `heldout`, with which targets are reached. How the
    published numbers were made is `get_protocol("paper").settings`.
    """

    rounds: int = 50
    epochs: int = 1
    batch_size: int = 256
    steps: int | None = None  # local steps an epoch at most; None: all rows are read
    optimizer: Optimizer = field(default_factory=Optimizer)
    state: State = "shared"  # of the clients' optimisers, at the start of a round
    schedule: Schedule = "cosine"
    cohort: int | None = None  # clients a round; None: everybody
    sampling: Sampling = "uniform"
    start: Start = "common"  # or every client its own random start in round 1
    batches: Batches = "reshuffled"  # every epoch, or drawn once and kept
    lag: bool = False  # prices are a round old, as when sums arrive with the clients' updates
    noise: float = 0.0  # sd of what a client adds to its counts by label, group and decision
    eval_every: int = 1  # 0: after the last round only
    eval_on: EvalOn = "both"  # the federation's rows and the test rows
    augment: Augment = "none"  # flip: in training every other picture is mirrored, at random
    norms: Norms = "shared"  # or every client its own normalising layers (FedBN)
    precision: Precision = "fp32"  # bf16: of products; parameters and sums stay float32
    threads: int = 2
    executor: ExecutorName = "auto"
    device: str = "cpu"  # cuda, cuda:1, or several: cuda:0,cuda:1
    lanes: int | None = None  # clients in flight on a GPU; None: as many as help and fit
    deterministic: bool = False  # on a GPU, at some cost; a CPU always is
    graphs: bool = True  # replay captured steps on a GPU

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("rounds", "epochs", "batch_size", "threads", "steps", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise FedgftError(f"{option} must be at least 1, got {value}")
            if value is not None and value > MOST:
                option = "--" + name.replace("_", "-")
                raise FedgftError(f"{option} must be at most {MOST:,}, got {value:,}")
        if not 0 <= self.eval_every <= MOST:
            raise FedgftError(
                f"--eval-every must lie between 0 and {MOST:,}, got {self.eval_every}"
            )
        if not 0 <= self.noise < float("inf"):
            raise FedgftError(f"--noise must be a number >= 0, got {self.noise:g}")
        choices = {"state": State, "schedule": Schedule, "sampling": Sampling, "start": Start,
                   "batches": Batches, "executor": ExecutorName, "precision": Precision,
                   "norms": Norms, "augment": Augment, "eval_on": EvalOn}  # fmt: skip
        for name, kind in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in get_args(kind):
                known = ", ".join(get_args(kind))
                option = "--" + name.replace("_", "-")
                raise FedgftError(
                    f"{option} {getattr(self, name)!r} is not known; choose from {known}"
                )

    def _check_types(self) -> None:
        """Whole numbers are whole: half a round would be a round more or less without a word."""
        for name in ("rounds", "epochs", "batch_size", "threads", "eval_every"):
            whole_number(name, getattr(self, name))
        for name in ("steps", "lanes", "cohort"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        real_number("noise", self.noise, finite=False)
        for name in ("lag", "deterministic", "graphs"):
            if not isinstance(getattr(self, name), bool):
                raise FedgftError(f"{name} must be True or False, not {getattr(self, name)!r}")
        instance("optimizer", self.optimizer, Optimizer, "for example Optimizer('adam')")
        instance("device", self.device, str)

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Of parameters and sums."""
        return DTYPES.get(self.precision, "float32")

    @property
    def devices(self) -> list[str]:
        """The first is where models are kept and measured."""
        return [name.strip() for name in self.device.split(",")]

    def check_cohort(self, clients: int) -> None:
        if self.cohort is not None and not 1 <= self.cohort <= clients:
            raise FedgftError(
                f"--cohort must lie between 1 and the {clients} clients, got {self.cohort}"
            )
