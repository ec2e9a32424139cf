from propagation_rules.build.classes import *
