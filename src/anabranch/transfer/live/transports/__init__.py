"""Implementations of `transfer.transport`, chosen by name."""
