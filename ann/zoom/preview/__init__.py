"""The preview: compressed vectors in DRAM and their scan."""
