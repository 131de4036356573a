"""Replicas behind a router, simulated: more machines and larger corpora than can be measured."""
