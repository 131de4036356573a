"""Many machines: ingest on Ray Data, replicas of the server on Ray Serve; extra ``blendrag[ray]``."""
