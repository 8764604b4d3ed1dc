"""What came out, held against what the paper claims: sentences made from records alone."""

from collections.abc import Callable, Iterator, Sequence

from fedgft.experiments.run import Record
from fedgft.report.claims.ablation import ablation, penalty, pure, strength
from fedgft.report.claims.finding import Finding
from fedgft.report.claims.table import fairfed, table1, trajectory

CLAIMS: dict[str, Callable[[Sequence[Record]], Iterator[Finding]]] = {
    "table1": table1, "penalty": penalty, "pure": pure, "trajectory": trajectory,
    "epochs": ablation, "lambda": strength, "lr": ablation, "clients": ablation,
    "fairfed": fairfed,
}  # fmt: skip

__all__ = ["CLAIMS", "Finding"]
