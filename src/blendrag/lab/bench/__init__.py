"""Speed, measured side by side: ratios within one run, modes interleaved, medians.

Nothing here is imported by the engine; it measures through the same public rooms a query uses.
"""
