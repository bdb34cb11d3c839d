"""Bugs of Inductor with numbers: powers, quotients, complex numbers, and matrix products of particular dtypes."""
