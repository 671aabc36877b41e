"""Real servers, small models and an independent view of the scheduler, for tests and benchmarks."""
