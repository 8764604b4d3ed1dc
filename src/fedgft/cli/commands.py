"""Every command, under one name, and what becomes of its errors."""

import os
import sys
import time
import warnings
from io import TextIOWrapper
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter

from fedgft.cli import (
    audit,
    compare,
    completion,
    data,
    demo,
    deploy,
    frontier,
    measure,
    predict,
    reproduce,
    train,
)
from fedgft.cli.console import note, voice
from fedgft.cli.examples import CODES, EXAMPLES, shown
from fedgft.cli.names import Flag
from fedgft.errors import FedgftError
from fedgft.layout import printable


def _version() -> str:
    from importlib.metadata import version

    return version("fedgft")


app = App(
    name="fedgft",
    help="Measure and train group fairness in federated learning.",
    help_epilogue=f"{shown('fedgft')}\n\n{CODES}",
    help_format="plaintext",
    version=_version,
)
for each in (app, app.meta):
    each.suppress_keyboard_interrupt = False  # main has something to say about it
ANYWHERE = Group("With any command", sort_key=99)
GROUPS = {
    "Look around": (demo.demo, data.app, reproduce.reproduce),
    "Measure": (measure.measure, audit.audit),
    "Train": (train.train, compare.compare, frontier.frontier, predict.predict, deploy.app),
    "Shell": (completion.completion,),
}
for place, (title, commands) in enumerate(GROUPS.items()):
    group = Group(title, sort_key=place)
    for command in commands:
        if isinstance(command, App):
            command.help_epilogue, command.group = shown(command.name[0]), (group,)
            app.command(command)
        else:
            app.command(command, help_epilogue=shown(command.__name__), group=group)
for part in (data.app, deploy.app):
    for name in part:
        if (full := f"{part.name[0]} {name}") in EXAMPLES:
            part[name].help_epilogue = shown(full)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    quiet: Annotated[bool, Flag, Parameter(name=("--quiet", "-q"), group=ANYWHERE)] = False,
    verbose: Annotated[bool, Flag, Parameter(name=("--verbose", "-v"), group=ANYWHERE)] = False,
) -> None:
    """Run a command.

    Parameters
    ----------
    quiet
        No notes and no progress, only results and errors.
    verbose
        Versions, progress also in a log, seconds and memory at the end.
    """
    if quiet and verbose:
        raise FedgftError("--quiet and --verbose: one of the two")
    voice.quiet, voice.verbose, began = quiet, verbose, time.monotonic()
    if verbose:
        note(_about())
    app(tokens, exit_on_error=False, print_error=False)
    if verbose:
        note(f"{time.monotonic() - began:.1f} s{_memory()}")


def run(arguments: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without our signs shows others
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda *about, **rest: note(str(about[0]))
    try:
        app.meta(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )  # fmt: skip
        sys.stdout.flush()
    except (FedgftError, CycloptsError) as error:
        _fail(" ".join(str(error).split()))
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        _fail("not enough memory for this; try fewer groups, classes, bins or runs")
    except OSError as error:
        # Our files name themselves, so what the system says without a name is about stdout.
        where = error.filename or ("" if error.errno is None else "stdout")
        _fail(f"{where}: {error.strerror}" if where else str(error))


def _fail(message: str) -> None:
    sys.stderr.write(f"fedgft: {printable(message)}\n")
    sys.exit(2)


def _about() -> str:
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    found = [f"fedgft {_version()}", f"Python {python_version()}"]
    for name in ("torch", "numpy", "numba", "polars", "flwr"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _memory() -> str:
    try:
        import resource
    except ImportError:  # not on every system
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return f", {peak * unit / 1e6:,.0f} MB of memory at most"
