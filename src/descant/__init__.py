"""Federated learning for parties that differ."""
