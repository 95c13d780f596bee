"""Measurements that can be repeated. Every command adds rows to a file of bench/results/.

attention/     python -m bench.attention: attention alone beside its peers; its kernels, tiles, bytes and softmax
train_step/    python -m bench.train_step: whole training steps beside nanoGPT's
several_gpus/  python -m bench.several_gpus: training steps on 1, 2 and 4 GPUs, their speed and their bits
generate/      python -m bench.generate: tokens per second; attention to a cache
experiments/   python -m bench.experiments: the runs of train.py that the documents show
tables/        python -m bench.tables: the tables and figures of README and docs/, from bench/results/
release/       python -m bench.release: measures all of this in parts, and lists the parts that are out of date

measure.py times calls in turns, machine.py names the machine and the software, record.py reads and writes result files,
kernels/ gives each result the digests of its GPU kernels, runs.py starts train.py, markdown.py formats tables.
"""
