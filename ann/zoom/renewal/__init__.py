"""The life of an index: additions, removals, merges and renewals."""
