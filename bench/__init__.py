"""Measurements that can be repeated. Every command adds rows to a file of bench/results/, and writes tables
beside it.

attention/     python -m bench.attention: attention alone beside its peers; bench.attention.formulas: score formulas
train_step/    python -m bench.train_step: whole training steps beside nanoGPT's
several_gpus/  python -m bench.several_gpus: training steps on 1, 2 and 4 GPUs, their speed and their bits
kernels/       python -m bench.kernels: the compiled GPU kernels, and the record of what they use
stack/         python -m bench.stack.kernels: compiles kernels with another release of Triton
tables.py      python -m bench.tables: pastes tables of bench/results/ into README and docs/

measure.py times calls in turns, machine.py names the machine and the software, record.py reads and writes result files,
runs.py starts train.py, markdown.py formats tables.
"""
