"""Lets the tests of this folder import their canned run."""

from __future__ import annotations


