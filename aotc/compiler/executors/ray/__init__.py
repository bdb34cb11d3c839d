"""Units as tasks of a Ray cluster."""
