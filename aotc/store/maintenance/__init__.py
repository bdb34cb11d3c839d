"""`aotc gc` and `aotc fsck`: a mark-and-sweep over a store, and a checker of every byte."""
