"""Tables and figures of suites: what was to be run against the records there are."""
