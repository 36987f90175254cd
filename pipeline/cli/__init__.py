"""The command line: verbs that parse, call and print."""
