"""ResNet-18 (He et al., 2016) with the tensor names and initialization of torchvision.

Published weights can be loaded with `load_weights`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedgft.errors import FedgftError

NORM_GROUPS = 32  # groups of channels in GroupNorm
WIDTHS = (64, 64, 128, 256, 512)


class ResNet(nn.Module):
    """ResNet-18.

    Parameters
    ----------
    channels, classes
        Number of channels of the images, and number of classes of the label.
    norm
        "batch" or "group".
    stem
        "imagenet", or "small": no downsampling before the first block, for 32 x 32 pixels.
    """

    def __init__(self, *, channels: int, classes: int, norm: str, stem: str) -> None:
        super().__init__()
        make_norm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, NORM_GROUPS)
        large = stem == "imagenet"
        window = (7, 2, 3) if large else (3, 1, 1)  # size, stride, padding
        self.conv1 = nn.Conv2d(channels, 64, *window, bias=False)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        self.bn1 = make_norm(64)
        for i, (inputs, outputs) in enumerate(pairwise(WIDTHS), 1):
            blocks = (ResidualBlock(width, outputs, make_norm) for width in (inputs, outputs))
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Scores (rows, classes)."""
        x = self.maxpool(_conv_norm_relu(self.conv1, self.bn1, x))
        for i in range(4):
            x = self.get_submodule(f"layer{i + 1}")(x)
        x = torch.flatten(self.avgpool(x), 1)
        # Scores are summed over thousands of rows and need more digits than bfloat16 has.
        with torch.autocast(x.device.type, enabled=False):
            return self.fc(x.to(self.fc.weight.dtype))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = make_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = make_norm(outputs)
        self.downsample = None
        if inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, make_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = _conv_norm_relu(self.conv1, self.bn1, x)
        return _conv_norm_relu(self.conv2, self.bn2, x, shortcut)


def _conv_norm_relu(
    conv: nn.Conv2d, norm: nn.Module, x: Tensor, shortcut: Tensor | None = None
) -> Tensor:
    """relu(norm(conv(x)) + shortcut)."""
    if _can_fuse(norm, x):
        return _fused_conv_norm_relu(conv, norm, x, shortcut)
    x = norm(conv(x))
    return nn.functional.relu(x if shortcut is None else x + shortcut, inplace=True)


def _can_fuse(norm: nn.Module, x: Tensor) -> bool:
    """Return whether cuDNN can compute convolution, norm and ReLU in one pass over memory.

    It can where BatchNorm only scales and shifts, that is, outside training.
    """
    nvidia = x.is_cuda and torch.version.cuda is not None and torch.is_autocast_enabled("cuda")
    fixed = isinstance(norm, nn.BatchNorm2d) and not norm.training
    return nvidia and fixed and not torch.is_grad_enabled()


def _fused_conv_norm_relu(conv: Any, norm: Any, x: Tensor, shortcut: Tensor | None) -> Tensor:
    half = torch.get_autocast_dtype("cuda")
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = (conv.weight * scale.reshape(-1, 1, 1, 1)).to(half)
    shift = (norm.bias - norm.running_mean * scale).to(half)
    options = (shift, conv.stride, conv.padding, conv.dilation, conv.groups)
    if shortcut is None:
        return torch.cudnn_convolution_relu(x.to(half), weight, *options)
    return torch.cudnn_convolution_add_relu(x.to(half), weight, shortcut, 1.0, *options)


def load_weights(module: nn.Module, path: str | Path) -> list[str]:
    """Load the tensors of a file into the module; a head (fc) for other classes stays random.

    Returns one sentence per part that was not loaded.
    """
    given = read_weights(path)
    initial = module.state_dict()
    needed = {name for name, t in initial.items() if t.is_floating_point()}
    head = {
        n for n in ("fc.weight", "fc.bias") if n in given and given[n].shape != initial[n].shape
    }
    if missing := sorted(needed - set(given)):
        problem = f"has no tensor {missing[0]!r} ({len(missing)} are missing)"
        raise _weights_error(path, f"{problem}: not a ResNet-18 of this kind")
    if foreign := sorted(set(given) - set(initial)):
        problem = f"has a tensor {foreign[0]!r} that this network lacks"
        raise _weights_error(path, f"{problem}; `norm` must be that of the file")
    for name in sorted(needed - head):
        shape = tuple(initial[name].shape)
        if tuple(given[name].shape) != shape:
            problem = f"{name} has the shape {tuple(given[name].shape)}, and here it is {shape}"
            raise _weights_error(path, f"{problem}; `stem` and `norm` must be those of the file")
        given[name] = _check_tensor(path, name, given[name])
    module.load_state_dict({n: given[n] for n in needed - head}, strict=False)
    return [f"{path}: its head is for other classes, so fc starts at random"] if head else []


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file or a state dict that torch saved; nothing else is unpickled."""
    place = Path(path)
    if not place.is_file():
        raise _weights_error(path, "no such file")
    try:
        if place.suffix == ".safetensors":
            found = load_file(place)
        else:
            _check_unpacked_size(place)
            with warnings.catch_warnings(action="ignore"):  # they advise to turn off weights_only
                found = torch.load(place, map_location="cpu", weights_only=True)
    except Exception:  # the file is damaged; torch's messages suggest loading it unsafely
        problem = "neither a whole .safetensors file nor a plain state dict"
        reason = "anything else is not read, because it could run code"
        raise _weights_error(path, f"{problem}; {reason}") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise _weights_error(path, "not a plain state dict, of names and tensors alone")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def _weights_error(path: str | Path, problem: str) -> FedgftError:
    return FedgftError(f"`weights` {path}: {problem}", kind="file")


def _check_tensor(path: str | Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor in float32; raise if it is not dense or holds impossible numbers."""
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        raise _weights_error(path, f"{name} is not a plain tensor of floating-point numbers")
    tensor = tensor.float()
    if not torch.isfinite(tensor).all() or (name.endswith("running_var") and (tensor < 0).any()):
        raise _weights_error(path, f"{name} holds NaN, infinity or a negative variance")
    return tensor


def _check_unpacked_size(place: Path) -> None:
    """Refuse files that unpack to more than their size.

    torch does not compress its files. They also need no `bytearray`; a file that contains one is
    refused, because the reader would allocate it at any length.
    """
    with place.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(b"bytearray") >= 0:
            raise ValueError("other things than tensors")
    if is_zipfile(place):
        with ZipFile(place) as archive:
            if sum(member.file_size for member in archive.infolist()) > place.stat().st_size:
                raise ValueError("compressed")
