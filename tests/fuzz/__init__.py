"""Random programs, run on plain tensors and on DTensors side by side.

    make fuzz FUZZ="--programs 2000 --mesh 2x3"       simulated ranks; --gloo: real processes
    make fuzz FUZZ="--seed 17 --programs 1 --show"    one program as it is printed

A program is a list of lines of Python over tensors t0, t1, ..., drawn from a seed (`fuzz.draw`) out of a table of
calls (`calls.txt`) by running it on plain tensors: what plain torch refuses is left out. Views share memory, writes go
through them, tensors are moved between layouts, and values decide what comes next.

`fuzz.judge` runs it on DTensors whose values, shapes, dtypes, gradients and Python values must be those of plain torch,
after every step or, so that reading mends nothing, at the end only; which of the two belongs to the program. A refusal
is an error of ours, the same on all ranks, that has changed nothing; the program goes on without that step, and it is
counted. Anything else is wrong, and `fuzz.shrink` looks for the smallest program that is wrong in the same way, and
prints it as a script that runs by itself.

How far rounding may take a value is measured, by runs of the plain program whose values are moved off at each step.
"""
