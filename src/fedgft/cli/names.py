"""Names that options take, how they are given, and which method listens to which option."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from fedgft.errors import FedgftError
from fedgft.files import expanded

if TYPE_CHECKING:
    from cyclopts import Token

    from fedgft.cli.options import Options

Flag = Parameter(negative="", show_default=False)
Some = Parameter(consume_multiple=True, negative="")  # or none
Many = Parameter(
    consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values))
)


def _whole(_: object, tokens: "Sequence[Token]") -> int:
    """As Python reads it: a fraction would otherwise be cut without a word."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"must be a whole number, not '{tokens[0].value[:40]}'") from None


def _place(_: object, tokens: "Sequence[Token]") -> Path:
    """With ~ written out. A variable that was empty is not the folder that we happen to be in."""
    if not tokens[0].value.strip():
        raise ValueError("the name of a file or folder must not be empty")
    try:
        return expanded(tokens[0].value)
    except FedgftError as error:
        raise ValueError(str(error)) from None


Whole = Annotated[int, Parameter(converter=_whole)]  # every option that counts something
Place = Annotated[Path, Parameter(converter=_place)]  # every file and folder
MOST_SEEDS = 100_000

SERVERS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
MethodName = Literal["fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control"]
BaseName = Literal["fedavg", "fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "fedyogi",
                   "fedadagrad"]  # fmt: skip
MetricName = str  # of the catalogue, or several: get_metric reads it
Methods = Annotated[tuple[MethodName, ...], Many]
Metrics = Annotated[tuple[MetricName, ...], Many]
Alphas = Annotated[tuple[float, ...], Many]
HEADINGS = {  # in --help, over the options that several commands share
    "Data": ("data", "label", "group", "exclude_empty", "client", "split", "positive",
             "leave_out", "train_rows", "test_rows"),
    "Images": ("images", "size", "crop", "image", "skip_bad", "valid", "cache", "augment"),
    "Federation and replicates": ("clients", "partition", "cohort", "sampling", "noise",
                                  "protocol", "seeds", "seed"),
    "Method": ("target", "control", "pick", "lam", "penalty", "spread", "beta", "fairfed", "base",
               "mu", "server_lr"),
    "Model and local training": ("model", "norm", "stem", "weights", "fedbn", "lr",
                                 "rounds", "epochs", "batch_size", "steps", "optimizer", "state",
                                 "schedule", "weight_decay", "eval_every"),
    "Machine": ("device", "precision", "threads", "executor", "lanes", "deterministic",
                "checkpoint_every", "resume"),
}  # fmt: skip
LISTENERS = {  # options that some of the methods alone listen to
    "lam": ("fedgft", "lft"), "penalty": ("fedgft", "lft"), "spread": ("fedgft", "lft"),
    "beta": ("fairfed",), "fairfed": ("fairfed",), "target": ("fedgft-control",),
    "control": ("fedgft-control",), "pick": ("fedgft-control",),
    "noise": ("fairfed", "fedgft", "fedgft-control"),
}  # fmt: skip


def headed(cls: type) -> type:
    """A dataclass of options, each below its heading in --help."""
    groups = {
        name: Group(heading, sort_key=i)
        for i, (heading, names) in enumerate(HEADINGS.items())
        for name in names
    }
    for name, kind in cls.__annotations__.items():
        cls.__annotations__[name] = Annotated[kind, Parameter(group=groups[name])]
    return cls


def check_seeds(seeds: int) -> None:
    if not 1 <= seeds <= MOST_SEEDS:
        raise FedgftError(f"--seeds must lie between 1 and {MOST_SEEDS:,}, got {seeds}")


def check_methods(options: "Options", methods: Sequence[str]) -> list[str]:
    """Notes about options that no method here listens to; an error where that would mislead."""
    notes = []
    for name, who in LISTENERS.items():
        if getattr(options, name) is None or set(who) & set(methods):
            continue
        option = "--" + name.replace("_", "-")
        text = f"{option} is for {' and '.join(who)}, and the methods here are {', '.join(methods)}"
        if name == "target" or (name == "lam" and "fedgft-control" in methods):
            raise FedgftError(text)
        notes.append(text)
    return notes
