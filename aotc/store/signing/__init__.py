"""Signatures of bundles: keys, the signatures in cosign's format, and which of them a load trusts."""
