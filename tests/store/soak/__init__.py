"""What tries to break the store: kills, damage, failing system calls, power cuts.

The same code at small counts in the tests beside this package, and at large counts in ``make soak``
(``python -m soak``). ``kills`` ends writers at random moments, ``damage`` and ``mutations`` change
files behind the store's back, ``tracer`` stops a process at every system call below a directory,
with which ``faults`` fails them one by one and ``power`` loses what was not yet on disk. ``audit``
says what a store must still be afterwards, ``report`` counts.
"""
