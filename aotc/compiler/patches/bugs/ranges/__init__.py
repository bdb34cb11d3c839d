"""Bugs of Inductor and torch.export with ranges of sizes."""
