"""The options about images, networks and accelerators, which `Options` has beside its own."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedgft.cli.names import Flag, Place, Whole, headed
from fedgft.errors import FedgftError
from fedgft.files import expanded

if TYPE_CHECKING:
    from fedgft.data import Dataset, Progress
    from fedgft.experiments import Protocol
    from fedgft.experiments.checkpoints import Checkpoints

CELEBA = {"label": "Smiling", "group": "Male"}  # the paper's
FOR_IMAGES = ("size", "crop", "image", "skip_bad", "valid", "cache", "augment")
MOST_ROUNDS = 2**31 - 1  # between checkpoints: of rounds the engine takes no more
FOR_RESNET = ("norm", "stem", "weights", "fedbn")


@dataclass(frozen=True, kw_only=True)
@headed
class PictureOptions:
    images: Place | None = None
    "Folder of images: CelebA's with --data celeba, or those that a table names in a column."
    size: Whole | None = None
    "Images are resized to so many pixels a side, e.g. 64, 128 or 224 [default: 64]."
    crop: Whole | None = None
    "Side of the central square that is cut out first [default: the largest]."
    image: str | None = None
    "The table's column of file names [default: image, filename, file, path or image_id]."
    skip_bad: Annotated[bool, Flag] = False
    "Leave out images that are missing or cannot be read, and count them."
    valid: Literal["drop", "train", "test"] | None = None
    "Where CelebA's validation part goes [default: drop]."
    cache: Place | None = None
    "Folder that keeps decoded images [default: the user's cache folder]."
    augment: Literal["none", "flip"] | None = None
    "flip: mirror every other image at random while training [default: the protocol's]."
    norm: Literal["batch", "group"] | None = None
    "Normalising layers of resnet18 [default: batch]."
    stem: Literal["imagenet", "small"] | None = None
    "First layer of resnet18; small: for images of about 32 pixels [default: imagenet]."
    weights: Place | None = None
    "Start resnet18 from a .safetensors file or a state dict that torch saved."
    fedbn: Annotated[bool, Flag] = False
    "Every client keeps its own BatchNorm [default: the weighted mean of all, like the rest]."
    train_rows: Whole | None = None
    "Draw so many training rows in each replicate [default: all; celeba: 10,000]."
    test_rows: Whole | None = None
    "Draw so many test rows in each replicate [default: all; celeba: 6,000]."
    lanes: Whole | None = None
    "Clients in flight on a GPU [default: as many as help and fit]."
    deterministic: Annotated[bool, Flag] = False
    "The same bits each time on a GPU, at some cost; on a CPU they are."
    checkpoint_every: Whole | None = None
    "Rounds between checkpoints in --out; 0: none [default: 1 for images, else 0]."
    resume: Annotated[bool, Flag] = False
    "Go on from the checkpoints that an interrupted run left in --out."

    def check_pictures(self, data: str, model: str) -> None:
        """What does not go together."""
        from fedgft.data import SOURCES

        option = lambda name: "--" + name.replace("_", "-")  # noqa: E731
        if data == "celeba" and self.images is None:
            raise FedgftError(
                "--data celeba: --images must name the folder that holds img_align_celeba and its "
                "lists; its makers give CelebA out for research, we cannot"
            )
        if self.images is not None and data in (*SOURCES, "synthetic"):
            raise FedgftError(f"--images: the data set '{data}' has none; --data must be celeba, "
                              "or a table that names images in a column")  # fmt: skip
        for name in FOR_IMAGES if self.images is None else ():
            if (value := getattr(self, name)) is not None and value is not False:
                raise FedgftError(f"{option(name)} is for images; --images names their folder")
        for name in FOR_RESNET if model != "resnet18" else ():
            if getattr(self, name) not in (None, False):
                raise FedgftError(f"{option(name)} is for --model resnet18, and it is {model}")
        if self.weights is not None and not expanded(self.weights).is_file():
            raise FedgftError(f"--weights {self.weights}: no such file")
        if model == "resnet18" and self.images is None:
            raise FedgftError("--model resnet18 is for images; --images names their folder")
        if model in ("logistic", "mlp") and self.images is not None:
            raise FedgftError(f"--model {model} is for tables; images take resnet18")
        for name in ("train_rows", "test_rows", "lanes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise FedgftError(f"{option(name)} must be at least 1, got {value}")
        if self.checkpoint_every is not None and not 0 <= self.checkpoint_every <= MOST_ROUNDS:
            raise FedgftError(
                f"--checkpoint-every must lie between 0 and {MOST_ROUNDS:,}, got "
                f"{self.checkpoint_every}"
            )

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

    def load_pictures(self, data: str, roles: dict[str, Any], on_fetch: "Progress") -> "Dataset":
        """`roles`: label, group, client, split, positive."""
        from fedgft.data import load_celeba, load_images

        assert self.images is not None
        size = 64 if self.size is None else self.size
        how = {"size": size, "crop": self.crop, "skip_bad": self.skip_bad, "cache": self.cache,
               "on_progress": on_fetch}  # fmt: skip
        if data != "celeba":
            for name in ("label", "group"):
                if roles[name] is None:
                    raise FedgftError(f"{data}: --{name} must name a column of the table")
            if self.valid is not None:
                raise FedgftError("--valid is for CelebA; a table says train or test (--split)")
            return load_images(self.images, data, image=self.image, **roles, **how)
        for name in ("split", "positive"):
            if roles[name] is not None:
                raise FedgftError(f"--{name}: the data set 'celeba' has its own")
        if self.image is not None:
            raise FedgftError("--image: the data set 'celeba' has its own")
        named = {n: usual if roles[n] is None else roles[n] for n, usual in CELEBA.items()}
        valid = self.valid or "drop"
        return load_celeba(self.images, **named, client=roles["client"], valid=valid, **how)

    def weighed(self, dataset: "Dataset") -> "Dataset":
        """A file of weights that does not fit is seen here; what it does not give, is noted."""
        if self.weights is None:
            return dataset
        from fedgft.resnet import load_weights

        size = {"features": dataset.features.shape[1], "classes": len(dataset.classes)}
        said = load_weights(self.network("resnet18").module(**size), self.weights)
        return replace(dataset, notes=(*dataset.notes, *said))

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

    def shape(self, model: str) -> dict[str, str]:
        """What a saved network must have in common with this one."""
        if model != "resnet18":
            return {}
        return {"norm": self.norm or "batch", "stem": self.stem or "imagenet"}

    def network(self, model: str) -> Any:
        """The model, as `Study` takes it."""
        from fedgft.models import ResNet18

        if model != "resnet18":
            return model
        weights = None if self.weights is None else str(expanded(self.weights))
        return ResNet18(self.norm or "batch", self.stem or "imagenet", weights)
