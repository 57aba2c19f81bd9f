"""Shared parts of the benchmarks: presets, timing, ceilings, and records of results."""
