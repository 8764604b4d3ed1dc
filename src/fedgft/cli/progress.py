"""How far it is: a bar on a terminal; in a log nothing, or with --verbose a line a tenth."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.text import Text

from fedgft.cli.console import err, note, voice

if TYPE_CHECKING:
    from rich.progress import Progress

LINES = 10  # that a log gets of one piece of work


@dataclass
class Bar:
    """One bar over all the work, with the time that is left."""

    progress: Any
    task: Any = None
    fetches: dict[str, Any] = field(default_factory=dict)
    said: dict[Any, int] = field(default_factory=dict)  # lines in a log so far, by task

    def expect(self, total: int, *, images: int | None = None) -> None:
        """`images`: those that one piece of the work reads, if it is images."""
        self.task = self.progress.add_task("training", total=total, images=images)

    def advance(self, what: str, amount: int) -> None:
        """`amount` more is done; where that is more than was expected, the bar grows."""
        task = self.progress.tasks[self.task]
        total = None if task.total is None else max(task.total, task.completed + amount)
        self.progress.update(self.task, description=escape(what), advance=amount, total=total)
        self._log(self.task, what)

    def rows(self, done: int) -> None:
        """How far a table has been read; how long it is, nobody knows yet."""
        if self.task is None:
            self.task = self.progress.add_task("", total=None)
        self.progress.update(self.task, description=f"{done:,} rows read")

    def fetch(self, what: str, done: int, total: int | None) -> None:
        if what not in self.fetches:
            self.fetches[what] = self.progress.add_task(escape(what), total=total)
        self.progress.update(self.fetches[what], completed=done, total=total)
        self._log(self.fetches[what], what)

    def _log(self, task: Any, what: str) -> None:
        found = self.progress.tasks[task]
        if not voice.verbose or err.is_terminal or not found.total:
            return
        tenth = int(LINES * found.completed / found.total)
        if tenth > self.said.get(task, 0):
            self.said[task] = tenth
            note(f"{100 * tenth // LINES:3d}% {what}")


@contextmanager
def bar() -> Iterator[Bar]:
    with _progress() as progress:
        yield Bar(progress)


def _progress() -> "Progress":
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class Speed(ProgressColumn):
        """Images a second, where images are what is read."""

        def render(self, task: Task) -> Text:
            each = task.fields.get("images")
            speed = task.speed or (task.elapsed and task.completed / task.elapsed)
            return Text(f"{each * speed:,.0f} images/s" if each and speed else "")

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), Speed(),
    )  # fmt: skip
    hidden = voice.quiet or not err.is_terminal  # a bar in a log file is noise
    return Progress(*columns, console=err, transient=True, disable=hidden)
