"""The contents of a store as typed data for people to read. The command line prints it."""
