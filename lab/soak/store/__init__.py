"""Stress tests of the store: kills, damaged files, failing system calls and power cuts.

The tests of the store run them with small counts, ``make soak`` (``python -m lab.soak.store``) with large
ones. ``kills`` kills writers at random moments; ``fuzz`` applies the ``damage``; ``faults`` fails system
calls and cuts the power with the help of ``tracer`` and ``power``. ``audit`` checks the store afterwards
and counts failures; ``children`` runs the processes.
"""
