"""How a plan is carried out on this rank's local tensors: pack the send regions, one collective, unpack what arrived.

Start with `run.redistribute_local`; `steps` has each kind of step, `copies` what lies around a collective. Every step
has one way, and for large tensors on gloo, and some on NCCL, a second one without a buffer: `unbuffered`.
"""

from __future__ import annotations
