"""The command line: a thin skin over the library. Heavy imports wait until they are needed."""

import os
import sys
import warnings
from io import TextIOWrapper


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 2 something the user can mend (said in one line), 3 a gap above the
    limit that --fail-above sets, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without our signs shows others
            stream.reconfigure(errors="replace")
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # also while modules are being imported
        _fail("interrupted; nothing was left half-written", code=130)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        _fail("not enough memory for this; try fewer groups, classes, bins or runs")
    except OSError as error:
        _fail(f"{error.filename or 'stdout'}: {error.strerror}")


def _run(arguments: list[str]) -> None:
    from cyclopts import CycloptsError

    from fedgft.cli.commands import app
    from fedgft.cli.console import note
    from fedgft.errors import FedgftError

    warnings.showwarning = lambda *about, **rest: note(str(about[0]))
    try:
        app.meta(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )  # fmt: skip
    except (FedgftError, CycloptsError) as error:
        _fail(" ".join(str(error).split()))


def _fail(message: str, *, code: int = 2) -> None:
    from fedgft.layout import printable

    sys.stderr.write(f"fedgft: {printable(message)}\n")
    sys.exit(code)
