"""Measurements that can be repeated. Every command adds rows to a file of bench/results/, and writes tables
beside it.

attention/        python -m bench.attention: attention alone beside its peers; bench.attention.host: the host's time
train_step.py     python -m bench.train_step: whole training steps beside nanoGPT's, which nanogpt.py measures
several_gpus.py   python -m bench.several_gpus: training steps on 1, 2 and 4 GPUs, their speed and their bits
kernels/          python -m bench.kernels: the compiled GPU kernels, and the record of what they use
mixers.py         python -m bench.mixers: mixers judged and timed on a GPU; decays.py draws how long they remember
tables.py         python -m bench.tables: pastes tables of bench/results/ into README and docs/
sizes.py          python -m bench.sizes: the size of each package beside its budget

measure.py times calls in turns, machine.py names the machine and the software, record.py reads and writes result files.
"""
