"""The bytes of a store, and what they mean; no file is opened here (docs/format/spec.md)."""
