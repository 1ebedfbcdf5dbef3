"""Faults for a mesh: what is killed when, and what must be as before."""
