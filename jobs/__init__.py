"""Runnable jobs, one file each, never part of the wheel.

quickstart.py    the demo: a real 135M Llama, two workers, cp = 2, on any CPU
llama_128k.py    the flagship: 131 072 tokens on 8 accelerators, every number a flag
presets.py       the CPU presets of the flagship: a small random Llama, a tokenizer and packed real text, made on the spot
stdlib_rows.py   training rows out of the standard library: chats from docstrings, long documents from source files
"""
