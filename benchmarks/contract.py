"""What two runs must have in common before their numbers may stand in one table.

RECAS (section 5) asks that only the method differs: the same checkpoint, context, memory, hardware,
software, decoding and seeds. `Contract` is that agreement, stored with every result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions


class ContractError(ValueError):
    """Two runs cannot be compared; names the field and both values."""


@dataclass(frozen=True)
class Contract:
    """The agreement under which a run took place.

    Attributes
    ----------
    suite, task
        What was asked, with all parameters of the task.
    items
        How many, and by which seeds they were drawn.
    checkpoint
        SHA-256 of the model's weights.
    dtype
        Of weights and cache.
    context
        Most tokens a request may see.
    memory_budget
        Tokens that each request may hold; None for the run that keeps everything.
    cache
        What all policies share: what counts as held, what is always kept, what an eviction leaves.
    flags
        Of the server, besides those of the policy.
    decoding
        Temperature, top-p and new tokens; where tokens are drawn, by which seed.
    hardware
        GPU, CPU and cores.
    versions
        Python, SGLang, torch, triton, and this project.
    commit
        Of this project.
    """

    suite: str
    task: Mapping[str, Any]
    items: Mapping[str, Any]
    checkpoint: str
    dtype: str
    context: int
    memory_budget: int | None
    cache: Mapping[str, Any]
    flags: Sequence[str]
    decoding: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    commit: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def machine() -> dict[str, Any]:
    """The fields of a contract that are the same for all runs of a process."""
    now = conditions()
    return {
        "hardware": {key: now[key] for key in ("gpu", "cpu", "cores")},
        "versions": {
            key: now[key] for key in ("python", "sglang", "torch", "triton", "sglang-beacon")
        },
        "commit": now["commit"],
    }


def checkpoint_hash(model: Path) -> str:
    """SHA-256 over the weight files of a Hugging Face directory, in the order of their names.

    Raises
    ------
    FileNotFoundError
        When there are none.
    """
    files = sorted((*model.glob("*.safetensors"), *model.glob("*.bin")))
    if not files:
        raise FileNotFoundError(f"no weights in {model}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def require_same(
    first: Mapping[str, Any], other: Mapping[str, Any], apart_from: Collection[str] = ()
) -> None:
    """Refuse two contracts that differ in anything, ``apart_from`` some fields.

    A run that keeps everything has no memory budget and may stand beside any, as what the others
    are measured by.

    Raises
    ------
    ContractError
        Naming the first field that differs, or is missing.
    """
    for field in (each.name for each in fields(Contract) if each.name not in apart_from):
        for contract in (first, other):
            if field not in contract:
                raise ContractError(f"a run does not say its {field}")
        a, b = first[field], other[field]
        if field == "memory_budget" and None in (a, b):
            continue
        if a != b:
            raise ContractError(f"{field} differs: {_difference(a, b)}")


def _difference(a: Any, b: Any) -> str:
    """The smallest part in which two values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                return f"{key} is {_difference(a.get(key), b.get(key))}"
    return f"{a!r} in one run, {b!r} in the other"
