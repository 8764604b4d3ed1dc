"""The benchmark: tracks, methods, results sent in from outside, and the board that compares them.

Everything is computed from decisions per row: whatever made them, they are scored alike.
"""

from fedgft.errors import import_on_use

_MODULES = {
    "TRACKS": "fedgft.bench.tracks",
    "Track": "fedgft.bench.tracks",
    "TrackSplit": "fedgft.bench.tracks",
    "get_track": "fedgft.bench.tracks",
    "read_submission": "fedgft.bench.submissions",
    "score_submission": "fedgft.bench.submissions",
}
__all__ = list(_MODULES)
__getattr__ = import_on_use(__name__, _MODULES)
