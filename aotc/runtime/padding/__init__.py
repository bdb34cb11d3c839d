"""What only records with padded inputs need: pads and crops (`padded_tensors`), and calls of a model by regions
(`padded_regions`)."""
