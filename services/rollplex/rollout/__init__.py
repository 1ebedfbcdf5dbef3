"""Rollout: samples responses under one snapshot. Start with README.md."""
