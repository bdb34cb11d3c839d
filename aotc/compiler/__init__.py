"""From a manifest to variants: plan the units, capture, compile, check each in a fresh process, publish."""
