"""Rules held to numbers.

    parts       cutting full tensors into the parts of a layout, putting parts together, comparing
    recorded    one call of an aten op, as torch made it
    samples     calls from torch's database of operators, or from shapes given
    truth       every strategy of a rule gives the plain op's value
    missing     rows that would be right without communication and that a rule does not offer
    keys        arguments that matter are in the key of a cached plan
    reasons     why missing rows are missing
    sweep       many ops in several processes, a summary
    count       all rules as text, which overloads they cover, and what they cost in lines
    shown       one rule, as it is for one call

`python -m dtensor.propagation_rules` is the command line. Nothing here is loaded by the engine.
"""

from dtensor.folders import also_called

also_called(__name__)
