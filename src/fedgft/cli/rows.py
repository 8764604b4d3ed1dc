"""The options about the rows: where they are, what their columns mean, how many are drawn;
and what is kept of a run on its way."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedgft.cli.names import Flag, Some, Whole, headed
from fedgft.cli.pictures import PictureOptions
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from fedgft.data import Dataset, Progress
    from fedgft.experiments import Protocol
    from fedgft.experiments.checkpoints import Checkpoints

MOST_ROUNDS = 2**31 - 1  # between checkpoints: of rounds the engine takes no more
ROLES = ("label", "group", "client", "split", "positive")


@dataclass(frozen=True, kw_only=True)
@headed
class RowOptions(PictureOptions):
    data: str = "adult"
    "A name that `fedgft data list` shows, synthetic, or a CSV or Parquet file."
    label: str | None = None
    "The label's column; of celeba an attribute [default: Smiling]."
    group: str | None = None
    "The group's column, of celeba an attribute [default: Male]; several give intersections: a,b."
    exclude_empty: Annotated[bool, Flag] = False
    "Leave out groups that lack, in any replicate, a row the metric asks for; they still train."
    client: str | None = None
    "The client's column; it becomes the partition. Of celeba: identity."
    split: str | None = None
    "A column that says train or test."
    positive: str | None = None
    "Which of two label values is the positive one."
    leave_out: Annotated[tuple[str, ...] | None, Some] = None
    "Columns that are no features, such as identifiers, or the group itself [default: none]."
    train_rows: Whole | None = None
    "Draw so many training rows in each replicate [default: all; celeba: 10,000]."
    test_rows: Whole | None = None
    "Draw so many test rows in each replicate [default: all; celeba: 6,000]."
    checkpoint_every: Whole | None = None
    "Rounds between checkpoints in --out; 0: none [default: 1 for images, else 0]."
    resume: Annotated[bool, Flag] = False
    "Go on from the checkpoints that an interrupted run left in --out."

    def check_rows(self) -> None:
        """Numbers that cannot be."""
        for name in ("train_rows", "test_rows", "lanes"):
            if (value := getattr(self, name)) is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise FedgftError(f"{option} must be at least 1, got {value}")
        if self.checkpoint_every is not None and not 0 <= self.checkpoint_every <= MOST_ROUNDS:
            raise FedgftError(
                f"--checkpoint-every must lie between 0 and {MOST_ROUNDS:,}, got "
                f"{self.checkpoint_every}"
            )

    def load(self, on_fetch: "Progress", *, seed: int) -> "Dataset":
        from fedgft.data import load
        from fedgft.data.synthetic import synthetic

        if self.leave_out is not None and not self.leave_out:
            raise FedgftError("--leave-out needs columns")
        if self.data == "synthetic":
            for name in (*ROLES, "leave_out"):
                if getattr(self, name) is not None:
                    option = "--" + name.replace("_", "-")
                    raise FedgftError(f"{option}: the synthetic set has its own columns")
            return synthetic(seed=seed)
        if self.images is not None:
            if self.leave_out:
                raise FedgftError("--leave-out is for tables; of images the pixels are all")
            roles = {n: getattr(self, n) for n in ROLES}
            return self.load_pictures(self.data, roles, on_fetch)
        return load(self.data, label=self.label, group=self.group, client=self.client,
                    split=self.split, positive=self.positive, leave_out=self.leave_out or (),
                    on_progress=on_fetch)  # fmt: skip

    def fitted(self, dataset: "Dataset", protocol: "Protocol") -> tuple["Dataset", "Protocol"]:
        """Fewer images than the protocol draws are all taken, if nobody asked for a number."""
        if dataset.test is None or not protocol.own_test:
            return dataset, protocol
        train, test, notes = protocol.train_rows, protocol.test_rows, list(dataset.notes)
        there = int((~dataset.test).sum()), int(dataset.test.sum())
        if self.train_rows is None and (train or 0) > there[0]:
            notes.append(f"{dataset.name}: all {there[0]:,} training images are used")
            train = None
        if self.test_rows is None and (test or 0) > there[1]:
            notes.append(f"{dataset.name}: all {there[1]:,} test images are used")
            test = None
        fitting = replace(protocol, train_rows=train, test_rows=test)
        return replace(dataset, notes=tuple(notes)), fitting

    def checkpoints(self, folder: Path | None) -> "Checkpoints | None":
        """Where an interrupted run is kept."""
        from fedgft.experiments.checkpoints import Checkpoints

        usual = 1 if self.resume or self.images is not None else 0
        every = usual if self.checkpoint_every is None else self.checkpoint_every
        if self.resume and not every:
            raise FedgftError("--resume goes with checkpoints, and --checkpoint-every is 0")
        if folder is None and (self.resume or self.checkpoint_every):
            raise FedgftError("--resume and --checkpoint-every need --out, a folder for them")
        if folder is None or not every:
            return None
        return Checkpoints(folder / "checkpoints", every, self.resume)
