"""The only package that knows SGLang: seams, checks and the CPU platform."""
