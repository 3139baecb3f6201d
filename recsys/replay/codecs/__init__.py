"""Codecs of the fields of samples."""
