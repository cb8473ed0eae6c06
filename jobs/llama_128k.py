"""The flagship: supervised fine-tuning of a Llama on sequences of 131 072 tokens, on 8 accelerators by default.

    ray job submit --working-dir . -- python jobs/llama_128k.py --data /shared/train.jsonl --output-dir /shared/runs/one
    python jobs/llama_128k.py --preset tiny        # the same path at the true length, on CPU
    python jobs/llama_128k.py --preset smoke       # 8 192 tokens, under two minutes on two cores

Every number is a flag (--help). The job reads flags and calls `raycp.fit`; the same command again continues the run.
Exit status: 0 done, 1 the run failed or was stopped, 2 the flags or the machine cannot make a run.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.flags import add_config_flags, config_from_flags
from jobs.presets import PRESETS, library_rows, missing_accelerators
from raycp.config import FitConfig
from raycp.errors import ConfigError, RaycpError

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""131 072 positions. Needs a download from the hub, or --model with a folder."""


def main(argv: list[str] | None = None) -> int:
    """Runs the job with the flags of `argv`; returns the exit status."""
    preset_flag = argparse.ArgumentParser(add_help=False)
    preset_flag.add_argument("--preset", choices=PRESETS, help="defaults for a machine without accelerators")
    name = preset_flag.parse_known_args(argv)[0].preset
    preset = PRESETS[name] if name else None
    defaults = preset.config() if preset else FitConfig(workers=8)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[preset_flag]
    )
    parser.add_argument("--model", help=f"folder or hub id; default: {MODEL}, or the preset's own")
    parser.add_argument("--data", nargs="+", help="files or globs; default: the standard library's sources as text")
    parser.add_argument("--tokenizer", help="folder or hub id; default: the model's own")
    parser.add_argument(
        "--output-dir",
        default=f"~/raycp-runs/llama_128k{'-' + name if name else ''}",
        help="on storage that all nodes share; default: %(default)s",
    )
    add_config_flags(parser, defaults)
    flags = parser.parse_args(argv)
    config = config_from_flags(flags, defaults)

    try:
        config.validate()
        missing = missing_accelerators(config)
        if missing:
            print(missing, file=sys.stderr)
            return 2
        from raycp import fit

        made = preset.make(flags.output_dir, config) if preset else None
        result = fit(
            model=flags.model or (made.model if made else MODEL),
            data=flags.data or (made.data if made else library_rows(config.seq_length)),
            tokenizer=flags.tokenizer or (made.tokenizer if made and not flags.model else None),
            output_dir=flags.output_dir,
            config=config,
        )
    except RaycpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for step, loss in result.losses.items():
        print(f"step {step}: loss {loss:.4f}")
    print(
        f"output: {result.output_dir}\nmodel:  {result.export_path or 'not yet: stopped; the same command continues'}"
    )
    return 0 if result.export_path else 1


if __name__ == "__main__":
    sys.exit(main())
