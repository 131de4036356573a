"""The ``blendrag`` command: parse, call, print.

Owns nothing but words: options, sentences, exit statuses. Importing it loads neither torch nor
transformers, so that ``blendrag --help`` answers at once.
"""
