"""Types of `propagation_rules.build`."""
