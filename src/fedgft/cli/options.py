"""The options that `train`, `compare` and `frontier` share, and the study they ask for."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

from fedgft.cli.names import SERVERS, BaseName, Whole, check_seeds, headed
from fedgft.cli.rows import RowOptions
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedgft.cli.progress import Bar
    from fedgft.data import Dataset
    from fedgft.experiments import Protocol, Study
    from fedgft.experiments.checkpoints import Checkpoints
    from fedgft.experiments.study import OnProgress
    from fedgft.metrics import Metric
    from fedgft.saved import SavedModel


SIMPLE = ("spread", "pick", "base", "mu", "server_lr", "train_rows", "test_rows")
MOST = 1e6  # of any number here: what is larger is a slip of the pen


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@headed
class Options(RowOptions):
    protocol: Literal["heldout", "paper"] = "heldout"
    "heldout: disjoint test rows, what to trust. paper: as the published numbers were made."
    seeds: Whole | None = None
    "Replicates; they run side by side [default: 20; 3 for images]."
    seed: Whole = 0
    "The first replicate's seed; the others follow."
    clients: Whole = 10
    "Number of clients."
    partition: Literal["dirichlet", "iid", "pure", "column"] | None = None
    "How rows are dealt to clients [default: dirichlet; column where --client is given]."
    model: Literal["logistic", "mlp", "resnet18"] | None = None
    "The model [default: logistic; resnet18 for images]."
    lam: float | None = None
    "Strength of fedgft and lft [default: the protocol's]."
    beta: float | None = None
    "Strength of fairfed [default: the protocol's]."
    fairfed: Literal["subtract", "authors", "exp"] | None = None
    "FairFed as published, as the authors coded it, as the paper has it [default: the protocol's]."
    penalty: Literal["l1", "l2", "half"] | None = None
    "J(F): x, x^2 or x^2/2 [default: half]."
    spread: Literal["range", "deviation", "variance"] | None = None
    "F of fedgft and lft: range, distance from the overall rate, squares [default: range]."
    target: float | None = None
    "Largest gap that fedgft-control is to leave, as a fraction: 0.02 is two points [default: 0]."
    control: Literal["decisions", "scores"] | None = None
    "Which gap fedgft-control measures against the target [default: decisions]."
    pick: float | None = None
    "fedgft-control picks its model from this share of the rounds, the last [default: 0.6]."
    base: BaseName | None = None
    "The federated algorithm that the methods stand on [default: fedavg]."
    mu: float | None = None
    "Strength of the proximal term [default: 0.1 with --base fedprox, else 0]."
    server_lr: float | None = None
    "Learning rate of the server, for --base fedavgm, fedadam, fedyogi and fedadagrad."
    lr: float | None = None
    "Local learning rate [default: chosen, or the protocol's]."
    rounds: Whole | None = None
    "Communication rounds [default: the protocol's, and more where fedgft-control needs them]."
    epochs: Whole | None = None
    "Local epochs a round [default: 1]."
    batch_size: Whole | None = None
    "Rows in a local batch [default: 256; 64 for images]."
    steps: Whole | None = None
    "Local steps an epoch at most [default: all rows are read]."
    optimizer: Literal["adam", "adamw", "sgd", "momentum"] | None = None
    "Local optimiser [default: adam]."
    state: Literal["keep", "reset", "reset-first", "shared"] | None = None
    "What a local optimiser keeps of the last round; shared: the mean v [default: the protocol's]."
    schedule: Literal["constant", "cosine", "step", "inverse-sqrt", "inverse"] | None = None
    "How the learning rate falls over the rounds [default: the protocol's]."
    weight_decay: float | None = None
    "Weight decay of the local optimiser [default: 0]."
    cohort: Whole | None = None
    "Clients that take part in a round [default: all]."
    sampling: Literal["size", "uniform"] | None = None
    "size: drawn with probability n_k/n, with replacement. uniform: without [default: uniform]."
    noise: float | None = None
    "Noise (sd) on the counts by label, group and decision that clients send [default: 0]."
    eval_every: Whole | None = None
    "Measure every so many rounds; 0: at the start and the end [default: 1]."
    executor: Literal["auto", "fused", "stacked", "sequential"] | None = None
    "Which part of the simulator computes it [default: auto]."
    device: str | None = None
    "cpu, cuda, or several GPUs: cuda:0,cuda:1 [default: cpu]."
    precision: Literal["fp32", "fp64", "bf16"] | None = None
    "Of numbers; bf16 is for products on a GPU, what is kept stays float32 [default: fp32]."
    threads: Whole | None = None
    "CPU threads; results do not depend on them [default: 2]."

    @property
    def replicates(self) -> int:
        return (20 if self.images is None else 3) if self.seeds is None else self.seeds

    @property
    def network_name(self) -> str:
        return self.model or ("logistic" if self.images is None else "resnet18")

    def settled(self) -> "Protocol":
        """The protocol with what the user set himself."""
        from fedgft.experiments import get_protocol

        pictures = self.images is not None
        protocol = get_protocol(self.protocol, images=pictures, data=self.data)
        names = {f.name for f in fields(protocol.settings)}
        given = {n: getattr(self, n) for n in names & {f.name for f in fields(self)}}
        given = {n: v for n, v in given.items() if v is not None and n != "optimizer"}
        given = {n: v for n, v in given.items() if v is not False}
        given |= {"norms": "local"} if self.fedbn else {}
        optimizer = protocol.settings.optimizer
        if self.optimizer is not None:
            optimizer = replace(optimizer, rule=self.optimizer)
        if self.weight_decay is not None:
            optimizer = replace(optimizer, weight_decay=self.weight_decay)
        settings = replace(protocol.settings, optimizer=optimizer, **given)
        return replace(
            protocol,
            settings=settings,
            penalty=self.penalty or protocol.penalty,
            fairfed=self.fairfed or protocol.fairfed,
            lr=protocol.lr if self.lr is None else (self.lr,),
            lam=protocol.lam if self.lam is None else (self.lam,),
            beta=protocol.beta if self.beta is None else (self.beta,),
            target=protocol.target if self.target is None else (self.target,),
            control="soft" if self.control == "scores" else "hard",
            round_factors=protocol.round_factors if self.rounds is None else (),
            **{n: v for n in SIMPLE if (v := getattr(self, n)) is not None},
        )  # fmt: skip

    def check(self) -> None:
        """What can be seen to be wrong before any data is read."""
        check_seeds(self.replicates)
        if not 0 <= self.seed < 2**63 - self.replicates:
            raise FedgftError(f"--seed must lie between 0 and 2^63, got {self.seed}")
        self.check_pictures(self.data, self.network_name)
        self.check_rows()
        if self.cohort is not None and self.client is None:
            self.settled().settings.check_cohort(self.clients)
        if self.device not in (None, "cpu"):
            from fedgft.engine.torch_choice import check_devices

            check_devices(self.settled().settings)
        for name in ("lam", "beta", "mu", "noise", "lr", "server_lr", "weight_decay"):
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and not 0 <= value <= MOST:
                raise FedgftError(f"{option} must lie between 0 and {MOST:,.0f}, got {value:g}")
        if self.pick and (self.cohort is not None or self.noise):
            raise FedgftError("--pick needs exact sums of everybody: not with --cohort or --noise")
        if self.target is not None and not 0 <= self.target < 1:
            raise FedgftError(
                f"--target must be at least 0 and below 1, got {self.target:g}: "
                "it is a fraction, two points are 0.02"
            )
        if self.server_lr is not None and self.base not in SERVERS:
            raise FedgftError(f"--server-lr is for --base {', '.join(SERVERS)}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise FedgftError(f"--lr must be a positive number, got {self.lr:g}")
        if self.partition == "column" and self.client is None:
            raise FedgftError("--partition column needs --client, the column that names the client")
        from fedgft.metrics import get_metric

        method = self.settled().algorithm("fedgft-control", get_metric("sp"), self.target or 0.0)
        assert method.objective.penalties  # slots check what they are given

    def open(
        self,
        metrics: "Sequence[Metric]",
        alphas: "Sequence[float]",
        progress: "Bar",
        *,
        start: "SavedModel | None" = None,
        checkpoints: "Checkpoints | None" = None,
    ) -> "Study":
        """The data and the study; without its empty groups, if that was asked for."""
        from fedgft.experiments.checks import empty_groups, without_groups

        dataset = self.weighed(self.load(progress.fetch, seed=self.seed))
        study = self.study(dataset, progress.advance, start=start, checkpoints=checkpoints)
        if not self.exclude_empty:
            return study
        empty = {
            group
            for alpha in alphas for federation in study.federations(alpha) for metric in metrics
            for group in empty_groups(federation, metric)
        }  # fmt: skip
        if not empty:
            return study
        kept = without_groups(dataset, sorted(empty))
        if len(kept.group_names) < 2:
            names = ", ".join(repr(dataset.group_names[g]) for g in sorted(empty))
            raise FedgftError(f"--exclude-empty leaves out {names}: nothing is left to compare")
        return self.study(kept, progress.advance, start=start, checkpoints=checkpoints)

    def study(
        self, dataset: "Dataset", on_progress: "OnProgress", *, start: "SavedModel | None" = None,
        checkpoints: "Checkpoints | None" = None,
    ) -> "Study":  # fmt: skip
        from fedgft.experiments import Study

        if start is not None and start.about["model"] != self.network_name:
            raise FedgftError(
                f"--init {start.path}: holds a {start.about['model']} model, "
                f"and --model is {self.network_name}"
            )
        if start is not None and start.about.get("network", {}) != self.shape(self.network_name):
            raise FedgftError(
                f"--init {start.path}: its network has other layers; --norm and --stem must be its"
            )
        kind = self.partition or ("dirichlet" if self.client is None else "column")
        clients = len(dataset.client_names) if kind == "column" else self.clients
        dataset, protocol = self.fitted(dataset, self.settled())
        protocol.settings.check_cohort(clients)
        return Study(
            dataset, protocol, range(self.seed, self.seed + self.replicates), clients=clients,
            kind=kind, model=self.network(self.network_name), on_progress=on_progress,
            init=None if start is None else start.start, checkpoints=checkpoints,
        )  # fmt: skip
