"""Prompts, samples, export: what can be checked of them without torch."""
