"""The options about images, networks and accelerators, which `Options` has beside its own."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedgft.cli.names import Flag, Place, Whole, headed
from fedgft.errors import FedgftError
from fedgft.files import expanded

if TYPE_CHECKING:
    from fedgft.data import Dataset, Progress

CELEBA = {"label": "Smiling", "group": "Male"}  # the paper's
FOR_IMAGES = ("size", "crop", "image", "skip_bad", "valid", "cache", "augment")
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
    lanes: Whole | None = None
    "Clients in flight on a GPU [default: as many as help and fit]."
    deterministic: Annotated[bool, Flag] = False
    "The same bits each time on a GPU, at some cost; on a CPU they are."

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
