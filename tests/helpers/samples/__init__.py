"""Tables of samples for the laws, one file for each family of rules."""
