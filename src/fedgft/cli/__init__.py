"""The command line: a thin skin over the library. Heavy imports wait until they are needed."""

import os
import sys
import warnings
from io import TextIOWrapper

from cyclopts import App, CycloptsError

from fedgft.cli import (
    audit,
    compare,
    data,
    demo,
    deploy,
    frontier,
    measure,
    predict,
    reproduce,
    train,
)
from fedgft.cli.console import note
from fedgft.layout import printable
from fedgft.types import FedgftError

app = App(
    name="fedgft",
    help="Measure and train group fairness in federated learning.",
    version=lambda: _version(),
    suppress_keyboard_interrupt=False,  # main has something to say about it
)
for command in (
    demo.demo, train.train, compare.compare, frontier.frontier, predict.predict, measure.measure,
    audit.audit, reproduce.reproduce,
):  # fmt: skip
    app.command(command)
app.command(data.app)
app.command(deploy.app)


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 2 something the user can mend (said in one line), 3 a gap above the
    limit that --fail-above sets, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without our signs shows others
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda *about, **rest: note(str(about[0]))
    try:
        app(
            sys.argv[1:] if arguments is None else arguments,
            exit_on_error=False, print_error=False,
        )  # fmt: skip
        sys.stdout.flush()
    except (FedgftError, CycloptsError) as error:
        _fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was left half-written", code=130)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        _fail("not enough memory for this; try fewer groups, classes, bins or runs")
    except OSError as error:
        _fail(f"{error.filename or 'stdout'}: {error.strerror}")


def _fail(message: str, *, code: int = 2) -> None:
    sys.stderr.write(f"fedgft: {printable(message)}\n")
    sys.exit(code)


def _version() -> str:
    from importlib.metadata import version

    return version("fedgft")
