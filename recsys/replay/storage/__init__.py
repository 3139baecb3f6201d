"""Storage of samples: records, codecs and their index."""
