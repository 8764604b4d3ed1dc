"""Every reader of outside data, as a function of bytes, with files to begin from.

`TARGETS` is shared by tests/test_fuzz.py (Hypothesis, seconds) and hardening/fuzz.py (atheris,
as long as you like). A target may raise `FedgftError` and nothing else. Of the files in
seeds/TARGET, those called good-... were made by our own writers and must be read without an error;
those called found-... once led to another error, and stay here so that they never do again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedgft.errors import FedgftError

SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Target:
    name: str
    read: Callable[[bytes], object]
    form: str = "bytes"  # or "text", "json", "lines" (of JSON), "safetensors": how it is damaged

    def accepts(self, data: bytes) -> bool:
        """Whether it is read. Whatever is raised besides our own error is a fault of ours."""
        try:
            self.read(data)
        except FedgftError as error:
            if not str(error).strip():
                raise AssertionError("an error without a word") from error
            return False
        return True

    def seeds(self, kind: str = "") -> list[Path]:
        return sorted((SEEDS / self.name).glob(f"{kind}*"))


def targets() -> dict[str, Target]:
    """By name; imported here, since torch and Flower take their time."""
    from fuzzing import messages, saved_files, site_files, tables

    found = [*tables.TARGETS, *site_files.TARGETS, *saved_files.TARGETS, *messages.TARGETS]
    return {target.name: target for target in found}
