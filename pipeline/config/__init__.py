"""The config of a Run: its sections, its rules, and YAML as people write it."""
