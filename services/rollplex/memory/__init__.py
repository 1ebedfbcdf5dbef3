"""Slabs as an engine sees them: drivers, mappings, views, pools, the broker's client. README.md has the API."""
