"""Commands on damaged files and with odd options: one sentence and exit code 2, or success, and nothing left behind.

`python -m tests.cli.fuzz 10000` (or `make fuzz`) tries many; `test_fuzz.py` a few hundred. Each case is known by its
number: `python -m tests.cli.fuzz --only 4711` shows it again, with its traceback.
"""
