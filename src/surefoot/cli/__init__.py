"""The command line: it parses arguments and prints results."""
