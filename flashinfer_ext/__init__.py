"""What sglang-beacon adds to FlashInfer: JIT variants of its attention, and their Python halves.

Each operation is in four files: the call (`per_head_decode.py`, `beacon_logits.py`), how its module
is built (`modules.py`), its CUDA source (`csrc/`), and its torch twin (in `sglang_beacon.ops`).
"""
