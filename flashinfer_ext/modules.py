"""How FlashInfer builds our variants: one description each, named by what it contains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "csrc"


@dataclass(frozen=True)
class Variant:
    """An attention variant in FlashInfer's terms.

    Attributes
    ----------
    struct : str
        Name of the C++ struct.
    source : str
        File in ``csrc/`` that defines it.
    tensors : tuple of (name, C type)
        What `run` takes besides queries and cache, in this order.
    scalars : tuple of (name, C type)
        What it takes after those.
    """

    struct: str
    source: str
    tensors: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, str], ...]

    def jit_args(self, dtype: torch.dtype, head_dim: int) -> list[Any]:
        """Arguments of FlashInfer's ``gen_customize_batch_*_module`` and of its wrappers.

        The name ends in a hash of the source, so that a module built from another is never taken.
        """
        declaration = (SOURCES / self.source).read_text()
        short = str(dtype).removeprefix("torch.")
        described = repr((declaration, self.tensors, self.scalars))
        digest = hashlib.sha256(described.encode()).hexdigest()[:12]
        return [
            f"beacon_{self.struct.lower()}_{short}_{head_dim}_{digest}",
            dtype,
            dtype,
            dtype,
            torch.int32,
            head_dim,
            head_dim,
            [name for name, _ in self.tensors],
            [kind for _, kind in self.tensors],
            [name for name, _ in self.scalars],
            [kind for _, kind in self.scalars],
            self.struct,
            declaration,
        ]


MASKED_DECODE = Variant(
    "MaskedDecode",
    "masked_decode.cuh",
    tensors=(("row_lengths", "int32_t"),),
    scalars=(("sm_scale", "double"),),
)
LOGITS_DECODE = Variant(
    "LogitsDecode",
    "logits_decode.cuh",
    tensors=(("logits", "float"),),
    scalars=(("sm_scale", "double"), ("width", "int64_t")),
)
