"""What only records with padded inputs need: pads and crops (`padded_tensors`), outputs that share
memory (`cut_views`), and calls of a model by regions (`padded_regions`)."""
