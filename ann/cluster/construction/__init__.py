"""The build of the shards of an index: from vectors at hand, from files or a Ray Dataset, and from other shards."""
