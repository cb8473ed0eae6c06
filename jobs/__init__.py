"""Runnable jobs, one file each, never part of the wheel.

quickstart.py    the demo: a real 135M Llama, two workers, cp = 2, on any CPU
llama_128k.py    the flagship: 131 072 tokens on 8 accelerators, every number a flag
presets.py       the flagship's CPU presets: a small random Llama, a tokenizer and packed real text, made on the spot
flags.py         command-line flags for every field of raycp.FitConfig
stdlib_rows.py   training rows out of the standard library: chats from docstrings, long documents from source files
"""
