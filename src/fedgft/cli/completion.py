"""`fedgft completion`: what a shell needs to complete our commands and options."""

import sys
from typing import Literal

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell, /) -> None:
    """Print a script that lets a shell complete commands, options and choices.

    Parameters
    ----------
    shell
        The shell it is for. Nothing is installed: source it, or put it where the shell looks.
    """
    from fedgft.cli.commands import app

    sys.stdout.write(app.generate_completion(prog_name="fedgft", shell=shell))
