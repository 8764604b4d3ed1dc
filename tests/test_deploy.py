"""A federation of real processes: TLS, authentication, faults, and a complete shutdown."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedgft.deploy.init import (
    copy_app,
    create_authority,
    create_federation,
    create_node_key,
    format_instructions,
    load_federation,
)
from fedgft.deploy.local_run import (
    LocalRunPlan,
    run_local,
    site_arguments,
    start_federation,
    submit_run,
    summarize_run,
    wait_for_run,
)
from fedgft.deploy.processes import Processes, flower_commands_folder, free_port, list_descendants
from fedgft.errors import FedgftError
from fedgft.store import open_folder

pytestmark = pytest.mark.slow

LIMIT = 300.0  # seconds for any run here; the usual one takes a sixth of that
FEDGFT = [sys.executable, "-m", "fedgft"]


def left_behind(folder: Path) -> list[str]:
    """Processes that still work in or for this folder."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd", "status"]):
        about = process.info
        text = " ".join([*(about["cmdline"] or []), about["cwd"] or ""])
        if str(folder) in text and about["status"] != psutil.STATUS_ZOMBIE:
            found.append(text)
    return found


# Keys and folders


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    made = create_federation(
        tmp_path / "f",
        sites=("north", "south"),
        host="fair.example.org",
        port=9093,
        aliases=("10.0.0.7",),
        make_keys=True,
    )
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)  # noqa: E731
    secret = [made.path / "ca.key", made.path / "server.tls"]
    secret += [made.nodes / f"{site}.key" for site in ("north", "south")]
    assert all(mode(path) == 0o600 for path in secret)
    assert mode(made.path) == mode(made.nodes) == 0o700
    text = format_instructions(made)
    for path in secret:
        body = path.read_text().splitlines()[1]
        assert body not in text
    with pytest.raises(FedgftError, match="not written over"):
        create_federation(
            tmp_path / "f", sites=("north",), host="127.0.0.1", port=1, make_keys=True
        )
    with pytest.raises(FedgftError, match="not written over"):
        create_node_key(made.nodes, "north")


def test_sites_make_their_own_keys(tmp_path: Path, monkeypatch, capsys) -> None:
    """The server never has a private key: it is given the public half, and says its fingerprint."""
    from fedgft.cli import main

    monkeypatch.chdir(tmp_path)
    said = {}
    for site in ("north", "south"):
        main(["deploy", "keys", site, "--out", site])
        said[site] = capsys.readouterr().out
        assert stat.S_IMODE((tmp_path / site / f"{site}.key").stat().st_mode) == 0o600
    given = [f"{site}={site}/{site}.pub" for site in said]
    main(["deploy", "init", "f", "--sites", *given, "--host", "fair.example.org"])
    printed = capsys.readouterr().out
    made = load_federation(tmp_path / "f")
    assert made.sites() == ("north", "south") and made.address == "fair.example.org:9093"
    assert [path.name for path in sorted(made.nodes.iterdir())] == ["north.pub", "south.pub"]
    held = [path.read_bytes() for path in made.path.rglob("*") if path.is_file()]
    for site, text in said.items():
        secret = (tmp_path / site / f"{site}.key").read_bytes().splitlines()[2]
        assert not any(secret in content for content in held)
        mark = re.search(r"SHA256:\S+", text)
        assert mark and mark[0] in printed
    if shutil.which("ssh-keygen"):
        command = ["ssh-keygen", "-l", "-f", "north/north.pub"]
        theirs = subprocess.run(command, capture_output=True, text=True, check=True)
        assert theirs.stdout.split()[1] in said["north"]


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        (["north"], "fedgft deploy keys north"),
        (["north=absent.pub"], "absent.pub: cannot be read"),
        (["north=bad.pub"], "bad.pub: not the public key of a site"),
        (["north=rsa.pub"], "rsa.pub: not the public key of a site"),
        (["north=a.key"], "a.key: not the public key of a site"),
        (["north=a.pub", "south=a.pub"], "the same key as that of site 'north'"),
        (["=a.pub"], "names files"),
    ],
)
def test_bad_public_keys_are_refused(sites, says, tmp_path: Path, monkeypatch, capsys) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import rsa

    from fedgft.cli import main

    monkeypatch.chdir(tmp_path)
    create_node_key(tmp_path, "a")
    (tmp_path / "bad.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    key = rsa.generate_private_key(65537, 2048).public_key()
    (tmp_path / "rsa.pub").write_bytes(
        key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    )
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "init", "f", "--sites", *sites, "--host", "h"])
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "f").exists() or not any((tmp_path / "f").iterdir())


def test_a_folder_that_is_no_federation(tmp_path: Path) -> None:
    with pytest.raises(FedgftError, match="deploy init makes"):
        load_federation(tmp_path)
    for text in ("{}", "[", '{"host": "a b", "port": 1, "inner": 2}'):
        (tmp_path / "federation.json").write_text(text)
        with pytest.raises(FedgftError):
            load_federation(tmp_path)


def test_the_certificate_names_every_address(tmp_path: Path) -> None:
    from cryptography import x509

    made = create_federation(
        tmp_path / "f",
        sites=("a",),
        host="fair.example.org",
        port=1,
        aliases=("10.0.0.7", "::1"),
        make_keys=True,
    )
    found = x509.load_pem_x509_certificate((made.path / "server.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fair.example.org", "localhost"]
    addresses = [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.0.0.7", "::1", "127.0.0.1"]
    authority_ = x509.load_pem_x509_certificate((made.path / "ca.crt").read_bytes())
    found.verify_directly_issued_by(authority_)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"sites": ()}, "name 1 to"),
        ({"sites": ("a", "A")}, "same name"),
        ({"sites": ("../x",)}, "names files"),
        ({"sites": ("a b",)}, "names files"),
        ({"sites": ("-rf",)}, "names files"),
        ({"host": "a b"}, "neither an address"),
        ({"host": "x; rm -rf"}, "neither an address"),
        ({"host": "h:9093"}, "without a port"),
        ({"host": "https://h"}, "without a port"),
        ({"host": "1.2.3.999"}, "neither an address"),
        ({"host": "a..b"}, "neither an address"),
        ({"aliases": ("bücher.de",)}, "neither an address"),
        ({"port": 0}, "between 1 and 65535"),
    ],
)
def test_bad_names_are_refused(how: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(FedgftError, match=says):
        held = {"sites": ("a",), "host": "h", "port": 1, "make_keys": True}
        create_federation(tmp_path / "f", **(held | how))
    assert not (tmp_path / "f").exists() or not any((tmp_path / "f").iterdir())


def test_the_commands_can_be_copied(tmp_path: Path) -> None:
    """Every line of them is a comment, nothing, or a command whose options its program knows; and
    none opens the engine to other hosts."""
    made = create_federation(
        tmp_path / "f", sites=("north", "south"), host="h.example.org", port=9093, make_keys=True
    )
    text = format_instructions(made)

    def help_of(*command: str) -> str:
        told = [*command, "--help"]
        return subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout

    seen = set()
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in ("cd", "export"):
            start, command = {
                "fedgft": (3, [*FEDGFT, *words[1:3]]),
                "flwr": (2, [f"{flower_commands_folder()}flwr", words[1]]),
            }[words[0]]
            known = help_of(*command)
            options = [word for word in words[start:] if word.startswith("--")]
            assert all(option in known for option in options), line
            seen.add(tuple(words[:start]))
    assert seen == {("fedgft", "deploy", "server"), ("fedgft", "deploy", "site"), ("flwr", "run")}
    known = help_of(f"{flower_commands_folder()}flower-superlink")
    arguments = made.superlink_command()
    assert all(word in known for word in arguments if word.startswith("--"))
    told = dict(pairwise(arguments))
    assert told["--host"] == "127.0.0.1" and told["--database"].endswith("state.db")
    assert (
        told["--port"] == "9094"
        and 'address = "127.0.0.1:9094"' in (made.engine / "config.toml").read_text()
    )
    assert "0.0.0.0" not in text


def test_flower_prints_no_colors_that_its_caller_would_have_to_read(tmp_path, monkeypatch):
    """Jupyter sets FORCE_COLOR, and `flwr run` would color the JSON that `deploy local` reads."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    processes = Processes(tmp_path, tmp_path / "home", tmp_path / "logs")
    assert not {"FORCE_COLOR", "CLICOLOR_FORCE"} & processes.environment.keys()


def test_the_app_builds(tmp_path: Path) -> None:
    """The one that ships is the example in the repository; Flower makes a bundle of it."""
    copy_app(tmp_path / "app")
    example = Path(__file__).parents[1] / "examples" / "flower"
    for path in example.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (tmp_path / "app" / path.relative_to(example)).read_bytes() == path.read_bytes()
    processes = Processes(tmp_path, tmp_path / "home", tmp_path / "logs")
    processes.run(f"{flower_commands_folder()}flwr", "build", "--app", str(tmp_path / "app"))
    assert list(tmp_path.rglob("*.fab"))


def test_every_setting_of_the_app_is_used_and_there() -> None:
    """A key that the code reads and the app lacks would only be missed in a run."""
    import re
    import tomllib

    root = Path(__file__).parents[1]
    config = tomllib.loads((root / "examples/flower/pyproject.toml").read_text())
    known = set(config["tool"]["flwr"]["app"]["config"])
    sources = [
        root / "src/fedgft/flower/client_app.py",
        root / "src/fedgft/flower/server_app.py",
        root / "src/fedgft/flower/rule_fitting.py",
        root / "examples/flower/fairapp/server_app.py",
    ]
    text = "\n".join(path.read_text() for path in sources)
    read = set(re.findall(r'(?<!node_)config(?:\.get\(|\[)"([a-z-]+)"', text))
    from fedgft.flower.server_app import FOREST_SETTINGS, TRAINING_SETTINGS, TREE_SETTINGS

    assert read <= known, read - known
    settings = {*TRAINING_SETTINGS, *TREE_SETTINGS, *FOREST_SETTINGS}
    quoted = set(re.findall(r'"([a-z-]+)"', text)) | settings
    assert known <= quoted, known - quoted


# Processes


def test_processes_end_with_their_children(tmp_path: Path) -> None:
    """Also those that do not listen, and those that went into a session of their own."""
    deaf = (
        "import signal,subprocess,sys,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);"
        "subprocess.Popen([sys.executable,'-c','import time;time.sleep(99)'],"
        "start_new_session=True);time.sleep(99)"
    )
    processes = Processes(tmp_path, tmp_path / "home", tmp_path / "logs")
    processes.start("deaf", [sys.executable, "-c", deaf])
    pid = processes.running["deaf"].pid
    deadline = time.monotonic() + 30
    while len(list_descendants(pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = list_descendants(pid)
    assert len(family) == 2 and processes.is_alive("deaf")
    processes.stop()
    gone = lambda p: not psutil.pid_exists(p) or psutil.Process(p).status() == "zombie"  # noqa: E731
    assert all(gone(p) for p in family)


def test_a_process_that_ends_at_once_says_why(tmp_path: Path) -> None:
    with Processes(tmp_path, tmp_path / "home", tmp_path / "logs") as processes:
        processes.start("x", [sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"])
        with pytest.raises(FedgftError, match="x ended at once: no such thing"):
            processes.wait_for_port("x", free_port())


def test_a_killed_parent_takes_its_processes_along(tmp_path: Path) -> None:
    """Linux ends them for us."""
    code = (
        "import sys, time; from pathlib import Path;"
        "from fedgft.deploy.processes import Processes;"
        "here = Path(sys.argv[1]); p = Processes(here, here / 'home', here / 'logs');"
        "p.start('x', [sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(p.running['x'].pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_one_run_per_folder(tmp_path: Path) -> None:
    plan = LocalRunPlan(("north",), ((),), {}, tmp_path / "out")
    busy = pytest.raises(FedgftError, match="another run is writing there")
    with open_folder(plan.out), busy:
        run_local(plan, lambda row: None, lambda text: None)
    assert list(plan.out.iterdir()) == []


def test_a_port_in_use_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FedgftError, match=f"port {port}: cannot be used"):
            free_port(port)


# The command line's own checks, before any process is started


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sites", "0"], "--sites"),
        (["--sites", "1000"], "--sites"),
        (["--rounds", "0"], "--rounds"),
        (["--data", "nonsense"], "--data nonsense"),
        (["--data", "a.csv"], "no such file"),
        (["--data", "adult", "compas"], "a file for every site"),
        (["--metric", "x"], "--metric"),
        (["--target", "2"], "--target"),
        (["--target", "0.1", "--lam", "1"], "choose one"),
        (["--lam", "-3"], "--lam"),
        (["--base", "fednice"], "fedavgm"),
        (["--strategy", "FedNice"], "--base"),
        (["--method", "fedgft"], "--method fedgft needs --target, or --lam"),
        (["--target", "0.1", "--method", "fairfed"], "--target is for --method fedgft-control"),
        (["--channel", "post"], "--channel"),
        (["--method", "magic"], "--method"),
        (["--epsilon", "-1"], "--epsilon must be above 0"),
        (["--epsilon", "1", "--method", "fairfed"], "every client's own sums"),
        (["--set", "lr"], "--set lr"),
        (["--set", "learning=3"], "--set learning"),
        (["--set", "rounds=[1]"], "KEY=VALUE"),
        (["--set", "out=elsewhere"], "--out"),
        (["--set", "lr=nan"], "--set lr=nan"),
        (["--set", "lr=fast"], "must be like 0.0"),
        (["--set", "batch-size=0"], "--set batch-size=0: batch_size must be at least 1"),
        (["--set", "epochs=-3"], "--set epochs=-3"),
        (["--set", "lr=-1.0"], "--set lr=-1.0: lr must be above 0"),
        (["--set", "optimizer=foo"], "optimizer 'foo' is not known; choose from"),
        (["--set", "schedule=bar"], "schedule 'bar' is not known; choose from"),
        (["--set", "test-share=7.0"], "--set test-share=7.0: test_share must be below 1"),
        (["--set", "schema=nowhere.json"], "nowhere.json: cannot be read (No such file"),
        (["--set", "schema=taken/thesis.txt"], "thesis.txt: not a schema"),
        (["--epsilon", "1", "--set", "delta=2.0"], "delta 2 must lie between 0 and 1"),
        (["--set", "secure=true"], "channel='query'"),
        (["--adjust", "sp"], "--adjust sp: write METRIC=GAP"),
        (["--adjust", "sp=2"], "--adjust sp=2"),
        (["--adjust-randomized"], "--adjust-randomized needs a target"),
        (["--adjust", "sp=0.02", "--set", "min-cell=5"], "--adjust needs histograms of scores"),
        (["--adjust", "sp=0", "--channel", "query", "--set", "secure=true"], "sums carry none"),
        (["--set", "secure=true", "--channel", "query", "--sites", "2"], "fewer than 3 sites"),
        (["--alpha", "-1"], "--alpha"),
        (["--port", "99999"], "--port 99999"),
        (["--out", "taken/thesis.txt"], "is a file"),
        (["--group", 'a "b"'], "quotes"),
        (["--app", "nowhere"], "--app"),
        (["--resume"], "--resume"),
        (["--out", "taken"], "not empty"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    arguments, says, tmp_path, capsys, monkeypatch
) -> None:
    from fedgft.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "local", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and says in error, error
    assert time.monotonic() - began < 20 and not (tmp_path / "fedgft-deploy").exists()
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["thesis.txt"]


def test_a_schema_is_looked_for_where_its_name_was_typed(tmp_path: Path, monkeypatch) -> None:
    """The server works in a folder of its own, where a relative name would mean nothing."""
    from fedgft.cli.deploy import parse_app_settings

    monkeypatch.chdir(tmp_path)
    told = {
        name: parse_app_settings([f"schema={name}"], None, reserved={})
        for name in ("s.json", "a/b", "")
    }
    assert told["s.json"] == {"schema": str(tmp_path.resolve() / "s.json")}
    assert told["a/b"] == {"schema": str(tmp_path.resolve() / "a" / "b")}
    assert told[""] == {"schema": ""}  # as the app has it: none


# Real runs


@pytest.fixture(scope="module")
def compas_here(compas):
    """The processes find the data set in the cache."""


@contextmanager
def start(arguments: list[str]) -> Iterator[subprocess.Popen]:
    """The command line in a process of its own, which does not outlive the test."""
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - shells turn it off
    command = [*FEDGFT, "deploy", "local", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def finished(arguments: list[str]) -> tuple[int, str, str]:
    with start(arguments) as running:
        said, notes = running.communicate(timeout=LIMIT)
    return running.returncode, said, notes


def test_a_deployed_run_equals_the_simulator(compas_here, tmp_path: Path) -> None:
    """Two sites, two rounds, FedGFT on FedAdam, for real: the same parameters to 1e-5."""
    from fedgft.algorithms import Adaptive, fedgft
    from fedgft.engine import Settings, simulate
    from fedgft.fair_model import load_model
    from fedgft.flower.client_app import divide_public_data as cut
    from fedgft.metrics import get_metric
    from fedgft.rules import load_rule

    out = tmp_path / "run"
    code, said, notes = finished(
        [
            "--sites",
            "2",
            "--rounds",
            "2",
            "--data",
            "compas",
            "--lam",
            "5",
            "--strategy",
            "FedAdam",
            "--set",
            "schedule=constant",
            "lr=0.01",
            "--adjust",
            "sp=5%",
            "--adjust-randomized",
            "--timeout",
            "280",
            "--json",
            "--out",
            str(out),
        ]
    )
    assert code == 0, notes
    assert len(said.splitlines()) == 1
    row = json.loads(said)
    assert set(row) >= {"rounds", "accuracy", "gap_soft", "gap_hard", "sites", "status", "seconds"}
    assert row["status"] == "finished:completed" and row["rounds"] == 2 and row["sites"] == 2
    assert left_behind(out) == []
    assert not (out / "engine").exists()  # its keys
    made = cut({"data": "compas", "group": "", "alpha": 0.5, "seed": 0, "test-share": 0.3}, 2)
    algorithm = replace(fedgft(get_metric("sp"), 5.0), server=Adaptive(lr=0.1, convention="flower"))
    history = simulate(
        [made],
        "logistic",
        algorithm,
        Settings(schedule="constant", state="reset", rounds=2, lag=True),
        seeds=[0],
        lr=0.01,
    )
    ((weight, bias),) = load_model(out / "model.safetensors").layers
    found = np.concatenate([weight.ravel(), bias])
    np.testing.assert_allclose(found, history.params[0], rtol=0, atol=1e-5)
    assert row["gap_soft"] == pytest.approx(
        float(history.federation.gap(get_metric("sp"), "soft")[-1, 0]), abs=1e-5
    )
    report = (out / "report.html").read_text()
    assert "north" in report and "south" in report
    rule = load_rule(out / "rule.json")
    assert rule.fitted["target"] == {"sp": 0.05} and row["rule"]["gap"] <= 0.05 + 1e-6
    assert 0.5 < row["rule"]["held_out"]["accuracy"] < 1
    assert "2/2 sites reported" in notes
    steps = ("making keys", "starting the server", "starting the sites", "submitting the run")
    assert sorted(steps, key=notes.index) == list(steps) and notes.index(steps[-1]) < 2000
    rounds = [line for line in notes.splitlines() if line.startswith("round ")]
    assert len(rounds) == 3 and max(map(len, rounds)) <= 80


def test_ctrl_c_ends_every_process(compas_here, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--sites", "2", "--rounds", "50", "--data", "compas", "--out", str(out)]
    with start(arguments) as running:
        deadline = time.monotonic() + 60
        while len(left_behind(out)) < 5 and time.monotonic() < deadline:
            time.sleep(0.2)  # until the server, its helper and two sites are up, beside us
        assert len(left_behind(out)) >= 5
        running.send_signal(signal.SIGINT)
        _, notes = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in notes, notes
    assert left_behind(out) == []
    assert not (out / "engine").exists()


def test_all_sites_failing_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("x,y,sex\n")  # which only reading them shows
    out = tmp_path / "run"
    files = [str(tmp_path / f"{name}.csv") for name in "ab"]
    code, said, notes = finished(
        [
            "--data",
            *files,
            "--label",
            "y",
            "--group",
            "sex",
            "--rounds",
            "1",
            "--json",
            "--out",
            str(out),
        ]
    )
    assert code == 2
    assert json.loads(said)["status"] == "finished:failed"
    assert "a.csv: the file has no rows" in notes
    assert left_behind(out) == []


def test_a_column_that_a_site_lacks_is_seen_before_anything_starts(tmp_path: Path) -> None:
    for name, head in (("a", "x,y,sex\n1,0,f\n"), ("b", "x,y\n1,0\n")):
        (tmp_path / f"{name}.csv").write_text(head)
    files = [str(tmp_path / f"{name}.csv") for name in "ab"]
    code, said, notes = finished(
        ["--data", *files, "--label", "y", "--group", "sex", "--out", str(tmp_path / "run")]
    )
    assert (code, said) == (2, "") and "b.csv: no column 'sex' (--group)" in notes
    assert not (tmp_path / "run").exists()


def test_intruders_are_refused_and_a_lost_site_is_survived(compas_here, tmp_path: Path) -> None:
    """One federation, three sites; three others that may not join; an app that is not the sites'
    own; one site killed in mid-round."""
    out = tmp_path / "run"
    sites = ("north", "south", "east")
    config = {"rounds": 2, "sites": 3, "out": str(out), "data": "compas"}
    plan = LocalRunPlan(sites, site_arguments(sites, []), config, out, limit=LIMIT)
    with start_federation(plan) as (folder, processes):
        _no_other_server_or_wire(folder)
        _start_intruders(folder, processes)
        foreign = _foreign_app(tmp_path)
        run = submit_run(folder, processes, replace(plan, app=foreign))
        killed = []

        def told(row) -> None:
            if row.get("round") == 0 and not killed:
                killed.extend(list_descendants(processes.running["east"].pid))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        status = wait_for_run(processes, plan, run, told)
        for name, says in REFUSED.items():
            words = (plan.out / "logs" / f"{name}.log").read_text("utf-8", "replace")
            assert says in " ".join(words.split()), (name, words[-2000:])
        log = (plan.out / "logs" / "server.log").read_text("utf-8", "replace")
        assert log.count("Activated node_id") == 3
        assert "unknown key" in log
    made = summarize_run(out, status, seconds=0.0, sites=3, limit=LIMIT)
    assert status == "finished:completed" and made["rounds"] == 2
    rows = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    counted = [row["clients"] for row in rows if "round" in row]
    assert counted[0] == 3 and counted[-1] == 2
    assert any("site 'east' failed" in row.get("note", "") for row in rows), rows
    assert not any("node 1 " in row.get("note", "") for row in rows)
    assert made["sites"] == 2  # of whose rows the report is
    assert (foreign / "opened-by-server_app").exists()
    assert not (foreign / "opened-by-client_app").exists(), "a site ran code that it was sent"
    assert left_behind(out) == []


def _foreign_app(tmp_path: Path) -> Path:
    """The app that ships, with lines that tell where it is run."""
    copy_app(tmp_path / "foreign")
    for name in ("client_app", "server_app"):
        path = tmp_path / "foreign" / "fairapp" / f"{name}.py"
        mark = tmp_path / "foreign" / f"opened-by-{name}"
        path.write_text(f"{path.read_text()}\nopen({str(mark)!r}, 'w').close()\n")
    return tmp_path / "foreign"


REFUSED = {
    "unknown-key": "the server refuses this site: unknown key",
    "wrong-authority": "the server refuses this site: its certificate was not issued by",
    "flowers-own": "[code: 400] unknown key: this site's public key is not among those",
    "no-tls": "Connection attempt failed",
}


def _start_intruders(folder, processes) -> None:
    """A key that nobody registered, an authority that is not ours, and a node without TLS."""
    strange = folder.path / "strange"
    strange.mkdir()
    create_authority(strange)
    create_node_key(strange, "unknown")
    key = str(strange / "unknown.key")

    def command(key: Path, authority_: Path) -> list[str]:
        return [
            *FEDGFT,
            "deploy",
            "site",
            "north",
            "--server",
            folder.address,
            "--ca",
            str(authority_),
            "--key",
            str(key),
        ]

    processes.start("unknown-key", command(strange / "unknown.key", folder.path / "ca.crt"))
    processes.start("wrong-authority", command(folder.nodes / "north.key", strange / "ca.crt"))
    node = [f"{flower_commands_folder()}flower-supernode", "--superlink", folder.address, "--port"]
    processes.start(
        "flowers-own",
        [
            *node,
            str(free_port()),
            "--root-certificates",
            "ca.crt",
            "--auth-supernode-private-key",
            key,
        ],
    )
    processes.start("no-tls", [*node, str(free_port()), "--insecure"])


def _no_other_server_or_wire(folder) -> None:
    """Only TLS, only with our authority's certificate, only under a name that it holds."""
    import socket
    import ssl
    import urllib.request

    def connect(authority_: Path, name: str) -> None:
        checked = ssl.create_default_context(cafile=authority_)
        with socket.create_connection(("127.0.0.1", folder.port), 10) as wire:
            checked.wrap_socket(wire, server_hostname=name).close()

    connect(folder.path / "ca.crt", "127.0.0.1")
    other = folder.path / "other"
    other.mkdir()
    create_authority(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(other / "ca.crt", "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(folder.path / "ca.crt", "elsewhere.example.org")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{folder.port}/", timeout=10)
