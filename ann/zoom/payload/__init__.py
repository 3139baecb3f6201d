"""Documents stored with vectors: their form, their files, and the tables of hits that they come back in."""
