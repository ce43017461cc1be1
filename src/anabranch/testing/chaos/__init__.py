"""The campaign that tries to make a cluster answer wrongly: seeded traffic, faults, a judge that knows every answer.

workload    what is asked, and what the answer must be
faults      what goes wrong at which named step
judge       right, refused, cancelled, lost or wrong
report      figures of a campaign
live/       the rigs: one process with injected faults, many processes with signals
"""
