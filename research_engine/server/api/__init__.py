"""The endpoints, one file a family."""
