"""Benches: ratios of times within one run, from medians of interleaved rounds.

One file per bench has its command, its result, its table and its measurement.
"""
