"""The loader: from a reference to a callable, with no compiler in the process."""
