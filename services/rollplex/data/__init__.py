"""Datasets, media decoding and the checkpoint's processor: from a data file to token ids and pixel patches."""
