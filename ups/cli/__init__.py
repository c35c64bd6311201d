"""The commands of `ups`."""
