"""Models of recommendation in torch alone: each returns the loss of a batch from the rows that were looked up."""
