"""Recorded workloads: lengths, times and block ids of real requests, and token ids that stand in for their texts."""
