"""The table of settings: the type, bounds, choices, default and help text of each, stated once.

`Settings` (how a simulation runs), the options of the command line and the configuration of a
deployed run take their defaults and help texts from this table, and `check_setting` checks their
values. The module imports neither NumPy nor PyTorch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf, isnan
from numbers import Integral, Real
from pathlib import Path
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from fedgft.optimizers import Optimizer

MAX_COUNT = 2**31 - 1  # most rounds, rows or clients: the kernels use 32-bit indices
MAX_NUMBER = 1e6  # largest strength or learning rate: larger values are typing errors
MAX_SEED = 2**63 - 1
TARGET_TOLERANCE = 0.003
"How far above its target a gap counts as having reached it; a few thousand rows resolve no less."
MAX_REPLICATES = 100_000

MethodName = Literal[
    "fedavg",
    "lrw",
    "lft",
    "fairfed",
    "fedgft",
    "fedgft-control",
    "fedfb",
    "fairgrad",
    "fedfact",
    "agnostic-fair",
    "puffle",
    "fairtrade",
    "fade",
    "ffalm",
    "fedminmax",
    "bounded-group-loss",
    "afl",
    "q-ffl",
]
BaseName = Literal[
    "fedavg", "fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "fedyogi", "fedadagrad"
]
ProtocolName = Literal["heldout", "paper"]
PartitionName = Literal[
    "dirichlet", "dirichlet-group", "dirichlet-label", "hetero", "iid", "pure", "column"
]
Sampling = Literal["size", "uniform"]
ModelName = Literal["logistic", "mlp", "trees", "resnet18"]
Stem = Literal["imagenet", "small"]
Norms = Literal["shared", "local"]
Spread = Literal["range", "deviation", "variance", "squares"]
FairFedRule = Literal["subtract", "authors", "exp"]
Control = Literal["decisions", "scores"]
PriceOn = Literal["scores", "decisions"]
State = Literal["keep", "reset", "reset-first", "shared"]
Schedule = Literal["constant", "cosine", "step", "inverse-sqrt", "inverse"]
Start = Literal["common", "own"]
Batches = Literal["reshuffled", "fixed"]
EvalOn = Literal["both", "test"]
Augment = Literal["none", "flip"]
ValidPart = Literal["drop", "train", "test"]
ExecutorName = Literal["auto", "fused", "stacked", "sequential"]
Precision = Literal["fp32", "fp64", "bf16"]


NOUNS = {bool: "True or False", str: "a text"}  # names of types in error messages


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Parameters
    ----------
    kind
        int, float, str, bool, or Path; `tuple` for a tuple of texts.
    help
        What it does, as `--help` prints it.
    default
        Its value where it is not given. None: it may stay unset.
    unset
        What the command line does where the option is not given, if that is not `default`.
    at_least, above, at_most, below
        Bounds of a number, inclusive and exclusive.
    choices
        The texts that are allowed; empty: any.
    hint
        Added to the message about a value outside the bounds.
    """

    kind: type
    help: str
    default: Any = None
    unset: str = ""
    at_least: float = -inf
    above: float = -inf
    at_most: float = inf
    below: float = inf
    choices: tuple[str, ...] = ()
    hint: str = ""

    @property
    def is_fraction(self) -> bool:
        """Whether it is a number of at most 1, which the command line also reads as percent."""
        return self.kind is float and (self.at_most <= 1 or self.below <= 1)

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, as the end of a sentence; None if it is valid."""
        if value is None and self.default is None:
            return None
        if self.choices:
            if isinstance(value, str) and value in self.choices:
                return None
            return f"{_shorten(value)} is not known; choose from {', '.join(self.choices)}"
        if self.kind in (int, float):
            return self._number_fault(value)
        noun = NOUNS.get(self.kind)
        is_valid = noun is None or isinstance(value, self.kind)
        return None if is_valid else f"must be {noun}, not {_shorten(value)}"

    def _number_fault(self, value: Any) -> str | None:
        wanted = Integral if self.kind is int else Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            noun = "whole number" if self.kind is int else "number"
            return f"must be a {noun}, not {_shorten(value)}"
        number: Any = value
        bounds = (
            (number < self.at_least, f"at least {self.at_least:,g}"),
            (number <= self.above, f"above {self.above:,g}"),
            (number > self.at_most, f"at most {_readable(self.at_most)}"),
            (number >= self.below, "finite" if self.below == inf else f"below {self.below:,g}"),
            (isnan(number), "a number"),
        )
        broken = next((text for is_broken, text in bounds if is_broken), None)
        return (
            broken and f"must be {broken}, got {_readable(value)}{self.hint and f': {self.hint}'}"
        )

    def allowed_values(self) -> str:
        """Return the values that `fault` accepts in words, as part of a sentence."""
        if self.choices:
            return "one of " + ", ".join(f'"{name}"' for name in self.choices)
        if self.kind not in (int, float):
            return NOUNS.get(self.kind, "a path")
        lower = f"at least {self.at_least:g}" if self.at_least > -inf else ""
        lower = f"above {self.above:g}" if self.above > -inf else lower
        upper = f"at most {_readable(self.at_most)}" if self.at_most < MAX_COUNT else ""
        upper = f"below {self.below:g}" if self.below < inf else upper
        bounds = " and ".join(filter(None, (lower, upper)))
        noun = "a whole number" if self.kind is int else "a number"
        return f"{noun} of {bounds}" if lower.startswith("at") else f"{noun} {bounds}".rstrip()

    def help_text(self) -> str:
        """Return the help text of the option: one sentence, with the default where it is known."""
        return f"{self.help} [default: {self.unset}]." if self.unset else f"{self.help}."


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _readable(number: Any) -> str:
    return f"{number:,}" if isinstance(number, Integral) else f"{number:,.12g}"


_count = partial(Setting, int, at_least=1, at_most=MAX_COUNT)
_strength = partial(Setting, float, at_least=0, at_most=MAX_NUMBER)
_rate = partial(Setting, float, above=0, at_most=MAX_NUMBER)


def _choice(names: Any, help: str, default: str | None = None, unset: str = "") -> Setting:
    return Setting(str, help, default, unset, choices=get_args(names) or names)


OPTIONS: dict[str, dict[str, Setting]] = {  # keyed by the headings of `fedgft train --help`
    "Data": {
        "data": Setting(
            tuple,
            "A CSV or Parquet file, or several, one per client; or a data set that `fedgft data "
            "list` shows",
            ("adult",),
        ),
        "label": Setting(
            str, "The column with the true outcome (celeba: an attribute, by default Smiling)"
        ),
        "group": Setting(
            tuple,
            "The column with the groups; several for their intersections (celeba: attributes, by "
            "default Male)",
        ),
        "exclude_empty": Setting(
            bool, "Exclude groups that have too few rows for the metric in some replicate", False
        ),
        "client": Setting(str, "The column with the client of each row (celeba: identity)"),
        "split": Setting(str, "The column that assigns each row to train or test"),
        "weight": Setting(
            str,
            "The column that says how much each row counts, such as a survey weight: in training "
            "and in every measurement",
        ),
        "randomized_groups": Setting(
            float,
            "The groups in the table went through randomized response with this epsilon; gaps and "
            "training are corrected for it",
            at_least=0.001,
            at_most=50,
        ),
        "positive": Setting(
            str,
            "The positive one of two labels",
            unset="the alphabetically last, or the larger number",
        ),
        "leave_out": Setting(
            tuple, "Columns to exclude from the features, besides the group and identifiers"
        ),
        "keep_group": Setting(bool, "Use the group as a feature, as in the paper", False),
        "keep": Setting(tuple, "Columns to use as features although they look like identifiers"),
        "categorical": Setting(
            tuple, "Columns whose numbers are codes: each number becomes a category"
        ),
        "missing": Setting(
            tuple, "Values to read as missing, such as '?', besides empty cells, NA and N/A"
        ),
        "train_rows": _count("Training rows to draw per replicate", unset="all; celeba: 10,000"),
        "test_rows": _count("Test rows to draw per replicate", unset="all; celeba: 6,000"),
    },
    "Images": {
        "images": Setting(
            Path, "Folder of images: of CelebA with --data celeba, or those that a table lists"
        ),
        "size": _count("Pixels per side after resizing, e.g. 64, 128 or 224", unset="64"),
        "crop": _count("Side of the central square to cut out first", unset="the largest"),
        "image": Setting(
            str, "The column of file names", unset="image, filename, file, path or image_id"
        ),
        "skip_bad": Setting(bool, "Skip and count images that are missing or unreadable", False),
        "valid": _choice(ValidPart, "How to use the validation part of CelebA", unset="drop"),
        "cache": Setting(Path, "Folder for decoded images", unset="the user's cache folder"),
        "augment": _choice(
            Augment, "flip: mirror half of the training images at random", "none", "the protocol's"
        ),
    },
    "Federation and replicates": {
        "clients": _count("Number of clients", 10),
        "partition": _choice(
            PartitionName,
            "How rows are assigned to clients; dirichlet: by random shares of each group and "
            "label; dirichlet-group or dirichlet-label: by random shares of each group or of each "
            "label; hetero: clients differ in how group and label go together; iid: evenly; pure: "
            "one group per client; column: by the column that names the client",
            unset="dirichlet; column where --client is given",
        ),
        "cohort": _count("Number of clients that take part per round", unset="all"),
        "sampling": _choice(
            Sampling,
            "How clients are drawn in each round; size: with probability proportional to their "
            "rows, with replacement; uniform: with equal probability, without replacement",
            "uniform",
            "uniform",
        ),
        "noise": _strength(
            "Standard deviation of the noise on the counts that clients send", 0.0, "0"
        ),
        "protocol": _choice(
            ProtocolName,
            "heldout: test rows are held out of training. paper: as the published numbers were "
            "made",
            "heldout",
        ),
        "seeds": _count(
            "Number of replicates (repetitions with different seeds)",
            None,
            "20; 3 for images",
            at_most=MAX_REPLICATES,
        ),
        "seed": _count(
            "Seed of the first replicate; the others follow", 0, at_least=0, at_most=MAX_SEED
        ),
    },
    "Method": {
        "target": Setting(
            float,
            "Largest acceptable gap of decisions: 0.02 or 2% is two percentage points",
            unset="0; frontier: none",
            at_least=0,
            below=1,
            hint="two points are 0.02 or 2%",
        ),
        "local_target": Setting(
            float,
            "fedgft-control also keeps the gap on each client's own rows within this target",
            unset="none",
            at_least=0,
            below=1,
            hint="five points are 0.05 or 5%",
        ),
        "control": _choice(
            Control,
            "Which gap fedgft-control brings within the target: of decisions or of scores",
            unset="decisions",
        ),
        "price_on": _choice(
            PriceOn,
            "What the prices of fedgft-control are paid for; scores: a term of the loss, "
            "decisions: weights of rows, which need fewer rounds",
            unset="scores",
        ),
        "pick": _strength(
            "fedgft-control selects its model from this share of the rounds, the last ones",
            unset="0.6",
            at_most=1,
        ),
        "lam": _strength(
            "Strength of fedgft, lft and most published methods", unset="the method's"
        ),
        "penalty": _choice(
            ("l1", "l2", "half"),
            "Shape of the penalty on the gap F: l1 is F, l2 is F^2, half is F^2/2",
            unset="half",
        ),
        "spread": _choice(
            Spread,
            "How fedgft and lft measure the gap among several groups; range: largest difference, "
            "deviation: largest distance from the overall rate, variance: squared distances, "
            "squares: squared distances from the overall rate",
            unset="range",
        ),
        "beta": _strength("Strength of fairfed and fade", unset="the method's"),
        "fairfed": _choice(
            FairFedRule,
            "Form of FairFed: subtract as published, authors as in their code, exp as in the paper",
            unset="the protocol's",
        ),
        "base": _choice(BaseName, "Federated algorithm that the methods extend", unset="fedavg"),
        "mu": _strength("Strength of the proximal term", unset="0.1 with --base fedprox, else 0"),
        "server_lr": _rate(
            "Learning rate of the server, for --base fedavgm, fedadam, fedyogi and fedadagrad"
        ),
    },
    "Model and local training": {
        "model": _choice(ModelName, "The model", unset="logistic; resnet18 for images"),
        "norm": _choice(("batch", "group"), "Normalizing layers of resnet18", unset="batch"),
        "stem": _choice(
            Stem, "First layer of resnet18; small: for images of 32 pixels", unset="imagenet"
        ),
        "weights": Setting(Path, "Start resnet18 from a .safetensors file or a torch state dict"),
        "fedbn": Setting(
            bool, "Each client keeps its own BatchNorm layers", False, "the weighted mean"
        ),
        "lr": _rate("Local learning rate", unset="chosen, or the protocol's"),
        "rounds": _count(
            "Communication rounds; of trees, one grows per round",
            50,
            "the protocol's, and more where fedgft-control needs them",
        ),
        "epochs": _count("Local epochs per round", 1, "1"),
        "batch_size": _count("Rows in a local batch", 256, "256; 64 for images"),
        "steps": _count("Maximum number of local steps per epoch", unset="all rows are read"),
        "optimizer": _choice(("adam", "adamw", "sgd", "momentum"), "Local optimizer", unset="adam"),
        "state": _choice(
            State,
            "State of the local optimizer at the start of a round; keep: as it was, reset: zero, "
            "reset-first: only the first moment is zero, shared: the clients' mean second moment",
            "shared",
            "the protocol's",
        ),
        "schedule": _choice(
            Schedule, "How the learning rate falls over the rounds", "cosine", "the protocol's"
        ),
        "weight_decay": _strength("Weight decay of the local optimizer", unset="0"),
        "eval_every": _count("Rounds between measurements; 0: first and last", 1, "1", at_least=0),
    },
    "Trees": {
        "max_depth": _count(
            "Largest number of splits above a leaf", 6, "2, 4 or 6, chosen", at_most=12
        ),
        "max_leaves": _count(
            "Largest number of leaves; the best one is split next", unset="no limit", at_least=2
        ),
        "l2": _strength("Strength of the L2 penalty on leaves", 1.0, "1"),
        "min_child_weight": _strength("Smallest sum of p(1-p) on each side of a split", 1.0, "1"),
        "subsample": Setting(
            float, "Share of the rows that a tree is fitted to", 1.0, "1", above=0, at_most=1
        ),
        "bins": _count("Largest number of bins of a column", 255, "255", at_least=2, at_most=255),
        "min_bin_rows": _count("Fewest training rows in a bin of numbers", 1, "1"),
        "folds": _count(
            "Folds of the clients' rows: gaps are measured by trees that have not seen a row; 0: "
            "by all trees, which is faster",
            3,
            "3",
            at_least=0,
            at_most=100,
        ),
    },
    "Machine": {
        "device": Setting(str, "cpu, cuda, or several GPUs: cuda:0,cuda:1", "cpu", "cpu"),
        "precision": _choice(
            Precision, "Numeric precision; bf16: matrix products on a GPU only", "fp32", "fp32"
        ),
        "threads": _count("CPU threads; results do not depend on them", 2, "2"),
        "executor": _choice(ExecutorName, "Executor of the simulator", "auto", "auto"),
        "lanes": _count(
            "Clients trained at the same time on a GPU", unset="as many as fit and help"
        ),
        "deterministic": Setting(
            bool, "Make GPU results identical in each run; slower. CPU results always are", False
        ),
        "checkpoint_every": _count(
            "Rounds between checkpoints in --out; 0: none", None, "1 for images, else 0", at_least=0
        ),
        "resume": Setting(
            bool, "Continue from the checkpoints of an interrupted run in --out", False
        ),
        "overwrite": Setting(bool, "Replace the results of another run in --out", False),
    },
}

SETTINGS: dict[str, Setting] = {
    **{name: setting for group in OPTIONS.values() for name, setting in group.items()},
    # settings of the engine only
    "start": _choice(
        Start, "common: all clients start from one model; own: each from its own", "common"
    ),
    "batches": _choice(
        Batches, "reshuffled: drawn anew in every epoch; fixed: drawn once", "reshuffled"
    ),
    "lag": Setting(
        bool, "Use prices that are one round old, as if sums came with the updates", False
    ),
    "eval_on": _choice(
        EvalOn, "both: measure the clients' and the test rows; test: these only", "both"
    ),
    "norms": _choice(
        Norms, "shared: normalizing layers are averaged; local: clients keep them (FedBN)", "shared"
    ),
    "graphs": Setting(bool, "Replay captured steps on a GPU", True),
    # settings of commands and of a deployed run
    "method": _choice(MethodName, "The method"),
    "alpha": _rate(
        "How evenly rows are dealt to clients: 0.5 is very uneven, 100 nearly even",
        0.5,
        at_most=inf,
    ),
    "sites": _count("Sites to wait for", 3),
    "test_share": Setting(float, "Share of rows held out", 0.3, at_least=0, below=1),
    "proximal_mu": _strength("Strength of the proximal term of FedProx", 0.1),
    "min_count": _strength("A site withholds counts of fewer rows", 0, at_most=inf),
    "timeout": _rate("Seconds for one phase of a round", 600.0, at_most=inf),
    "node_timeout": _rate("Seconds to wait for sites", 120.0, at_most=inf),
    "scaling": _choice(("pooled", "median"), "Scaling of the sites' numbers", "pooled"),
    "epsilon": _rate("Privacy budget of the whole run", at_most=inf),
    "local_trees": _count("Trees that a site grows per round, for model xgboost", 1, at_most=100),
    "rotating_folds": _count(
        "Parts of a site's rows; each round's trees leave one out, which then sets the prices; 0 "
        "or 1: none, for model xgboost",
        0,
        at_least=0,
        at_most=100,
    ),
    "max_influence": _rate("Largest change of the gap that one site may cause", 1.0, at_most=inf),
}


def check_setting(name: str, value: Any) -> None:
    """Raise a `FedgftError` with this field if the value is not one that the setting can have.

    Parameters
    ----------
    name
        A key of `SETTINGS`.
    value
        Any object. None passes where the setting may stay unset.
    """
    fault = SETTINGS[name].fault(value)
    if fault is not None:
        raise FedgftError(fault, field=name)


TRAINING_KEYS = ("lr", "epochs", "batch-size", "weight-decay", "optimizer", "schedule")
DEPLOYED_MODELS = ("own", "xgboost")  # models that only a deployed run has
TREE_KEYS = ("lr", "local-trees", "max-depth", "min-child-weight", "l2", "rotating-folds")
"The settings of local training with model xgboost."
HISTOGRAM_KEYS = ("lr", "max-depth", "min-child-weight", "l2", "bins", "min-bin-rows")
"The settings of a deployed run with model trees."
RUN_KEYS = (
    *TRAINING_KEYS,
    *TREE_KEYS[1:],
    *HISTOGRAM_KEYS[-2:],
    *("rounds", "sites", "test-share", "alpha", "server-lr", "proximal-mu", "beta", "penalty"),
    *("min-count", "timeout", "node-timeout", "model", "scaling", "max-influence"),
)


def check_run_config(config: Mapping[str, Any], keys: tuple[str, ...] = RUN_KEYS) -> None:
    """Check the values of the configuration of a deployed run that have one of these keys.

    Keys may be missing. The model "own" is built by the user's app, "xgboost" by XGBoost, and whole
    numbers may be floats: Flower converts them.
    """
    for key in keys:
        if key not in config or (key == "model" and config[key] in DEPLOYED_MODELS):
            continue
        name = key.replace("-", "_")
        value = config[key]
        is_whole = SETTINGS[name].kind is int and isinstance(value, float) and value.is_integer()
        check_setting(name, int(value) if is_whole else value)


def check_settings(values: Mapping[str, Any]) -> None:
    """Check those values, by name, that the table knows and that are not None."""
    for name, value in values.items():
        if value is not None and name in SETTINGS:
            check_setting(name, value)


def _default_optimizer() -> "Optimizer":
    from fedgft.optimizers import Optimizer

    return Optimizer()


@dataclass(frozen=True)
class Settings:
    """How a simulation runs: everything that is the same for all its runs.

    The defaults are those of the protocol `heldout`, with which targets are reached. How the
    published numbers were made is ``fedgft.study.get_protocol("paper").settings``. A value that is
    not allowed raises a `FedgftError` that names the setting.
    """

    rounds: int = SETTINGS["rounds"].default
    epochs: int = SETTINGS["epochs"].default
    batch_size: int = SETTINGS["batch_size"].default
    steps: int | None = None
    optimizer: "Optimizer" = field(default_factory=_default_optimizer)
    state: State = SETTINGS["state"].default
    schedule: Schedule = SETTINGS["schedule"].default
    cohort: int | None = None
    sampling: Sampling = SETTINGS["sampling"].default
    start: Start = SETTINGS["start"].default
    batches: Batches = SETTINGS["batches"].default
    lag: bool = SETTINGS["lag"].default
    noise: float = SETTINGS["noise"].default
    eval_every: int = SETTINGS["eval_every"].default
    eval_on: EvalOn = SETTINGS["eval_on"].default
    augment: Augment = SETTINGS["augment"].default
    norms: Norms = SETTINGS["norms"].default
    precision: Precision = SETTINGS["precision"].default
    threads: int = SETTINGS["threads"].default
    executor: ExecutorName = SETTINGS["executor"].default
    device: str = SETTINGS["device"].default
    lanes: int | None = None
    deterministic: bool = SETTINGS["deterministic"].default
    graphs: bool = SETTINGS["graphs"].default

    def __post_init__(self) -> None:
        from fedgft.optimizers import Optimizer

        for each in fields(self):
            if each.name != "optimizer":
                check_setting(each.name, getattr(self, each.name))
        if not isinstance(self.optimizer, Optimizer):
            text = f"must be an Optimizer such as Optimizer('adam'), not {_shorten(self.optimizer)}"
            raise FedgftError(text, field="optimizer")

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """The type of parameters and sums."""
        return "float64" if self.precision == "fp64" else "float32"

    @property
    def devices(self) -> list[str]:
        """The devices by name; models are kept and measured on the first."""
        return [name.strip() for name in self.device.split(",")]

    def check_cohort(self, clients: int) -> None:
        """Raise a `FedgftError` if a round draws more clients than there are."""
        if self.cohort is not None and self.cohort > clients:
            raise FedgftError(
                f"`cohort` must lie between 1 and the {clients} clients, got {self.cohort}"
            )


SETTINGS_EXAMPLES = """
    Examples
    --------
    >>> import fedgft
    >>> settings = fedgft.Settings(rounds=20, batch_size=64)
    >>> settings.rounds, settings.schedule
    (20, 'cosine')
    >>> fedgft.Settings(rounds=0)
    Traceback (most recent call last):
    ...
    fedgft.errors.FedgftError: rounds must be at least 1, got 0
    """
UNSET = {  # what None means in Python
    "steps": "all rows are read",
    "cohort": "all clients",
    "lanes": "as many as fit and help",
}


def _describe_setting(name: str) -> str:
    """Return the entry of one field in the docstring of `Settings`."""
    setting = SETTINGS[name]
    lines = [f"{setting.help}."]
    if name == "optimizer":
        lines.append("An `Optimizer` of `fedgft.optimizers`. Default: ``Optimizer('adam')``.")
    else:
        allowed = setting.allowed_values()
        default = f'"{setting.default}"' if isinstance(setting.default, str) else setting.default
        shown = f"None ({UNSET[name]})" if setting.default is None else default
        lines.append(f"{allowed[0].upper()}{allowed[1:]}. Default: {shown}.")
    text = "\n".join(line for each in lines for line in wrap(each, 92))
    return f"    {name}\n" + indent(text, 8 * " ")


Settings.__doc__ = (
    f"{Settings.__doc__}\n    Parameters\n    ----------\n"
    + "\n".join(_describe_setting(each.name) for each in fields(Settings))
    + f"\n{SETTINGS_EXAMPLES}"
)
