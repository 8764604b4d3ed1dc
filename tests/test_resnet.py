"""ResNet-18 equals torchvision's, name by name; published weights load, other files do not."""

import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedgft.errors import FedgftError
from fedgft.models import ResNet18, get_model, named_tensors
from fedgft.resnet import ResNet, load_weights

pytestmark = pytest.mark.slow


def net(classes: int = 2, norm: str = "batch", stem: str = "imagenet") -> ResNet:
    torch.manual_seed(5)
    return ResNet(channels=3, classes=classes, norm=norm, stem=stem)


def test_it_has_the_published_number_of_parameters() -> None:
    """11,689,512 with 1,000 classes, as torchvision's documentation has it; 20 BatchNorms."""
    module = net(1000)
    assert sum(p.numel() for p in module.parameters()) == 11_689_512
    assert len(named_tensors(module)) == 62 + 2 * 20
    names = set(module.state_dict())
    for name in (
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.conv1.weight",
        "layer2.0.downsample.0.weight",
        "layer2.0.downsample.1.bias",
        "layer4.1.bn2.weight",
        "fc.bias",
    ):
        assert name in names


def test_it_computes_what_torchvision_does() -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    for norm in (None, lambda width: torch.nn.GroupNorm(32, width)):
        theirs = torchvision.models.resnet18(num_classes=7, norm_layer=norm)
        ours = net(7, norm="batch" if norm is None else "group")
        assert set(theirs.state_dict()) == set(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(4, 3, 64, 64)
        for a, b in ((theirs.train(), ours.train()), (theirs.eval(), ours.eval())):
            torch.testing.assert_close(a(x), b(x))


def test_its_start_is_kaimings() -> None:
    """Normal with variance 2 / fan-out, drawn anew for every seed."""
    weight = net().layer3[0].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    one, two, again = (ResNet18().init(seed, features=3, classes=2) for seed in (1, 2, 1))
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(one, again)
    assert get_model("resnet18") == ResNet18()


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 64), ("small", 32)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_stems_and_norms(stem: str, norm: str, size: int) -> None:
    module = net(3, norm, stem)
    assert module(torch.randn(2, 3, size, size)).shape == (2, 3)
    assert module.maxpool(module.conv1(torch.zeros(1, 3, 32, 32))).shape[-1] == (
        8 if stem == "imagenet" else 32
    )
    assert any(torch.is_floating_point(b) for b in module.buffers()) == (norm == "batch")


def test_scores_have_all_digits_in_bf16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert net().eval()(torch.randn(2, 3, 32, 32)).dtype == torch.float32


@pytest.mark.parametrize("ending", ["safetensors", "pth", "nested.pth"])
def test_weights_are_the_start(tmp_path, ending: str) -> None:
    file = tmp_path / f"given.{ending}"
    given = net()
    if ending == "safetensors":
        save_file(given.state_dict(), file)
    else:
        held = given.state_dict()
        torch.save({"state_dict": held} if ending == "nested.pth" else held, file)
    start = ResNet18(weights=str(file)).init(99, features=3, classes=2)
    flat = np.concatenate(
        [t.detach().double().numpy().ravel() for t in named_tensors(given).values()]
    )
    np.testing.assert_array_equal(start, flat)


def test_batch_norm_is_no_start_for_group_norm(tmp_path) -> None:
    save_file(net().state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(FedgftError, match=r"norm must be that of the file"):
        load_weights(net(norm="group"), tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.to_sparse(),
        lambda t: t.to(torch.int32),
        lambda t: t.to(torch.complex64),
        lambda t: t.double() + 1e300,
    ],
)
def test_odd_tensors_are_refused(tmp_path, spoil) -> None:
    held = net().state_dict()
    held["layer1.0.conv1.weight"] = spoil(held["layer1.0.conv1.weight"])
    torch.save(held, tmp_path / "w.pth")
    with pytest.raises(FedgftError, match=r"layer1\.0\.conv1\.weight") as caught:
        load_weights(net(), tmp_path / "w.pth")
    assert (caught.value.field, caught.value.kind) == ("weights", "file")
    held = net().state_dict()
    held["bn1.running_var"] -= 5.0
    torch.save(held, tmp_path / "w.pth")
    with pytest.raises(FedgftError, match="running_var"):
        load_weights(net(), tmp_path / "w.pth")


def test_a_head_for_other_classes_starts_at_random(tmp_path) -> None:
    save_file(net(1000).state_dict(), tmp_path / "w.safetensors")
    module = net(2)
    head = module.fc.weight.clone()
    (said,) = load_weights(module, tmp_path / "w.safetensors")
    assert "head" in said and torch.equal(module.fc.weight, head)
    assert torch.equal(module.layer4[1].conv2.weight, net(1000).layer4[1].conv2.weight)


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda file: None, "no such file"),
        (lambda file: file.write_bytes(b"nothing of the kind"), "neither a whole"),
        (lambda file: file.write_bytes(pickle.dumps(Trap(f"{file}.sprung"))), "neither"),
        (lambda file: torch.save(Trap(f"{file}.sprung"), file), "neither"),
        (lambda file: torch.save(net(), file), "neither"),  # a module, pickled
        (lambda file: torch.save([torch.zeros(1)], file), "not a plain state dict"),
        (lambda file: torch.save({"fc.weight": 3}, file), "not a plain state dict"),
        (lambda file: torch.save({"w": torch.zeros(3)}, file), "has no tensor"),
        (lambda file: torch.save(net(stem="small").state_dict(), file), "conv1.weight has the sh"),
        (lambda file: torch.save(net(norm="group").state_dict(), file), "has no tensor"),
        (
            lambda file: torch.save(
                {n: t * float("nan") for n, t in net().state_dict().items()}, file
            ),
            "holds NaN",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, make, said: str) -> None:
    file = tmp_path / "w.pth"
    make(file)
    with pytest.raises(FedgftError, match=said) as caught:
        ResNet18(weights=str(file)).init(0, features=3, classes=2)
    assert str(file) in str(caught.value)
    assert not os.path.exists(f"{file}.sprung")
