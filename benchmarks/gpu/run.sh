#!/usr/bin/env bash
# Everything that needs a GPU, in under four minutes: are the kernels right, how fast are they, and
# what does a decode loop gain. With --dry-run, the same calls on a CPU, small.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD"
PYTHON="${PYTHON:-python3}"

if [[ "${1:-}" != "--dry-run" ]]; then
    "$PYTHON" -m pytest -q tests/ops -k kernel
    "$PYTHON" -m pytest -q tests/flashinfer_ext tests/runtime/test_active_batch.py
fi
"$PYTHON" -m benchmarks.gpu.kernels "$@"
"$PYTHON" -m benchmarks.gpu.decode "$@"
