"""What models are asked in `benchmarks.quality`: one suite per module."""
