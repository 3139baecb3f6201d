"""Tables of several widths: rows of about one width share a tier, and the tiers of a collection share a store."""
