"""What the numbers in docs/LOG.md were measured with."""
