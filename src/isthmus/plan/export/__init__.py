"""Export of plans to Megatron-LM, torchtitan and the Isthmus runtime, and analysis of their logs.

See `docs/guide/export.md` and `docs/design/exports.md`.
"""
