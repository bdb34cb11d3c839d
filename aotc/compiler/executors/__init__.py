"""Executors compile the units of a build: on this machine's cores (`local`, once `host` finds that it can), or on a
cluster (`ray`). `executor`: their interface, and the order of units."""
