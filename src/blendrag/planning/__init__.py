"""The loading controller (CacheBlend §5.1): what to load, what to compute, at which ratio and why."""
