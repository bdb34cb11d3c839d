"""A repository of an OCI registry as a remote."""
