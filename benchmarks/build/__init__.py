"""From source files to stores."""
