"""Rigs of the campaign: real sockets, real processes."""
