"""The processes of a build: the fork server, a unit's worker, and what they report."""
