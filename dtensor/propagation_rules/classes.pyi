from propagation_rules.classes import *
