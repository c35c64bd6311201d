"""Opening, reading, writing and checking stores."""
