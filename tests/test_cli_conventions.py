"""The command line as a whole: help, examples, completion, quiet, verbose, color, exit codes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from fedgft.cli.app import EXIT_CODES, HELP_EPILOGUE, SUMMARIES, app, load_command
from fedgft.cli.app import run as start
from fedgft.cli.console import output, render
from fedgft.cli.options import Options, parse_settings, split_columns
from fedgft.settings import OPTIONS
from test_cli import QUICK, run, table

pytestmark = pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
SHORT = ("--target=2%", "--data=loans.csv")
TABLE = ("--label", "ok", "--group", "sex")


def commands() -> list[str]:
    """Every command that does something, with its parent's name before it."""
    found = []
    for name in (n for n in app if not n.startswith("-")):
        inner = [n for n in app[name] if not n.startswith("-")]
        found += [f"{name} {n}" for n in inner] or [name]
    return found


def examples(command: str) -> list[str]:
    """The examples at the end of a command's help; "" is the program without a command."""
    loaded = load_command(command.split())
    text = HELP_EPILOGUE if loaded is None else str(loaded.help_epilogue)
    return re.findall(r"^  (fedgft .*)", text, re.M)


LINES = [line for command in ("", *SUMMARIES, *commands()) for line in examples(command)]


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help_with_an_example(capsys, command):
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    assert all(f"  {line}" in out for line in examples(command))
    assert examples(command) or examples(command.split()[0])
    assert "--quiet" in out and "--verbose" in out


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", ["", *SUMMARIES, *commands()])
def test_help_fits_80_columns(capsys, monkeypatch, command, flag):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, *command.split(), flag)
    assert (code, err) == (0, "") and out.startswith("Usage: fedgft")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", commands())
def test_help_breaks_lines_only_at_the_width_of_the_terminal(command):
    """Docstrings are joined: no line break of the source, no heading of its sections."""
    wide = os.environ | {"COLUMNS": "1000"}  # a process reads it once
    asked = [sys.executable, "-m", "fedgft", *command.split(), "--help-all"]
    out = subprocess.run(asked, env=wide, capture_output=True, text=True, check=True).stdout
    assert "----" not in out and '[default: ""]' not in out
    assert not re.search(r"^│ {8,}\S", out, re.M)


@pytest.mark.parametrize("command", ["train", "compare", "frontier"])
def test_help_shows_the_usual_options_and_names_the_flag_for_all(capsys, command):
    _, short, _ = run(capsys, command, "--help")
    _, long, _ = run(capsys, command, "--help-all")
    usual = re.findall(r"^│ (?:DATA )?(--[\w-]+)", short.partition("With any command")[0], re.M)
    every = re.findall(r"^│ (?:DATA )?(--[\w-]+)", long, re.M)
    wanted = {"data", "label", "group", "client", "target", "leave-out", "split", "out", "seeds"}
    assert {f"--{name}" for name in wanted} <= set(usual) <= set(every)
    assert len(usual) <= 12 < len(every)
    assert f"{len(every) - 2 - len(usual)} more options: fedgft {command} --help-all" in short
    assert "more options" not in long


def test_the_list_of_commands_holds_commands_only(capsys):
    _, out, _ = run(capsys, "--help")
    assert "─ Commands ─" not in out
    assert "--help" in out.partition("With any command")[2]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_every_example_is_one(line):
    """It is read without complaint; docs run what can be run."""
    words = shlex.split(line.partition(" > ")[0])
    app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_help_says_what_exit_codes_mean(capsys):
    _, out, _ = run(capsys, "--help")
    assert " ".join(EXIT_CODES.split()) in " ".join(out.split())
    for code in ("0", "2", "3", "130"):
        assert re.search(rf"\b{code}\b", EXIT_CODES)


def test_every_shared_option_has_its_heading(capsys):
    assert sorted(n for names in OPTIONS.values() for n in names) == sorted(
        field.name for field in fields(Options)
    )
    _, out, _ = run(capsys, "compare", "--help-all")
    places = [out.index(f"─ {heading} ─") for heading in OPTIONS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_summary_is_the_first_paragraph_of_the_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and SUMMARIES[name] in " ".join(out.split())


def test_no_command_is_imported_for_the_list_of_commands():
    code = (
        "import sys; from fedgft.cli import main; main(['--help']); "
        "print([m for m in sys.modules if m.startswith(('fedgft.', 'numpy', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'([\w.]+)'", done.stdout.splitlines()[-1]))
    own = {"app", "console"}
    assert loaded <= {
        "fedgft.cli",
        *(f"fedgft.cli.{name}" for name in own),
        "fedgft.errors",
        "fedgft.formatting",
        "fedgft.settings",
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train loans.csv --data other.csv", "--data names the table already"),
        ("train --label a --label b", "--label is given more than once"),
        ("train --rounds x", "--rounds must be a whole number, not 'x'"),
        ("train --lr x", "--lr must be a number, not 'x'"),
        ("train --target 2x", "--target must be a fraction such as 0.02, or 2%, not '2x'"),
        ("train --target 200%", "--target must be below 1, got 2: two points are 0.02 or 2%"),
        ("train --target", "--target needs a value: largest acceptable gap"),
        ("train --taget 2", "Unknown option: --taget. Did you mean --target?"),
        ("trian", 'Did you mean "train"?'),
        ("train --group sex people.csv", "--group 'people.csv' is a file, not a column"),
        ("train --group", "--group needs a value"),
        ("train a.csv synthetic", "--data synthetic: several names must be .csv or .parquet"),
        ("train a.csv b.csv --images i", "--images: give one table that lists all images"),
        ("compare --methods fedavg,fdgft", 'Did you mean "fedgft"?'),
        ("compare --alpha 0.5,x", "--alpha must be a number, not 'x'"),
        ("demo loans.csv", "'loans.csv': unexpected here; see `fedgft demo --help`"),
        ("measure --label y --group", "--group needs a value"),
        ("measure", "--data is missing: a CSV or Parquet file with one row per person"),
    ],
)
def test_mistakes_are_explained_in_one_line(capsys, words, says):
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert says in err
    assert not re.search("Unused|Parameter|convert|token", err)


@pytest.mark.parametrize(
    "words",
    [
        ["loans.csv", "--group", "sex", "age", "--leave-out", "id", "note", "--target", "2%"],
        ["--data", "loans.csv", "--group", "sex,age", "--leave-out", "id,note", "--target", "0.02"],
        ["--group=sex", "--group=age", "--leave-out=id", "--leave-out=note", *SHORT],
    ],
)
def test_lists_tables_and_fractions_may_be_written_in_several_ways(words):
    _, bound, _ = app.parse_args(["train", *words], exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    assert options.data == ("loans.csv",) and options.target == 0.02
    assert split_columns(options.group) == ("sex", "age")
    assert split_columns(options.leave_out) == ("id", "note")


@pytest.mark.parametrize("words", ["sp,eop --alpha 0.5,5", "sp eop --alpha 0.5 --alpha 5"])
def test_lists_of_compare_may_be_written_in_several_ways(words):
    command = ["compare", "a.csv", "b.csv", "--metrics", *words.split(), "--methods=fedavg,lft"]
    _, bound, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    found = bound.arguments
    assert found["options"].data == ("a.csv", "b.csv")
    assert (found["metrics"], found["alpha"]) == (("sp", "eop"), (0.5, 5.0))
    assert found["methods"] == ("fedavg", "lft")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("measure p.csv --min-count 10", "measure p.csv --min-cell 10"),
        ("train --strategy FedAdam", "train --base fedadam"),
        ("deploy local --strategy=FedAdam", "deploy local --base=FedAdam"),
        ("deploy local a.csv b.csv", "deploy local --data a.csv b.csv"),
        ("compare --methods FedGFT", "compare --methods fedgft"),
    ],
)
def test_options_that_have_two_names(monkeypatch, old, new):
    bound = []

    def parse(words, **_):
        if words[0] == "measure":
            words = [*words, "--label", "y", "--group", "sex"]
        bound.append(app.parse_args(words, exit_on_error=False, print_error=False)[1])

    monkeypatch.setattr(type(app), "__call__", lambda _, words, **how: parse(words, **how))
    for line in (old, new):
        start(line.split())
    assert bound[0].arguments == bound[1].arguments


def test_min_cell_is_a_setting_of_sites_too():
    assert parse_settings(["min-cell=10"], reserved={}) == {"min-count": 10}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("predict m.safetensors", "FILE is missing: a CSV or Parquet file"),
        ("predict m.safetensors a.csv --data b.csv", "--data names a second table"),
        ("predict m.safetensors --data a.csv", "m.safetensors"),
    ],
)
def test_predict_takes_one_table(capsys, words, says):
    code, _, err = run(capsys, *words.split())
    assert code == 2 and says in err


def test_a_column_may_have_a_comma_in_its_name():
    assert split_columns(["a,b", "c,d"], known=["a,b", "c", "d"]) == ("a,b", "c", "d")


@pytest.mark.slow
def test_a_table_may_stand_without_data(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    how = ["--label", "ok", "--group", "sex", "--methods", "fedavg", "--json", *QUICK]
    code, plain, err = run(capsys, "compare", file, "--client", "site", *how)
    assert code == 0, err
    _, named, _ = run(capsys, "compare", "--data", file, "--client", "site", *how)
    plain, named = (re.sub('"seconds": .*', "", text) for text in (plain, named))
    assert plain == named and json.loads(named)[0]["data"] == "t"


@pytest.mark.parametrize(
    ("command", "field", "option"),
    [
        ("train", "batch_size", "--batch-size"),
        ("train", "out", "--out"),
        ("train", "fedbn", "--fedbn"),
        ("compare", "metric", "--metrics"),
        ("deploy local", "set", "--set"),
        ("deploy local", "app", "--app"),
        ("deploy keys", "sites", "SITE"),
        ("measure", "data", "--data"),
        ("measure", "exclude_empty", "--exclude-empty"),  # of another command
        ("measure", "conditions", "conditions"),  # of none
    ],
)
def test_messages_name_options(monkeypatch, command, field, option):
    found = app
    for word in command.split():
        found = found[word]
    monkeypatch.setattr(output, "command", found)
    assert render(f"`{field}` is wrong") == f"{option} is wrong"


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{version('fedgft')}\n", "")


@pytest.mark.slow
def test_quiet_leaves_results_and_verbose_adds(capsys, tmp_path):
    command = ("train", "--data", table(tmp_path / "t.csv"), *TABLE, *QUICK, "--out")
    _, plain, said = run(capsys, *command, tmp_path / "a")
    _, quiet, nothing = run(capsys, *command, tmp_path / "a", "--quiet")
    _, verbose, more = run(capsys, "-v", *command, tmp_path / "a")
    lines, fewer, more_lines = (set(text.splitlines()) for text in (plain, quiet, verbose))
    assert fewer <= lines and fewer <= more_lines and "FedGFT" in quiet
    assert "note:" in said and "wrote" in more
    assert all(line.startswith("warning: ") for line in nothing.splitlines())
    assert f"fedgft {version('fedgft')}" in more and "100% " in more and " MB of memory" in more
    assert re.search(r"note: \d+\.\d s", more)
    assert len(re.findall(r"^note:\s+\d+% ", more, re.M)) <= 10  # of many rounds and replicates


def test_quiet_and_verbose_do_not_go_together(capsys):
    code, out, err = run(capsys, "data", "list", "--quiet", "-v")
    assert (code, out) == (2, "") and "--quiet and --verbose" in err


def test_a_verdict_is_said_even_quietly(capsys, tmp_path):
    rows = "y,sex,p\n" + "1,f,0.9\n0,f,0.8\n1,m,0.2\n0,m,0.1\n" * 30
    (tmp_path / "p.csv").write_text(rows)
    site = tmp_path / "site.json"
    run(
        capsys,
        "measure",
        tmp_path / "p.csv",
        "--label",
        "y",
        "--group",
        "sex",
        "--score",
        "p",
        "--out",
        site,
    )
    code, _, err = run(capsys, "audit", site, "--fail-above", "sp=0.1", "-q")
    assert code == 3 and "--fail-above" in err


def shown_on_terminal(command: list[str], width: int, folder: Path) -> str:
    """What a command prints on a terminal of this width, without escape sequences."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env={**clean, "TERM": "xterm"},
    ) as process:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # how Linux reports that the process has closed it
                break
            if not part:
                break
            parts.append(part)
    os.close(leader)
    assert process.returncode in (0, 2)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode()).replace("\r", "")


NOTES = """
from fedgft.cli.console import fail, output, say
for _ in range(2):
    say("loans.csv: 20 of the 300 rows that they held out have no group; 0.65 to 0.71 of them [a]")
say("/a/long/path/" + "name" * 30 + ".csv: is written")
fail("`rounds` must be a whole number, and what was given here is none: 'three hundred and one'")
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudoterminals")
@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_no_divided_word_and_each_note_once(tmp_path, width):
    said = shown_on_terminal([sys.executable, "-c", NOTES], width, tmp_path)
    lines = said.splitlines()
    too_long = [line for line in lines if len(line) > width]
    assert [line.split()[-1] for line in too_long] == [f"/a/long/path/{'name' * 30}.csv:"]
    words = " ".join(said.split())
    assert words.count("0.65 to 0.71 of them [a]") == 1
    assert "--rounds must be a whole number, and what was given here is none: 'three" in words
    assert len(lines) > 5 and "is written" in lines[lines.index(too_long[0]) + 1]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudoterminals")
@pytest.mark.parametrize("width", [60, 80])
def test_notes_of_a_command_fit_the_terminal(tmp_path, width):
    table(tmp_path / "t.csv")
    command = [sys.executable, "-m", "fedgft", "train", "t.csv", *TABLE, *QUICK, "--verbose"]
    said = shown_on_terminal([*command, "--clients", "3"], width, tmp_path)
    notes = re.findall(r"^note: .*(?:\n {6}\S.*)*", said, re.M)
    assert len(notes) > 3 and len(set(notes)) == len(notes)
    assert all(len(line) <= width for text in notes for line in text.splitlines())
    assert any("\n" in text for text in notes)


def styled(**environment: str) -> bool:
    """Whether a table comes with escape sequences."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    said = subprocess.run(
        [sys.executable, "-m", "fedgft", "data", "list"],
        capture_output=True,
        check=True,
        env={**clean, "TERM": "xterm-256color", **environment},
    ).stdout
    return b"\x1b[" in said


@pytest.mark.slow
def test_color_is_for_terminals_and_no_color_is_heard():
    assert not styled()
    assert styled(FORCE_COLOR="1")
    help_ = subprocess.run(
        [sys.executable, "-m", "fedgft", "train", "--help"],
        capture_output=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm-256color"},
    ).stdout
    assert not re.search(rb"\x1b\[(\d+;)*(3[0-7]|9[0-7]|38)", help_)  # bold is no color


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(capsys, tmp_path, shell):
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    assert all(word in out for word in ("frontier", "fail-above", "fedgft-control"))
    (tmp_path / "script").write_text(out)
    if shutil.which(shell):
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("fro", "frontier"), ("train --prec", "--precision"), ("deploy lo", "local")],
)
def test_bash_completes(capsys, tmp_path, typed, offered):
    """What bash would do at the press of Tab."""
    _, out, _ = run(capsys, "completion", "bash")
    (tmp_path / "script").write_text(out)
    words = ["fedgft", *typed.split()]
    quoted = " ".join(map(shlex.quote, words))
    ask = (
        f"source {tmp_path}/script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        f'_fedgft fedgft {words[-1]} {words[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    said = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert offered in said.split()
