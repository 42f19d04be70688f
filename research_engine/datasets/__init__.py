"""Files of public data sets, read record by record: what experiments and load generators share."""
