"""A corpus that one machine publishes in an object store and others follow."""
