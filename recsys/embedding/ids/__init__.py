"""Tables for ids that are not known beforehand: each id has a row of its own, given out as ids come."""
