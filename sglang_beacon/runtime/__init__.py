"""What a request's compression remembers and decides, independent of any engine."""
