"""Images on the command line, with drawn pictures."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedgft.data.dataset import PIXEL_MEAN
from fedgft.fair_model import load_model
from synthetic_images import write_celeba_folder
from test_cli import run

pytestmark = pytest.mark.slow

SMALL = (
    "--size",
    "16",
    "--train-rows",
    "60",
    "--test-rows",
    "24",
    "--clients",
    "3",
    "--alpha",
    "5",
    "--batch-size",
    "16",
    "--seeds",
    "1",
)


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return write_celeba_folder(tmp_path_factory.mktemp("faces") / "celeba", 120, 16)


def arguments(folder: Path, out: Path, *more: object) -> list[str]:
    held = ("--data", "celeba", "--images", folder, "--cache", folder / "cache", "--out", out)
    usual = zip(SMALL[::2], SMALL[1::2], strict=True)
    kept = [text for pair in usual if pair[0] not in more for text in pair]
    return [str(a) for a in (*held, *kept, *more)]


@pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
def test_three_rounds_of_celeba(capsys, tmp_path, faces) -> None:
    """The paper's third data set in small: ResNet-18 with BatchNorm, two methods side by side."""
    began = time.monotonic()
    code, out, err = run(
        capsys,
        "compare",
        *arguments(faces, tmp_path / "out", "--rounds", 3, "--json"),
        "--methods",
        "fedavg",
        "fedgft",
    )
    assert code == 0, err
    rows = json.loads(out)
    assert [row["method"] for row in rows] == ["fedavg", "fedgft"]
    for row in rows:
        assert (row["data"], row["executor"]) == ("celeba", "sequential")
        assert 0 <= row["accuracy"] <= 1 and 0 <= row["gap_soft"] <= 1
    assert rows[0]["gap_soft"] != rows[1]["gap_soft"]
    assert "validation part" in err
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert time.monotonic() - began < 60


def test_an_own_folder_with_a_table(capsys, tmp_path, faces) -> None:
    """Three classes, several groups, clients and a split, all from a CSV."""
    lines = ["file,mood,sex,age,site,part"]
    for i in range(120):
        lines.append(
            f"{i + 1:06d}.jpg,{'abc'[i % 3]},{'fm'[i // 3 % 2]},{'oy'[i // 6 % 2]},s{i % 2},"
            f"{'test' if i % 5 == 0 else 'train'}"
        )
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    code, out, err = run(
        capsys,
        "train",
        "--data",
        tmp_path / "people.csv",
        "--images",
        faces / "img_align_celeba",
        "--cache",
        tmp_path,
        "--label",
        "mood",
        "--group",
        "sex,age",
        "--client",
        "site",
        "--split",
        "part",
        "--size",
        16,
        "--rounds",
        1,
        "--method",
        "fedgft",
        "--norm",
        "group",
        "--stem",
        "small",
        "--seeds",
        1,
        "--batch-size",
        32,
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)
    assert [c["client"] for c in found["clients"]] == ["s0", "s1"]
    saved = load_model(tmp_path / "out" / "model.safetensors")
    assert saved.about["classes"] == ["a", "b", "c"] and len(saved.about["groups"]) == 4
    assert saved.about["network"] == {"norm": "group", "stem": "small"}
    assert saved.tensors["fc.weight"].shape == (3, 512)
    code, _, err = run(
        capsys, "predict", tmp_path / "out" / "model.safetensors", tmp_path / "people.csv"
    )
    assert code == 2 and "model for images" in err


@pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
def test_a_killed_run_is_resumed_to_the_same_bytes(capsys, tmp_path, faces) -> None:
    command = ["train", *arguments(faces, tmp_path / "whole", "--rounds", 4, "--method", "fedgft")]
    code, _, err = run(capsys, *command)
    assert code == 0, err
    killed = [str(tmp_path / "killed") if a == str(tmp_path / "whole") else a for a in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedgft", *killed],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    kept = tmp_path / "killed" / "checkpoints"
    while not list(kept.glob("*.safetensors")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    code, _, err = run(capsys, *killed)
    assert code == 2 and "--resume goes on" in err
    code, _, err = run(capsys, *killed, "--lr", "0.5", "--resume")
    assert code == 2 and "of other options" in err and list(kept.glob("*.safetensors"))
    code, _, err = run(capsys, *killed, "--resume")
    assert code == 0, err
    one, two = (tmp_path / name / "model.safetensors" for name in ("whole", "killed"))
    assert one.read_bytes() == two.read_bytes()
    assert not kept.exists()
    code, _, err = run(capsys, *killed, "--resume")
    assert code == 2 and "no checkpoints" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--label", "Smilin"), "Smiling"),
        (("--group", "Mail"), "Male"),
        (("--label", "Male"), "Male"),
        (("--client", "family"), "identity"),
        (("--train-rows", "61000"), "--train-rows must lie between 1 and"),
        (("--test-rows", "0"), "--test-rows must be at least 1"),
        (("--size", "4"), "--size"),
        (("--split", "part"), "--split: the data set 'celeba' has its own"),
        (("--model", "mlp"), "--model mlp is for tables"),
        (("--weights", "none.pth"), "none.pth"),
        (("--norm", "group", "--fedbn"), "no BatchNorm"),
        (("--device", "cuda"), "--device cuda"),
        (("--device", "tpu"), "choose cpu, cuda"),
        (("--executor", "stacked"), "--executor stacked cannot take this"),
        (("--lanes", "0"), "--lanes must be at least 1"),
        (("--checkpoint-every", "-1"), "--checkpoint-every must be at least 0"),
        (("--resume",), "no checkpoints"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(capsys, tmp_path, faces, more, said: str) -> None:
    if more == ("--device", "cuda"):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    given = arguments(faces, tmp_path / "new", "--rounds", 1, "--method", "fedavg", *more)
    code, out, err = run(capsys, "train", *given)
    assert code == 2 and out == "" and said in err, err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--data", "celeba"), "--images must name the folder"),
        (("--data", "adult", "--images", "x"), "has none"),
        (("--data", "adult", "--size", "64"), "--size is for images"),
        (("--data", "adult", "--model", "resnet18"), "--model resnet18 is for images"),
        (("--data", "adult", "--norm", "group"), "--norm is for --model resnet18"),
        (("--data", "adult", "--augment", "flip"), "--augment is for images"),
        (("--data", "synthetic", "--checkpoint-every", "1", "--images", "x"), "has none"),
    ],
)
def test_options_that_do_not_go_together(capsys, tmp_path, given, said: str) -> None:
    code, out, err = run(capsys, "train", *given, "--out", tmp_path / "new")
    assert code == 2 and out == "" and said in err, err
    assert not (tmp_path / "new").exists()


def test_the_paper_protocol_draws_from_all_images(faces) -> None:
    """Held out, people are apart by the official partition; in the paper pictures are drawn from
    all, and so are the same in neither replicate."""
    from fedgft.data import load_celeba
    from fedgft.study import Study, get_protocol

    data = load_celeba(faces, size=16, cache=faces / "cache", valid="test")
    for name in ("heldout", "paper"):
        base = get_protocol(name, images=True, data="celeba")
        drawn = replace(base, train_rows=50, test_rows=20)
        one, two = Study(data, drawn, range(2), model="resnet18", clients=3).federations(5.0)
        assert (len(one.rows), len(one.test)) == (50, 20)
        assert not set(one.rows) & set(one.test)
        assert set(one.rows) != set(two.rows) and set(one.test) != set(two.test)
        apart = data.test[one.test].all() and not data.test[one.rows].any()
        assert apart == (name == "heldout")
        np.testing.assert_allclose(one.mean, 255 * PIXEL_MEAN)


def test_what_a_file_says_does_not_reach_the_terminal(capsys, tmp_path, faces) -> None:
    rows = "\n".join(f"\x1b[31mevil{i}.png,{i % 2},{i // 2 % 2}" for i in range(8))
    (tmp_path / "bad.csv").write_text("image,y,g\n" + rows + "\n")
    code, _, err = run(
        capsys,
        "train",
        "--data",
        tmp_path / "bad.csv",
        "--images",
        faces,
        "--label",
        "y",
        "--group",
        "g",
        "--out",
        tmp_path / "new",
    )
    assert code == 2 and "evil" in err and "\x1b" not in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("data", ["adult-hours", "compas", "synthetic"])
def test_a_data_set_without_images_has_none(capsys, tmp_path, data: str) -> None:
    code, _, err = run(capsys, "train", "--data", data, "--images", tmp_path, "--out", tmp_path)
    assert code == 2 and f"--images: the data set '{data}' has none" in " ".join(err.split())
