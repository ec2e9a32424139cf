from propagation_rules.loss import *
