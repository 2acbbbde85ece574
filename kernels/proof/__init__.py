"""Every operator proves itself on the device it will run on, before a server takes requests.

`inputs` and each operator's `proof.py` say on what, `judge` what is asked of an implementation, `child` runs it in a
process that may die of it, `proving` several at a time; `kept_proofs` keeps what was proven, so that only the first
start of a version waits.
"""
