"""Ingest on Ray Data, replicas of the server on Ray Serve."""
