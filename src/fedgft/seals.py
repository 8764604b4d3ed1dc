"""JSON that knows whether it is whole: what a run kept for the next is trusted only so."""

import hashlib
import json
from typing import Any


def sealed(value: dict[str, Any], key: str) -> str:
    """JSON with its own digest in it, so that a damaged file is known for one."""
    body = json.dumps(value, allow_nan=False)
    return json.dumps({"key": key, "digest": hashlib.sha256(body.encode()).hexdigest(), **value})


def unsealed(text: str, key: str) -> dict[str, Any]:
    """What was sealed; ValueError where the text is anything else."""
    try:
        kept = json.loads(text)
        if kept.pop("key") != key:
            raise ValueError("sealed for another key")
        digest, body = kept.pop("digest"), json.dumps(kept, allow_nan=False)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not sealed by us") from error
    if digest != hashlib.sha256(body.encode()).hexdigest():
        raise ValueError("damaged")
    return kept
