"""All that touches the operating system: files, locks, mappings, memory, threads, paths, interrupts."""
