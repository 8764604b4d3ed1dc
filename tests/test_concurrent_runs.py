"""Two simultaneous runs on one folder or file, and runs that are killed while they write."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedgft.engine.state import Snapshot
from fedgft.errors import FedgftError
from fedgft.fair_model import load_model
from fedgft.store import atomic_write, open_folder, stage_files
from fedgft.study.cache import Checkpoints
from test_cli import run
from test_file_system_faults import command, held, one_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
]


@pytest.mark.parametrize("name", ["train", "compare", "reproduce"])
def test_a_folder_that_another_run_writes_to(name, tmp_path, capsys):
    with open_folder(tmp_path / "out") as out:
        (out / "theirs").write_text("theirs")
        code, _, err = run(capsys, *command(name, Path(), out))
        assert code == 2 and "another run is writing there" in one_line(err)
        assert held(out) == {"theirs": b"theirs"}
    with open_folder(tmp_path / "out"):
        pass


def test_two_runs_on_one_folder(tmp_path):
    """One wins, and what is there is all its own."""
    given = [sys.executable, "-m", "fedgft", *command("train", Path(), tmp_path / "out")]
    both = [
        subprocess.Popen(
            [*given, "--seed", str(seed)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = [process.returncode for process in both]
    if sorted(codes) == [0, 2]:
        assert "another run is writing there" in one_line(said[codes.index(2)])
    else:  # the second began when the first was done
        assert codes == [0, 0], said
    seed = load_model(tmp_path / "out/model.safetensors").about["seed"]
    assert codes[seed - 1] == 0
    assert not list((tmp_path / "out").glob(".*"))


WRITER = """
import sys
from pathlib import Path
from fedgft.store import atomic_write
for i in range(100):
    with atomic_write(Path(sys.argv[1])) as part:
        for _ in range(20):
            part.write((sys.argv[2] * 1000).encode())
            part.flush()
"""


def test_two_writers_of_the_same_file(tmp_path):
    """Whoever reads it sees all of one or all of the other."""
    file = tmp_path / "file"
    both = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), letter]) for letter in "ab"]
    seen = set()
    while any(process.poll() is None for process in both):
        if file.exists():
            seen.add(file.read_text())
    assert [process.returncode for process in both] == [0, 0]
    assert seen <= {"a" * 20_000, "b" * 20_000} and os.listdir(tmp_path) == ["file"]


def test_a_failed_stage_changes_no_files(tmp_path):
    (tmp_path / "one").write_text("old")
    with (
        pytest.raises(FedgftError, match=f"^{tmp_path}/two: bad luck$"),
        stage_files(tmp_path) as place,
    ):
        with atomic_write(place / "one") as part:
            part.write(b"new")
        raise FedgftError(f"{place / 'two'}: bad luck")
    assert held(tmp_path) == {"one": b"old"}


KILLED = """
import os, signal, sys
import safetensors.numpy as library
from fedgft.cli import main
save, calls = library.save_file, []

def save_file(arrays, path, metadata=None):
    save(arrays, path, metadata)
    calls.append(path)
    if len(calls) == 2:  # as safetensors leaves it when it is killed on the way
        os.rename(path, os.path.join(os.path.dirname(path), ".tmpAbCdEf"))
        os.kill(os.getpid(), signal.SIGKILL)

library.save_file = save_file
main(sys.argv[1:])
"""


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_nothing_for_long(tmp_path, capsys):
    given = [*command("train", Path(), tmp_path / "out"), "--checkpoint-every", "1"]
    done = subprocess.run([sys.executable, "-c", KILLED, *given], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert any(name.endswith("/.tmpAbCdEf") for name in held(tmp_path / "out"))
    assert run(capsys, *given, "--resume")[0] == 0
    names = set(held(tmp_path / "out"))
    assert {"model.safetensors", "rows.parquet", "rounds.parquet", "run.json"} <= names
    assert not [name for name in names if ".tmp" in name or "checkpoints" in name]


def test_a_kill_while_checkpoints_are_cleared(tmp_path):
    """The one that --resume asks for first is the last to go."""
    kept = Checkpoints(tmp_path / "checkpoints")
    keys = [f"{i:032x}" for i in (2, 3, 1)]
    for key in keys:
        assert kept.get(key) is None
        kept.put(key, 1, lambda: Snapshot(1, {}, {"x": np.zeros(1)}))
    gone = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: gone.append(path.name))
        kept.clear()
    assert gone.index(f"{keys[0]}.safetensors") == 2


def test_only_the_checkpoints_of_this_run_are_cleared(tmp_path):
    """Runs may share their first simulation and go on differently: the other's work stays."""
    first, other, own = (f"{i:032x}" for i in (1, 2, 3))
    for resume, keys in ((False, (first, other)), (True, (first, own))):
        kept = Checkpoints(tmp_path / "checkpoints", resume=resume)
        for key in keys:
            kept.get(key)
            kept.put(key, 1, lambda: Snapshot(1, {}, {"x": np.zeros(1)}))
    kept.clear()
    assert [path.stem for path in kept.found()] == [other]
