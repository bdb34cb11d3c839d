"""What only records with ranges, padded inputs need: the rest of the dispatch rule, pads and crops."""
