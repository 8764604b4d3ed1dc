"""The application: it registers the commands, runs one, and turns errors into one line."""

import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from io import TextIOWrapper
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_type_hints

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    UnusedCliTokensError,
)

from fedgft.cli.console import discard_stdout, fail, note, output
from fedgft.errors import EXTRAS, FedgftError

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

EXIT_CODES = (
    "Exit codes: 0 success, 2 invalid input (one line says what to fix), 3 a gap above "
    "--fail-above or an alarm of monitor, 4 a missed target (with --strict), 130 interrupted."
)


COMMANDS = {  # heading -> command -> first sentence of its docstring, or the help of its App
    "Start": {
        "demo": "Run six methods on Adult across ten very different simulated clients, and compare "
        "fairness.",
        "data": "List and fetch the public data sets.",
        "reproduce": "Regenerate the paper's tables and figures, beside the published numbers.",
        "bench": "Compare all methods on frozen tracks, on held-out rows.",
    },
    "Measure": {
        "measure": "Count the predictions of one site. The result is a file of sums; rows stay "
        "at the site.",
        "audit": "Combine the sums of all sites into gaps with intervals, each site's share, and "
        "a report.",
        "monitor": "Follow gaps over time from dated files of sites; an alarm ends with exit code "
        "3.",
        "adjust": "Find the best fair decision rule for a finished model, from the sums of all "
        "sites.",
        "decide": "Decide about the people of a table by a rule: adds the column decision.",
    },
    "Train": {
        "train": "Train a fair model, save it, and compare it with FedAvg, client by client.",
        "compare": "Train several methods on the same replicates and compare accuracy and gaps.",
        "frontier": "Draw accuracy against gap for every method, and save the model that meets a "
        "target.",
        "predict": "Apply a saved model to a table; adds the columns score and decision.",
        "deploy": "Train between organizations with Flower: set up hosts, or try it on this host.",
    },
    "Shell": {
        "completion": "Print a script that lets a shell complete commands, options and choices."
    },
}
SUMMARIES = {name: text for group in COMMANDS.values() for name, text in group.items()}
PATHS = {  # import paths that are not fedgft.cli.NAME:NAME
    "data": "fedgft.cli.data:app",
    "bench": "fedgft.cli.bench:app",
    "deploy": "fedgft.cli.deploy:app",
    "demo": "fedgft.cli.compare:demo",
    "measure": "fedgft.cli.audit:measure",
    "predict": "fedgft.cli.decide:predict",
    "completion": "fedgft.cli.app:completion",
}
HELP_EPILOGUE = (
    "Examples:"
    "\n  fedgft demo"
    "\n  fedgft train --data loans.csv --label repaid --group sex --target 0.02"
    "\n  fedgft measure predictions.csv --label y --group sex --score p"
    "\n  fedgft audit north.json south.json --out report"
    f"\n\n{EXIT_CODES}"
)
EXAMPLES_HEADING = "Examples\n--------\n"
Shell = Literal["bash", "zsh", "fish"]
HELP_ALL = "--help-all"
USUAL_OPTIONS = (  # what `--help` of the commands that train shows; `--help-all` shows the others
    *("--data", "--label", "--group", "--client", "--target", "--metric", "--metrics"),
    *("--methods", "--leave-out", "--split", "--out", "--seeds"),
)
OLD_NAMES = {"--min-count": "--min-cell", "--strategy": "--base"}  # options by another name
WITH_USUAL_OPTIONS = ("train", "compare", "frontier")
WITH_TABLES = (*WITH_USUAL_OPTIONS, "local", "measure")
GLOBAL_OPTIONS = Group("With any command", sort_key=99)
GLOBAL_FLAG = Parameter(group=GLOBAL_OPTIONS, negative="", show_default=False)
GLOBAL_FLAGS = ("--quiet", "-q", "--verbose", "-v")


def completion(shell: Shell, /) -> None:
    """Print a script that lets a shell complete commands, options and choices.

    Parameters
    ----------
    shell
        The shell. Nothing is installed: save the script where your shell looks for completions.

    Examples
    --------
    fedgft completion bash > ~/.local/share/bash-completion/completions/fedgft
    fedgft completion fish > ~/.config/fish/completions/fedgft.fish
    """
    sys.stdout.write(app.generate_completion(prog_name="fedgft", shell=shell))


class HelpFormatter:
    """Prints the panels of a command's help: one with the usual options where there are many.

    Which options are usual stands in `USUAL_OPTIONS`. `--help-all` shows all panels.
    """

    def __init__(self) -> None:
        self.usual: list[HelpEntry] = []
        self.hidden = 0

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Print a panel, or keep its usual options for the one panel that is shown instead."""
        from cyclopts.help.formatters import DefaultFormatter

        print_panel = DefaultFormatter()
        name = "" if output.command is None else output.command.name[0]
        if output.help_all or name not in WITH_USUAL_OPTIONS:
            print_panel(console, options, panel)
            return
        if panel.title != GLOBAL_OPTIONS.name:
            usual = [entry for entry in panel.entries if _usual_name(entry)]
            self.usual += usual
            self.hidden += len(panel.entries) - len(usual)
            return
        # The last panel.
        entries = sorted(self.usual, key=lambda entry: USUAL_OPTIONS.index(_usual_name(entry)))
        print_panel(console, options, panel.copy(title="Options", entries=entries))
        console.print(f"{self.hidden} more options: fedgft {name} {HELP_ALL}")
        print_panel(console, options, panel)
        self.__init__()

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: object) -> None:
        """Print the line with the usage; it names the tables that may follow the command."""
        from cyclopts.help.formatters import DefaultFormatter

        text = str(usage).strip()
        if output.command is not None and output.command.name[0] in WITH_TABLES:
            text = text.replace("[OPTIONS] [ARGS]", "[DATA...] [OPTIONS]")
        DefaultFormatter().render_usage(console, options, f"{text}\n")


def _usual_name(entry: "HelpEntry") -> str:
    """Return the name of one of the `USUAL_OPTIONS`; empty if the entry is none of them."""
    return next((name for name in entry.names if name in USUAL_OPTIONS), "")


def _version() -> str:
    return version("fedgft")


def _make_app() -> App:
    """Return the application with every command registered by its import path."""
    made = App(
        name="fedgft",
        help="Measure and train group fairness in federated learning.",
        help_epilogue=HELP_EPILOGUE,
        help_format="plaintext",
        help_formatter=HelpFormatter(),
        version=_version,
    )
    for flag in ("--help", "--version"):
        made[flag].group = (GLOBAL_OPTIONS,)
    for each in (made, made.meta):
        each.suppress_keyboard_interrupt = False  # `main` handles it
    for position, (title, summaries) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=position)
        for name, summary in summaries.items():
            path = PATHS.get(name, f"fedgft.cli.{name}:{name}")
            made.command(path, name=name, help=summary, group=group)
    return made


app = _make_app()


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    quiet: Annotated[bool, GLOBAL_FLAG, Parameter(name=("--quiet", "-q"))] = False,
    verbose: Annotated[bool, GLOBAL_FLAG, Parameter(name=("--verbose", "-v"))] = False,
) -> None:
    """Run a command.

    Parameters
    ----------
    quiet
        Print only results and errors, no notes and no progress.
    verbose
        Print versions, progress as log lines, and seconds and memory at the end.
    """
    if quiet and verbose:
        raise FedgftError("--quiet and --verbose exclude each other: give one", kind="conflict")
    output.quiet = quiet
    output.verbose = verbose
    started = time.monotonic()
    if verbose:
        note(_versions())
    app(tokens, exit_on_error=False, print_error=False)
    if verbose:
        note(f"{time.monotonic() - started:.1f} s{_peak_memory()}")


def run(arguments: list[str]) -> None:
    """Run the command that the arguments name; errors are printed in one line, exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may lack some of our characters
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning
    output.command = None
    output.said.clear()
    output.help_all = HELP_ALL in arguments
    arguments = [_rename_option("--help" if word == HELP_ALL else word) for word in arguments]
    try:
        output.command = load_command(arguments)
        app.meta(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except FedgftError as error:
        fail(error.message)
    except CycloptsError as error:
        fail(describe_usage_error(error, arguments))
    except ImportError as error:
        fail(_describe_missing_extra(error))
    except BrokenPipeError:  # the reader has closed the pipe
        discard_stdout()
    except MemoryError:
        fail("not enough memory for this; try fewer groups, classes, bins or runs")
    except OSError as error:
        # Errors about our files name the file: those without a name are about stdout.
        where = error.filename or ("" if error.errno is None else "stdout")
        fail(f"{where}: {error.strerror}" if where else str(error))


def _rename_option(word: str) -> str:
    """Return an argument, or the present name of an option that is also known by another."""
    name, equals, value = word.partition("=")
    return f"{OLD_NAMES.get(name, name)}{equals}{value}"


def load_command(arguments: list[str]) -> App | None:
    """Import the command that the arguments name, and complete its help.

    Returns None if the arguments name no command, as in `fedgft --help`. The help of a command is
    its docstring, of which `SUMMARIES` has the first sentence only, and its examples.
    """
    words = [word for word in arguments if word not in GLOBAL_FLAGS]
    if not words or words[0].startswith("-"):
        return None
    if words[0] not in SUMMARIES:
        close = get_close_matches(words[0], SUMMARIES, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise FedgftError(
            f'Unknown command "{words[0]}".{hint} Available commands: {", ".join(SUMMARIES)}.'
        )
    command = app
    for word in words[:2]:
        if word.startswith("-") or word not in command:
            break
        command = command[word]
        if command.default_command is not None:
            command.help = None
            function = command.default_command
            command.help_epilogue = format_examples(function.__doc__)
            for documented in (function, *_list_option_classes(function)):
                documented.__doc__ = join_lines(documented.__doc__ or "")
    return command


def _list_option_classes(function: Callable[..., object]) -> list[type]:
    """Return the dataclasses among the types of a command's arguments; they document options."""
    hints = get_type_hints(function).values()
    kinds = [kind for hint in hints for kind in (hint, *get_args(hint))]
    return [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]


def join_lines(docstring: str) -> str:
    """Return the docstring with each paragraph on one line; help wraps it to the terminal."""
    lines: list[str] = []
    in_text = True  # until the first heading
    for line in cleandoc(docstring).splitlines():
        in_text = in_text and line not in ("Parameters", "Examples")
        is_indented = line.startswith(" ")
        continues = lines and lines[-1] and line and lines[-1].startswith(" ") == is_indented
        if continues and (is_indented or in_text):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def format_examples(docstring: str | None) -> str:
    """Return the examples in a docstring as the last lines of the help; empty if it has none."""
    lines = cleandoc(docstring or "").partition(EXAMPLES_HEADING)[2].splitlines()
    if not lines:
        return ""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join((title, *(f"  {line}" for line in lines)))


def describe_usage_error(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return in one line what is wrong with the words after `fedgft`, and what to do."""
    if isinstance(error, UnusedCliTokensError):
        return _describe_unused(error.unused_tokens or [], " ".join(error.command_chain or ()))
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once"
    argument = error.argument
    if argument is None:
        return str(error)
    name = argument.name
    if isinstance(error, MissingArgumentError):
        is_given = any(word.partition("=")[0] in argument.names for word in arguments)
        purpose = _describe_argument(name)
        return f"{name} {'needs a value' if is_given else 'is missing'}{purpose and f': {purpose}'}"
    if isinstance(error, CoercionError):
        text = re.sub(r"^Invalid value for \S+: ", "", str(error))
        number = re.fullmatch(r'unable to convert "(.*)" into (int|float)\.', text, re.DOTALL)
        if number is not None:
            noun = "whole number" if number[2] == "int" else "number"
            text = f"must be a {noun}, not '{number[1][:40]}'"
        return text if name in text else f"{name} {text}"
    return str(error)


def _describe_unused(words: Sequence[str], command: str) -> str:
    """Return what is wrong with words that are neither options nor values of options."""
    listed = " ".join(map(repr, words))
    known = () if output.command is None else output.command.assemble_argument_collection()
    if any(argument.name == "--data" for argument in known):
        if not command.endswith(WITH_TABLES):
            return f"{listed}: unexpected here; `fedgft {command}` takes one table"
        return f"{listed}: --data names the table already; name several tables in one place"
    usage = f"fedgft {command}".strip()
    return f"{listed}: unexpected here; see `{usage} --help`"


def _describe_argument(name: str) -> str:
    """Return the help text of an argument of the command that runs, as part of a sentence."""
    if output.command is None:
        return ""
    known = output.command.assemble_argument_collection(parse_docstring=True)
    text = next((each.parameter.help or "" for each in known if each.name == name), "")
    first = re.split(r"[.;] |\[", " ".join(text.split()))[0].rstrip(". ")
    return first[:1].lower() + first[1:]


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    note(str(message))


def _describe_missing_extra(error: BaseException) -> str:
    """Return the pip command that installs what an import lacks; raise any other error again."""
    cause: BaseException | None = error
    while cause is not None:
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and package in EXTRAS:
            title, extra = EXTRAS[package]
            return f"this command needs {title}: pip install 'fedgft[{extra}]'"
        cause = cause.__cause__
    raise error


def _versions() -> str:
    found = [f"fedgft {_version()}", f"Python {python_version()}"]
    for name in ("torch", "numpy", "numba", "polars", "flwr"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows has no such module
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return f", {peak * unit / 1e6:,.0f} MB of memory at most"
