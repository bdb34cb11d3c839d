"""Bugs of Inductor with numbers: powers, quotients, complex numbers, a loss, matrix products of particular dtypes."""
