"""What a command shows while it works: `build`, the units of a build; `transfer`, the blobs of a push or fetch."""
