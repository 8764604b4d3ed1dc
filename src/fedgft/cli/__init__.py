"""The command line: a thin skin over the library. Heavy imports wait until they are needed."""

import atexit
import signal
import sys
from threading import current_thread, main_thread
from types import FrameType


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 2 something the user can mend (said in one line), 3 a gap above the
    limit that --fail-above sets, 4 a target that was missed, with --strict, 130 interrupted."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)
    # else: in the background, where it is ignored, or in a thread, which gets none
    ours = usual is signal.default_int_handler and current_thread() is main_thread()
    try:
        if ours:
            signal.signal(signal.SIGINT, interrupt)
        # In here, because it takes a moment and an interrupt may come in that moment too.
        from fedgft.cli.commands import run

        run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        _interrupted()
    except Exception:
        if not came:
            raise
        _interrupted()  # libraries in C make other errors of it: 'Invalid bounding box'
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)
            # When Python ends all is written, and an interrupt would only make a failure of it.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _interrupted() -> None:
    sys.stderr.write("fedgft: interrupted; nothing was left half-written\n")
    sys.exit(130)
