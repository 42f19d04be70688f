"""Skeletons of what users write themselves."""
