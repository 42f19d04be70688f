"""Virtual time and cost models: what stands in for a device under the unchanged engine. Imports no torch."""
