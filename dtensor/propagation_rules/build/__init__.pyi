"""Types of `propagation_rules.build`."""

from propagation_rules.build import *
