"""Tools for study, never imported by the server: traces, diagnostics, small models and plots."""
