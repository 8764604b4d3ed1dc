"""The options that `train`, `compare` and `frontier` share, and the study that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

import fedgft.settings as choices
from fedgft.cli.parameters import Flag, Many, MetricName, Place, Some, Whole
from fedgft.data import SOURCES, Dataset, Progress, load, load_celeba, load_images
from fedgft.data.public import synthetic
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel
from fedgft.metrics import Metric
from fedgft.models import ResNet18
from fedgft.settings import MAX_SEED, OPTIONS, SETTINGS, MethodName, check_settings
from fedgft.store import expand_user
from fedgft.study import Protocol, Study, get_protocol
from fedgft.study.cache import Checkpoints
from fedgft.study.protocol import empty_groups, without_groups
from fedgft.study.study import OnProgress

if TYPE_CHECKING:
    from fedgft.cli.console import Bar

Methods = Annotated[tuple[MethodName, ...], Many]
Metrics = Annotated[tuple[MetricName, ...], Many]
Alphas = Annotated[tuple[float, ...], Many]

COLUMN_ROLES = ("label", "group", "client", "split", "positive")
CELEBA_ROLES = {"label": "Smiling", "group": "Male"}  # the paper's
IMAGE_OPTIONS = ("size", "crop", "image", "skip_bad", "valid", "cache", "augment")
RESNET_OPTIONS = ("norm", "stem", "weights", "fedbn")
SERVER_BASES = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")  # they have a learning rate
PROTOCOL_CANDIDATES = ("lr", "lam", "beta", "target")  # a protocol holds several values of these
METHODS_BY_OPTION = {  # options that only some of the methods use
    "lam": ("fedgft", "lft"),
    "penalty": ("fedgft", "lft"),
    "spread": ("fedgft", "lft"),
    "beta": ("fairfed",),
    "fairfed": ("fairfed",),
    "target": ("fedgft-control",),
    "control": ("fedgft-control",),
    "pick": ("fedgft-control",),
    "noise": ("fairfed", "fedgft", "fedgft-control"),
}


def _add_help(cls: type) -> type:
    """Give every option its heading and its help text from the table of settings."""
    for position, (heading, settings) in enumerate(OPTIONS.items()):
        group = Group(heading, sort_key=position)
        for name, setting in settings.items():
            parameter = Parameter(group=group, help=setting.help_text())
            cls.__annotations__[name] = Annotated[cls.__annotations__[name], parameter]
    return cls


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@_add_help
class Options:
    """Values of the shared options; None and False mean that an option was not given.

    Help texts, bounds and choices are in `fedgft.settings`.
    """

    data: str = SETTINGS["data"].default
    label: str | None = None
    group: str | None = None
    exclude_empty: Annotated[bool, Flag] = False
    client: str | None = None
    split: str | None = None
    positive: str | None = None
    leave_out: Annotated[tuple[str, ...] | None, Some] = None
    train_rows: Whole | None = None
    test_rows: Whole | None = None

    images: Place | None = None
    size: Whole | None = None
    crop: Whole | None = None
    image: str | None = None
    skip_bad: Annotated[bool, Flag] = False
    valid: choices.ValidPart | None = None
    cache: Place | None = None
    augment: choices.Augment | None = None

    clients: Whole = SETTINGS["clients"].default
    partition: choices.PartitionName | None = None
    cohort: Whole | None = None
    sampling: choices.Sampling | None = None
    noise: float | None = None
    protocol: choices.ProtocolName = SETTINGS["protocol"].default
    seeds: Whole | None = None
    seed: Whole = SETTINGS["seed"].default

    target: float | None = None
    control: choices.Control | None = None
    pick: float | None = None
    lam: float | None = None
    penalty: choices.Penalty | None = None
    spread: choices.Spread | None = None
    beta: float | None = None
    fairfed: choices.FairFedRule | None = None
    base: choices.BaseName | None = None
    mu: float | None = None
    server_lr: float | None = None

    model: choices.ModelName | None = None
    norm: choices.Norm | None = None
    stem: choices.Stem | None = None
    weights: Place | None = None
    fedbn: Annotated[bool, Flag] = False
    lr: float | None = None
    rounds: Whole | None = None
    epochs: Whole | None = None
    batch_size: Whole | None = None
    steps: Whole | None = None
    optimizer: choices.OptimizerName | None = None
    state: choices.State | None = None
    schedule: choices.Schedule | None = None
    weight_decay: float | None = None
    eval_every: Whole | None = None

    device: str | None = None
    precision: choices.Precision | None = None
    threads: Whole | None = None
    executor: choices.ExecutorName | None = None
    lanes: Whole | None = None
    deterministic: Annotated[bool, Flag] = False
    checkpoint_every: Whole | None = None
    resume: Annotated[bool, Flag] = False

    @property
    def replicates(self) -> int:
        """The number of replicates: --seeds, or fewer for images than for tables."""
        if self.seeds is not None:
            return self.seeds
        return 20 if self.images is None else 3

    @property
    def model_name(self) -> choices.ModelName:
        """The model: --model, or the usual one for tables or images."""
        return self.model or ("logistic" if self.images is None else "resnet18")

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values of those of the named options that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: v for name, v in values.items() if v is not None and v is not False}

    # Checks

    def check(self) -> None:
        """Raise a `FedgftError` for everything that can be seen to be wrong before data is read."""
        check_settings(vars(self))
        if self.seed + self.replicates > MAX_SEED:
            raise FedgftError(f"must be below 2^63 - `seeds`, got {self.seed}", field="seed")
        self._check_images()
        if self.cohort is not None and self.client is None:
            self.make_protocol().settings.check_cohort(self.clients)
        if self.device not in (None, "cpu"):
            from fedgft.engine.executors import check_devices

            check_devices(self.make_protocol().settings)
        if self.pick and (self.cohort is not None or self.noise):
            raise FedgftError(
                "`pick` needs the exact sums of all clients: not with `cohort` or `noise`",
                kind="conflict",
            )
        if self.server_lr is not None and self.base not in SERVER_BASES:
            raise FedgftError(
                f"`server_lr` is for `base` {', '.join(SERVER_BASES)}", kind="conflict"
            )
        if self.partition == "column" and self.client is None:
            raise FedgftError(
                "`partition` column needs `client`, the column that names the client",
                kind="missing",
            )

    def _check_images(self) -> None:
        model = self.model_name
        if self.data == "celeba" and self.images is None:
            raise FedgftError(
                "`data` celeba: `images` must name the folder that holds img_align_celeba and its "
                "lists; its makers give CelebA out for research, we cannot",
                field="images",
                kind="missing",
            )
        if self.images is not None and self.data in (*SOURCES, "synthetic"):
            raise FedgftError(
                f"`images`: the data set '{self.data}' has none; `data` must be celeba, "
                "or a table that names images in a column",
                kind="conflict",
            )
        for name in () if self.images else self.given(*IMAGE_OPTIONS):
            raise FedgftError(f"`{name}` is for images; `images` names their folder")
        for name in () if model == "resnet18" else self.given(*RESNET_OPTIONS):
            raise FedgftError(f"`{name}` is for `model` resnet18, and it is {model}")
        if self.weights is not None and not self.weights.is_file():
            raise FedgftError(f"`weights` {self.weights}: no such file", kind="file")
        if model == "resnet18" and self.images is None:
            raise FedgftError("`model` resnet18 is for images; `images` names their folder")
        if model != "resnet18" and self.images is not None:
            raise FedgftError(f"`model` {model} is for tables; images take resnet18")

    # Data

    def load(self, on_fetch: Progress, *, seed: int) -> Dataset:
        """Read the table, the images or the public data set. `seed` is for synthetic data."""
        if self.leave_out == ():
            raise FedgftError("`leave_out` needs columns", kind="missing")
        if self.data == "synthetic":
            for name in self.given(*COLUMN_ROLES, "leave_out"):
                raise FedgftError(f"`{name}`: the synthetic set has its own columns")
            return synthetic(seed=seed)
        roles = {name: getattr(self, name) for name in COLUMN_ROLES}
        if self.images is None:
            return load(self.data, **roles, leave_out=self.leave_out or (), on_progress=on_fetch)
        if self.leave_out:
            raise FedgftError("`leave_out` is for tables; images have pixels only")
        how = {
            "size": 64 if self.size is None else self.size,
            "crop": self.crop,
            "skip_bad": self.skip_bad,
            "cache": self.cache,
            "on_progress": on_fetch,
        }
        if self.data == "celeba":
            return self._load_celeba(self.images, how)
        for name in ("label", "group"):
            if roles[name] is None:
                raise FedgftError(
                    f"{self.data}: `{name}` must name a column of the table", kind="missing"
                )
        if self.valid is not None:
            raise FedgftError("`valid` is for CelebA; a table says train or test (`split`)")
        return load_images(self.images, self.data, image=self.image, **roles, **how)

    def _load_celeba(self, folder: Path, how: dict[str, Any]) -> Dataset:
        for name in self.given("split", "positive", "image"):
            raise FedgftError(f"`{name}`: the data set 'celeba' has its own")
        roles: dict[str, Any] = {**CELEBA_ROLES, **self.given("label", "group", "client")}
        return load_celeba(folder, **roles, valid=self.valid or "drop", **how)

    # Study

    def make_protocol(self) -> Protocol:
        """Return the protocol with the settings that were given in place of its own.

        A candidate that was given (`lr`, `lam`, `beta`, `target`) is the only one, so that nothing
        is chosen on inner splits; rounds that were given are not extended for fedgft-control.
        """
        protocol = get_protocol(self.protocol, images=self.images is not None, data=self.data)
        settings = self.given(*(_field_names(protocol.settings) & _field_names(self)))
        optimizer = self.given("weight_decay")
        if self.optimizer is not None:
            optimizer["rule"] = settings["optimizer"]
        settings["optimizer"] = replace(protocol.settings.optimizer, **optimizer)
        if self.fedbn:
            settings["norms"] = "local"
        given = self.given(*(_field_names(protocol) & _field_names(self)))
        given |= {name: (given[name],) for name in PROTOCOL_CANDIDATES if name in given}
        given["settings"] = replace(protocol.settings, **settings)
        given["control"] = "soft" if self.control == "scores" else "hard"
        if self.rounds is not None:
            given["round_factors"] = ()
        return replace(protocol, **given)

    def network(self) -> Any:
        """Return the model as `Study` takes it."""
        if self.model_name != "resnet18":
            return self.model_name
        weights = None if self.weights is None else str(expand_user(self.weights))
        return ResNet18(self.norm or "batch", self.stem or "imagenet", weights)

    def checkpoints(self, folder: Path | None) -> Checkpoints | None:
        """Return the store of checkpoints in the output folder; None if none are to be written."""
        usual = 1 if self.resume or self.images is not None else 0
        every = usual if self.checkpoint_every is None else self.checkpoint_every
        if self.resume and not every:
            raise FedgftError("`resume` goes with checkpoints, and `checkpoint_every` is 0")
        if folder is None and (self.resume or self.checkpoint_every):
            raise FedgftError("`resume` and `checkpoint_every` need `out`, a folder for them")
        if folder is None or not every:
            return None
        return Checkpoints(folder / "checkpoints", every, self.resume)

    def open(
        self,
        metrics: Sequence[Metric],
        alphas: Sequence[float],
        progress: "Bar",
        *,
        start: "FairModel | None" = None,
        checkpoints: Checkpoints | None = None,
    ) -> Study:
        """Read the data and return the study of it.

        Parameters
        ----------
        metrics, alphas
            With --exclude-empty, groups are left out that lack a row which one of the metrics
            needs, in a replicate of one of the concentrations.
        progress
            Shows what is fetched and trained.
        start
            A saved model to start from.
        checkpoints
            Where an interrupted run is kept.
        """
        dataset = self._note_weights(self.load(progress.fetch, seed=self.seed))
        on_progress = progress.advance
        study = self.study(dataset, on_progress, start=start, checkpoints=checkpoints)
        if not self.exclude_empty:
            return study
        empty = {
            group
            for alpha in alphas
            for federation in study.federations(alpha)
            for metric in metrics
            for group in empty_groups(federation, metric)
        }
        if not empty:
            return study
        remaining = without_groups(dataset, sorted(empty))
        if len(remaining.group_names) < 2:
            names = ", ".join(repr(dataset.group_names[g]) for g in sorted(empty))
            raise FedgftError(f"`exclude_empty` leaves out {names}: nothing is left to compare")
        return self.study(remaining, on_progress, start=start, checkpoints=checkpoints)

    def study(
        self,
        dataset: Dataset,
        on_progress: OnProgress,
        *,
        start: "FairModel | None" = None,
        checkpoints: Checkpoints | None = None,
    ) -> Study:
        """Return the study of a data set; the parameters are those of `open`."""
        if start is not None:
            self._check_start(start)
        kind = self.partition or ("dirichlet" if self.client is None else "column")
        clients = len(dataset.client_names) if kind == "column" else self.clients
        dataset, protocol = self._draw_available(dataset, self.make_protocol())
        protocol.settings.check_cohort(clients)
        return Study(
            dataset,
            protocol,
            range(self.seed, self.seed + self.replicates),
            clients=clients,
            kind=kind,
            model=self.network(),
            on_progress=on_progress,
            init=None if start is None else start.initial_parameters,
            checkpoints=checkpoints,
        )

    def _check_start(self, start: "FairModel") -> None:
        """Raise a `FedgftError` if a saved model is not of the kind that is to be trained."""
        if start.about["model"] != self.model_name:
            raise FedgftError(
                f"`init` {start.path}: holds a {start.about['model']} model, "
                f"and `model` is {self.model_name}"
            )
        layers = {}
        if self.model_name == "resnet18":
            layers = {"norm": self.norm or "batch", "stem": self.stem or "imagenet"}
        if start.about.get("network", {}) != layers:
            raise FedgftError(
                f"`init` {start.path}: its network has other layers; `norm` and `stem` must be its"
            )

    def _note_weights(self, dataset: Dataset) -> Dataset:
        """Check that a file of weights fits, and note which tensors it does not hold."""
        if self.weights is None:
            return dataset
        from fedgft.resnet import load_weights

        module = self.network().module(
            features=dataset.features.shape[1], classes=len(dataset.classes)
        )
        return replace(dataset, notes=(*dataset.notes, *load_weights(module, self.weights)))

    def _draw_available(self, dataset: Dataset, protocol: Protocol) -> tuple[Dataset, Protocol]:
        """Use all images, with a note, where there are fewer than the protocol draws.

        A number that was given stays: the study raises an error if it is too large.
        """
        if dataset.test is None or not protocol.own_test:
            return dataset, protocol
        notes = list(dataset.notes)
        drawn: dict[str, Any] = {}
        available = {
            "train_rows": ("training", int((~dataset.test).sum())),
            "test_rows": ("test", int(dataset.test.sum())),
        }
        for name, (title, rows) in available.items():
            if getattr(self, name) is None and (getattr(protocol, name) or 0) > rows:
                notes.append(f"{dataset.name}: all {rows:,} {title} images are used")
                drawn[name] = None
        return replace(dataset, notes=tuple(notes)), replace(protocol, **drawn)


def _field_names(record: Any) -> set[str]:
    return {field.name for field in fields(record)}


def check_methods(options: Options, methods: Sequence[str]) -> list[str]:
    """Return notes about options that none of the methods uses.

    Raises a `FedgftError` where ignoring the option would mislead: a target without
    fedgft-control, or `lam` with fedgft-control.
    """
    notes = []
    for name, users in METHODS_BY_OPTION.items():
        if getattr(options, name) is None or set(users) & set(methods):
            continue
        text = f"`{name}` is for {' and '.join(users)}, and the methods here are "
        text += ", ".join(methods)
        if name == "target" or (name == "lam" and "fedgft-control" in methods):
            raise FedgftError(text, kind="conflict")
        notes.append(text)
    return notes
