"""Items of many vectors, found by MaxSim (late interaction): bounds from token codes in DRAM, exact tokens on SSD."""
