"""Looking at what is in a store."""
