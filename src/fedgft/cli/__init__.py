"""The command line: a thin layer over the library.

`main` imports nothing but the standard library before it has set its signal handler.
"""

import atexit
import signal
import sys
from threading import current_thread, main_thread
from types import FrameType


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit.

    Exit codes: 0 done, 2 an error that the user can fix (printed in one line), 3 a gap above the
    limit that --fail-above sets, 4 a missed target with --strict, 130 interrupted.

    Parameters
    ----------
    arguments
        The words after `fedgft`; None: those that the process was started with.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    # The handler stays where SIGINT is ignored (in the background); threads receive no signals.
    replaced = previous is signal.default_int_handler and current_thread() is main_thread()
    try:
        if replaced:
            signal.signal(signal.SIGINT, interrupt)
        # Imported here because it takes a while, and an interrupt may arrive in the meantime.
        from fedgft.cli.app import run

        run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        _exit_interrupted()
    except Exception:
        if not received:
            raise
        _exit_interrupted()  # C extensions turn the interrupt into errors of their own
    finally:
        if replaced:
            signal.signal(signal.SIGINT, previous)
            # All files are written when Python exits: an interrupt would only look like a failure.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def interrupt_on_termination() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that a command ends its processes first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            signal.signal(number, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _exit_interrupted() -> None:
    sys.stderr.write("fedgft: interrupted; nothing was left half-written\n")
    sys.exit(130)
