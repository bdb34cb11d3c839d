"""What a command shows while it works: `build_progress`, the units of a build; `transfer_progress`, the blobs of a push
or fetch."""
