"""Prompt Cache: prompts assembled from the known parts of a schema (Gim et al., MLSys 2024).

``markup.py`` parses schemas and prompts into the nodes of ``nodes.py``. ``checking.py`` checks a prompt
against its schema and puts its parts (``parts.py``) in reading order. ``layout.py`` gives every part its
positions. ``programs.py`` makes schemas from Python functions. None of these needs a model: lengths come from
a function that counts the tokens of a text.
"""
