"""A freshly compiled unit, run once before anything is published. As in a service, no compiler is imported here."""
