"""What happens in a run, line by line, for whoever watches it from outside: progress.jsonl; and
the names of the other files that tell how far it came."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.files import open_private, refuse_link
from fedgft.flower.gather import log

FILE = "progress.jsonl"
CHECKPOINT, HISTORY, SCHEMA = "checkpoint.safetensors", "history.json", "schema.json"


class _Notices(logging.Handler):
    """Our own warnings (who was left out, and why) are part of the story."""

    def __init__(self, journal: "Journal") -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("fedgft: "):
            self.journal.tell({"note": text.removeprefix("fedgft: ")})


@dataclass
class Journal:
    """A round's row, {"note": ...} or, last, {"error": ...}; one JSON object a line."""

    folder: Path

    def tell(self, row: dict[str, Any]) -> None:
        with open_private(self.folder / FILE, "ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def __enter__(self) -> "Journal":
        refuse_link(self.folder, "out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedgftError(f"out {self.folder}: cannot be written ({error.strerror})") from None
        self._notices = _Notices(self)
        log.addHandler(self._notices)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        log.removeHandler(self._notices)
        if error is not None:
            said = (
                str(error) if isinstance(error, FedgftError) else f"{type(error).__name__}: {error}"
            )
            self.tell({"error": " ".join(said.split())})
