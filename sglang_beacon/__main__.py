"""``python -m sglang_beacon`` is the ``sglang-beacon`` command."""

from sglang_beacon.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
