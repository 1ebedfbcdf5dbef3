"""Custody of a node's slabs, and the keeper beside it. README.md has what it owns and promises."""
