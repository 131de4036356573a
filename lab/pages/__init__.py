"""Writers of docs/quality.md, docs/performance.md and their figures."""
