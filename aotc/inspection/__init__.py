"""Looking at what is in a store: typed data for people to read. Printing is the command line's."""
