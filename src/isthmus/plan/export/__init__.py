"""Plans for other training frameworks, and their logs read back: Megatron-LM, torchtitan, our own runtime.

See `docs/guide/export.md` and `docs/design/exports.md`.
"""
