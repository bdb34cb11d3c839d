"""What only records with ranges, padded inputs need.

The rest of the dispatch rule (`rules`), pads and crops (`padded_tensors`), and calls of a model by regions
(`padded_regions`).
"""
