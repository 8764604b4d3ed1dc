"""ResNet-18 (He et al., 2016), with the names and the start that torchvision gives its tensors, so
that published weights load."""

import warnings
from collections.abc import Callable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor, nn

from fedgft.errors import FedgftError

GROUPS = 32  # of channels, in GroupNorm


def _joined(conv: nn.Conv2d, norm: nn.Module, x: Tensor, around: Tensor | None = None) -> Tensor:
    """relu(norm(conv(x)) + around)."""
    if _still(norm, x):
        return _in_one(conv, norm, x, around)
    x = norm(conv(x))
    return nn.functional.relu(x if around is None else x + around, inplace=True)


def _still(norm: nn.Module, x: Tensor) -> bool:
    """Whether cuDNN may do it in one pass over memory: BatchNorm only scales and shifts."""
    nvidia = x.is_cuda and torch.version.cuda is not None and torch.is_autocast_enabled("cuda")
    fixed = isinstance(norm, nn.BatchNorm2d) and not norm.training
    return nvidia and fixed and not torch.is_grad_enabled()


def _in_one(conv: Any, norm: Any, x: Tensor, around: Tensor | None) -> Tensor:
    half = torch.get_autocast_dtype("cuda")
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = (conv.weight * scale.reshape(-1, 1, 1, 1)).to(half)
    shift = (norm.bias - norm.running_mean * scale).to(half)
    how = (shift, conv.stride, conv.padding, conv.dilation, conv.groups)
    if around is None:
        return torch.cudnn_convolution_relu(x.to(half), weight, *how)
    return torch.cudnn_convolution_add_relu(x.to(half), weight, around, 1.0, *how)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a way around them."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = None
        if inputs != outputs:
            around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(around, norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        return _joined(self.conv2, self.bn2, _joined(self.conv1, self.bn1, x), around)


class Net(nn.Module):
    def __init__(self, *, channels: int, classes: int, norm: str, stem: str) -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else lambda width: nn.GroupNorm(GROUPS, width)
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        else:  # a quarter of the pixels is too few to begin with where there are only 32 x 32
            self.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = make(64)
        widths = (64, 64, 128, 256, 512)
        for i in range(4):
            first = Block(widths[i], widths[i + 1], make)
            second = Block(widths[i + 1], widths[i + 1], make)
            setattr(self, f"layer{i + 1}", nn.Sequential(first, second))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(_joined(self.conv1, self.bn1, x))
        for i in range(4):
            x = self.get_submodule(f"layer{i + 1}")(x)
        x = torch.flatten(self.avgpool(x), 1)
        # Scores are summed over thousands of rows: they are worth more digits than bfloat16 has.
        with torch.autocast(x.device.type, enabled=False):
            return self.fc(x.to(self.fc.weight.dtype))


def load_weights(module: nn.Module, path: str | Path) -> list[str]:
    """Put a file's tensors into the module; a head (fc) for other classes stays as it is.

    Returns what was left out, one sentence each.
    """
    given, own = read_weights(path), module.state_dict()
    needed = {name for name, t in own.items() if t.is_floating_point()}
    head = {n for n in ("fc.weight", "fc.bias") if n in given and given[n].shape != own[n].shape}
    if missing := sorted(needed - set(given)):
        raise FedgftError(
            f"--weights {path}: has no tensor {missing[0]!r} ({len(missing)} are missing): "
            "not a ResNet-18 of this kind"
        )
    if foreign := sorted(set(given) - set(own)):
        raise FedgftError(
            f"--weights {path}: has a tensor {foreign[0]!r} that this network lacks; --norm must "
            "be that of the file"
        )
    for name in sorted(needed - head):
        if given[name].shape != own[name].shape:
            raise FedgftError(
                f"--weights {path}: {name} has the shape {tuple(given[name].shape)}, and here it "
                f"is {tuple(own[name].shape)}; --stem and --norm must be those of the file"
            )
        given[name] = _sound(given[name], f"--weights {path}: {name}")
    module.load_state_dict({n: given[n] for n in needed - head}, strict=False)
    return [f"{path}: its head is for other classes, so fc starts at random"] if head else []


def _sound(tensor: Tensor, what: str) -> Tensor:
    """In float32, as the network has it."""
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        raise FedgftError(f"{what} is no plain tensor of floating-point numbers")
    tensor = tensor.float()
    if not torch.isfinite(tensor).all() or (what.endswith("running_var") and (tensor < 0).any()):
        raise FedgftError(f"{what} holds numbers that cannot be")
    return tensor


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A safetensors file, or a state dict that torch saved; nothing else is ever unpickled."""
    place = Path(path)
    if not place.is_file():
        raise FedgftError(f"--weights {path}: no such file")
    try:
        if place.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(place)
        else:
            _check_size(place)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of how the file could be read after all
                found = torch.load(place, map_location="cpu", weights_only=True)
    except Exception:  # whatever the damage leads to; torch's words invite to run the file
        raise FedgftError(
            f"--weights {path}: neither a whole .safetensors file nor a plain state dict; anything "
            "else is not read, for it could run code"
        ) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise FedgftError(f"--weights {path}: not a plain state dict, of names and tensors alone")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def _check_size(place: Path) -> None:
    """What unfolds to more than the file is nothing that torch saved: it compresses nothing, and
    needs none of the few other classes that its reader would make, one of them of any length."""
    with place.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(b"bytearray") >= 0:
            raise ValueError("other things than tensors")
    if is_zipfile(place):
        with ZipFile(place) as archive:
            if sum(member.file_size for member in archive.infolist()) > place.stat().st_size:
                raise ValueError("compressed")
