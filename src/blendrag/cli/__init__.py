"""The ``blendrag`` command: parse options, call the engine, print.

Importing this room loads neither torch nor transformers, so ``blendrag --help`` answers at once.
"""
