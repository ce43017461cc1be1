"""Trace files on disk and in the package."""
