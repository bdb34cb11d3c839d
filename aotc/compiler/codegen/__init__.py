"""From a graph to a library: Inductor's options, and AOTInductor's call."""
