"""Patches of bugs in torch.export and Inductor."""
